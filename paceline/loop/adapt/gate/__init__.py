"""Training of a candidate drafter on recent traffic, and the gate: the test that it must pass before it serves."""
