"""Reads prompts, conversations and answers from files, and stores answers."""
