"""The admin API, metrics and traces."""
