"""Simulates a server under load."""
