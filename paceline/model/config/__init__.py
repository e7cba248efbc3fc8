"""What a decoder looks like, read from a Hugging Face config.json."""
