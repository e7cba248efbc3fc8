"""Servers under load: throughput and latency."""
