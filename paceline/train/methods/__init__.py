"""Training code specific to each drafting method."""
