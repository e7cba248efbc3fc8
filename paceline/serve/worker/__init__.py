"""The engine's thread, and the queues between it and the event loop."""
