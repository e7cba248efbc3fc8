"""DFlash: a block-diffusion drafter, which drafts a whole block of tokens in one pass."""
