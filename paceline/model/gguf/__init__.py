"""Reads GGUF files as models, and writes them."""
