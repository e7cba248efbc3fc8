"""Converts logits to the distribution that a request specifies, and samples tokens from it."""
