"""Hidden states of the target, from which a drafter learns."""
