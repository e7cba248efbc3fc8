"""A simulated server under load."""
