"""The properties of a loaded model that the server uses, and marks that differ once its drafters have changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from paceline.model.text.tokenizer import Tokenizer
from paceline.types import Constraint, GrammarSpec

if TYPE_CHECKING:
    from paceline.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of the loaded model that the server's event loop uses. Keeps no weights or cache in memory."""

    name: str
    tokenizer: Tokenizer
    max_len: int
    """Context length: most tokens of prompt and answer together."""
    num_rows: int
    """Rows of the KV cache: most answers that are generated at the same time."""
    vocab_size: int
    drafter: str
    """Names of all drafters, joined by commas."""
    compile: Callable[[GrammarSpec], Constraint]
    """Compiles a grammar to the initial state for one answer; thread-safe. Raises SamplingError for unsupported
    grammars."""
    mocked: str = ""
    """Description of the mocked acceptance; empty if acceptance is not mocked."""
    drafters: tuple[str, ...] = ()
    """Drafters that new requests may choose, the default first; without "none"."""

    @property
    def lossless(self) -> bool:
        return not self.mocked

    @classmethod
    def of(cls, model: LLM) -> ModelInfo:
        target, drafter = model.engine.target, ", ".join(model.members) or model.drafter.name
        sizes = target.cache.max_len, target.cache.num_rows, target.vocab_size
        mocked = model.config.mocked_as
        names = tuple(name for name, member in model.members.items() if member.is_open)
        return cls(model.config.model, model.tokenizer, *sizes, drafter, model.engine.grammars.compile, mocked, names)


def marks_of(model: LLM) -> dict[str, Any]:
    """Return a fingerprint of the model's drafters, to detect changes: name -> (source, state of its files when it was
    loaded, True if it takes new requests). Replacing, draining or removing a drafter changes the fingerprint; releasing
    it from memory and loading it again does not. The fingerprint keeps no drafter in memory."""
    members = [(name, each.drafter, each.is_open) for name, each in model.members.items()]
    return {name: (drafter.source or ref(drafter), drafter.stamp, is_open) for name, drafter, is_open in members}
