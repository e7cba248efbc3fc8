"""The target answers prompts: here, on a Ray cluster, or on a server elsewhere."""
