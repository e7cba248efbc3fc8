"""The engine on a port: an OpenAI-compatible endpoint."""
