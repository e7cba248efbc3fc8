"""Hourly traffic, stored or synthetic: sums of tokens and rounds, their daily and weekly course, and drift (lasting
drops)."""
