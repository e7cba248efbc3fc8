"""Interface between the server and a model with its engine; `paceline.LLM` implements it, other engines can too.

All methods are called in the engine's thread, except `compile` of the grammars.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from paceline.config import EngineConfig
from paceline.model.text.tokenizer import Tokenizer
from paceline.types import Constraint, GrammarSpec, RoundStats, Route, SamplingParams, Sequence

if TYPE_CHECKING:
    from paceline.engine.engine import Chunk


class Cache(Protocol):
    """A KV cache for up to `num_rows` running requests (one row each), with `max_len` token positions per row."""

    num_rows: int
    max_len: int
    lengths: list[int]
    """Number of positions in use, for each row."""


class Target(Protocol):
    vocab_size: int

    @property
    def cache(self) -> Cache: ...


class Requests(Protocol):
    """Unfinished requests in the engine: `waiting` for a row of the KV cache; `prefilling`, with a part of the prompt
    still to be computed; `running`, in decoding."""

    @property
    def waiting(self) -> Collection[Sequence]: ...

    @property
    def prefilling(self) -> Collection[Sequence]: ...

    @property
    def running(self) -> Collection[Sequence]: ...


class Engine(Protocol):
    rounds: list[RoundStats]
    """Statistics of the decode round in the latest step; empty if the step had none."""
    read: tuple[int, float]
    """Prompt tokens prefilled by the latest step, and the seconds spent on them; (0, 0.0) if unknown."""
    grammars: Any
    """Grammar compiler, whose `compile` becomes `ModelInfo.compile`. A restarted engine takes over the previous
    one's."""

    @property
    def scheduler(self) -> Requests: ...

    @property
    def target(self) -> Target: ...

    @property
    def has_work(self) -> bool: ...

    def add(
        self, prompt_ids: list[int], params: SamplingParams, constraint: Constraint | None, route: Route | None, /
    ) -> int:
        """Queue a request; returns its id. `constraint` is the compiled grammar, `route` selects one of several
        drafters.

        Raises PacelineError on invalid input, without side effects.
        """
        ...

    def abort(self, request_id: int) -> Sequence | None:
        """Drop a request; returns its sequence, or None if it is finished or unknown."""

    def step(self) -> list[Chunk]:
        """Run one step; returns the new tokens of each request. A failed request gets a chunk with finish_reason
        "error" and `sequence.error`; an exception means that the engine is unusable."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError if the engine's bookkeeping is inconsistent."""


class Model(Protocol):
    """A loaded model with its engine."""

    config: EngineConfig
    tokenizer: Tokenizer

    @property
    def engine(self) -> Engine: ...

    @property
    def drafter(self) -> Any:
        """Default drafter of new requests."""

    @property
    def members(self) -> Mapping[str, Any]:
        """The pool of drafters: name -> entry. An entry has `drafter`, and `is_open`: True if new requests may use
        it."""
        ...

    def use_members(self, members: Any, /) -> None:
        """Replace the pool of drafters by `members` (name -> entry), such as the pool of an engine that failed."""

    def renew(self) -> None:
        """Create a new engine with an empty cache after a crash; keeps the weights and the drafters."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of the loaded model that the server's event loop uses, such as context length and tokenizer. Keeps no
    weights or cache in memory."""

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
    def of(cls, model: Model) -> ModelInfo:
        target, drafter = model.engine.target, ", ".join(model.members) or getattr(model.drafter, "name", "none")
        sizes = target.cache.max_len, target.cache.num_rows, target.vocab_size
        mocked = model.config.mocked_as
        names = tuple(name for name, member in model.members.items() if member.is_open)
        return cls(model.config.model, model.tokenizer, *sizes, drafter, model.engine.grammars.compile, mocked, names)


def marks_of(model: Model) -> dict[str, Any]:
    """Return a value that is equal as long as the model's drafters are the same, be they loaded or released; it keeps
    none of them in memory."""
    members = [(name, each.drafter, each.is_open) for name, each in model.members.items()]
    return {name: (drafter.source or ref(drafter), drafter.stamp, is_open) for name, drafter, is_open in members}
