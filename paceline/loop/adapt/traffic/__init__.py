"""Traffic by the hour: stored or made, its season, and drift."""
