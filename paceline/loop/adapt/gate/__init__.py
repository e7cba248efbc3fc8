"""Training and gate: from a training window to a verdict."""
