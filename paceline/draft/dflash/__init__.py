"""DFlash: a block-diffusion drafter that drafts a block in one pass."""
