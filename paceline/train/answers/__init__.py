"""Generates the target's answers to prompts: on this machine, on a Ray cluster, or on a remote server."""
