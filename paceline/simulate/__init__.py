"""Predict what speculation brings before anything is built: no torch, no GPU, plain numbers (docs/simulate.md)."""
