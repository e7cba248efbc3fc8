"""GGUF files: read as models, and written."""
