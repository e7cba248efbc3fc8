"""What to do about an alarm."""
