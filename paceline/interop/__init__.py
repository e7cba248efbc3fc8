"""Classes that other engines load into their own processes: vLLM's connector for hidden states.

They are imported in the engine's Python environment, where paceline's dependencies may be missing. Imported are only
the standard library, PyTorch, safetensors, `paceline.errors`, `paceline.net.loopback` and the engine itself.
"""

from __future__ import annotations

from typing import Any

LEAST_VERSION = (0, 32)
"""Oldest vLLM that these classes fit."""


def is_too_old(numbers: tuple[Any, ...]) -> bool:
    """Returns True for a vLLM older than 0.32. `numbers`: its `__version_tuple__`. False for a build from source
    without git tags, whose age is unknown: (0, 0, "dev") or (0, 1, "dev7", ...)."""
    is_dev = any(str(part).startswith("dev") for part in numbers[2:])
    is_untagged = numbers[:2] == (0, 0) or (numbers[:2] == (0, 1) and is_dev)
    return numbers[:2] < LEAST_VERSION and not is_untagged
