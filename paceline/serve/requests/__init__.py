"""From a request's body to jobs for the engine."""
