"""From the engine's events to the bodies and streams that clients read."""
