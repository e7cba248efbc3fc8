"""Reads and writes drafters in the file formats of other programs."""
