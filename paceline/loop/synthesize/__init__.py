"""Training data for an application without traffic."""
