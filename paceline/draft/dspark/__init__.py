"""DSpark: a DFlash drafter with a Markov head and a confidence head."""
