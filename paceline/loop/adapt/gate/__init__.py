"""A candidate from training to verdict."""
