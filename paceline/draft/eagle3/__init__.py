"""EAGLE-3 and 3.1: a small network that drafts token by token."""
