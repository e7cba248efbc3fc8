"""The target's hidden states, which a drafter learns from."""
