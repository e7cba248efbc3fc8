"""Adapts drafters to the traffic: detects falling acceptance, decides how to react, tests new drafters before use."""
