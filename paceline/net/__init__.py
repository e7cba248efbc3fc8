"""HTTP clients, and a reader of Prometheus metrics."""
