"""Predict what speculation brings before anything is built: no torch, no GPU (docs/explanation/prediction.md)."""
