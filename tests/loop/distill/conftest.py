"""Runs in this folder do not measure the machine."""

from __future__ import annotations

from known_machine import known_machine

__all__ = ["known_machine"]
