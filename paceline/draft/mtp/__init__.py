"""Multi-token prediction: the drafting layer that some models are trained with."""
