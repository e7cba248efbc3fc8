"""Decides how to react to an alarm, a lasting drop of acceptance."""
