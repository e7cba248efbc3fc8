"""From logits to the distribution that a request asked for, and to the token drawn from it."""
