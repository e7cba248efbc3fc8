"""Targets that run in Transformers."""
