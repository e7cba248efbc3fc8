"""Predicts the gain of speculation without building anything: no PyTorch, no GPU (docs/explanation/prediction.md)."""
