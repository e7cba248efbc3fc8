"""paceline: lossless speculative decoding with DFlash drafters, from a laptop's CPU to a GPU.

from paceline import LLM, SamplingParams
print(LLM("smollm2-135m").chat([[{"role": "user", "content": "Why is the sky blue?"}]])[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.draft.base import Drafter
    from paceline.engine.completion import Completion
    from paceline.engine.engine import Engine
    from paceline.engine.llm import LLM
    from paceline.types import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "Drafter", "Engine", "PacelineError", "SamplingParams", "__version__"]

_LAZY = {
    "LLM": "paceline.engine.llm",
    "Completion": "paceline.engine.completion",
    "Engine": "paceline.engine.engine",
    "Drafter": "paceline.draft.base",
    "SamplingParams": "paceline.types",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `paceline --help` is fast."""
    if name not in _LAZY:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
