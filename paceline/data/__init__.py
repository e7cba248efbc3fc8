"""Prompts, conversations and answers: reading them from files, and storing answers."""
