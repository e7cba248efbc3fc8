"""What a step does next: how much of a prompt is read, and which drafts are checked. No PyTorch: the simulator plans too."""
