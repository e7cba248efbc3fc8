"""What is particular to each kind of drafter in training."""
