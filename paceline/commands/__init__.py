"""What the commands do once their options are read: answers to stdout, everything about them to stderr."""
