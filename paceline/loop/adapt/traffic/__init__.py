"""Hourly traffic, stored or synthetic: sums, season, drift."""
