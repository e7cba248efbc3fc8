"""HTTP clients, a reader of Prometheus metrics, and a test for loopback addresses."""
