"""Drafters' files in the formats of other programs."""
