"""Computes the seconds of a round from a model's shape and a machine's figures."""
