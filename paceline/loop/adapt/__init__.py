"""Keeps drafters fitted to the traffic: detects falling acceptance, decides how to react, and gates candidates."""
