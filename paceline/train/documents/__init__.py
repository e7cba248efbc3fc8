"""Training documents made of the target's answers."""
