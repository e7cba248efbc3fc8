"""The plan of a training, made without loading a weight."""
