"""Decision on how to react to an alarm."""
