"""Requests to HTTP servers, and their metrics."""
