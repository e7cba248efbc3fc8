"""Sandbox for code written by a model."""
