"""Request models, and conversion of requests to jobs for the engine."""
