"""Tables, statistics and report pages of all commands."""
