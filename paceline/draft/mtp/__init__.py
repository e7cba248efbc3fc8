"""Multi-token prediction: drafts with the additional layer (MTP layer) that some models are trained with."""
