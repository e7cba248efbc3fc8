"""Weights of the drafters that ship, a folder a target. `paceline/shipped.py` finds them; nothing here is code."""
