"""Runs the command line as `python -m paceline`."""

from paceline.cli import main

main()
