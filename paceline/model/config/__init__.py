"""The decoder's config, parsed from a Hugging Face config.json."""
