"""The decoder in PyTorch."""
