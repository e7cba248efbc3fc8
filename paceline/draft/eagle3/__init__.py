"""EAGLE-3 and 3.1: one layer that drafts token after token."""
