"""The thread that owns the engine."""
