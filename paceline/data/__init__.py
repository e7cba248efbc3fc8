"""Prompts, conversations and answers: how they are read from files, and how answers are kept."""
