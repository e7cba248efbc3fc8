"""Makes synthetic training data for an application without traffic."""
