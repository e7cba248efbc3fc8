"""Converts the engine's events to response bodies and streams."""
