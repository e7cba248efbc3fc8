"""Plans a training run without loading weights."""
