"""Answers as training documents."""
