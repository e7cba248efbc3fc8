"""What the server needs of a model and its engine: `paceline.LLM` is one, and another may stand in its place.

Everything belongs to the engine's thread, but for `compile` of its grammars.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from paceline.config import EngineConfig
from paceline.model.text.tokenizer import Tokenizer
from paceline.types import Constraint, GrammarSpec, RoundStats, Route, SamplingParams, Sequence

if TYPE_CHECKING:
    from paceline.engine.engine import Chunk


class Cache(Protocol):
    """Rows of `max_len` positions each; `lengths` says how many of them are in use."""

    num_rows: int
    max_len: int
    lengths: list[int]


class Target(Protocol):
    vocab_size: int

    @property
    def cache(self) -> Cache: ...


class Requests(Protocol):
    """Those in the engine: without a row of the cache, with a part of their prompt read, with an answer under way."""

    @property
    def waiting(self) -> Collection[Sequence]: ...

    @property
    def prefilling(self) -> Collection[Sequence]: ...

    @property
    def running(self) -> Collection[Sequence]: ...


class Engine(Protocol):
    rounds: list[RoundStats]
    """The rounds of the latest step: at most one."""
    read: tuple[int, float]
    """Prompt tokens that the latest step read, and the seconds that took; 0 of both where an engine cannot tell."""
    grammars: Any
    """Its `compile` is `ModelInfo.compile`. An engine that takes another's place is given its grammars."""

    @property
    def scheduler(self) -> Requests: ...

    @property
    def target(self) -> Target: ...

    @property
    def has_work(self) -> bool: ...

    def add(self, prompt_ids: list[int], params: SamplingParams, constraint: Constraint | None, route: Route | None, /) -> int:
        """Queue a request; returns its id. `route` says whose drafts it should get, where there are several drafters. Raises
        PacelineError on bad input, and then nothing has changed."""
        ...

    def abort(self, request_id: int) -> Sequence | None:
        """Drop a request; returns its sequence, or None when it is done or unknown."""

    def step(self) -> list[Chunk]:
        """What each request gained. One that fails alone gets a chunk with finish_reason "error" and has its `sequence.error`;
        an exception means that the engine is lost."""
        ...

    def check_integrity(self) -> None:
        """Raises when the engine is harmed."""


class Model(Protocol):
    """A loaded model with its engine."""

    config: EngineConfig
    tokenizer: Tokenizer

    @property
    def engine(self) -> Engine: ...

    @property
    def drafter(self) -> Any:
        """What requests get that ask for none."""

    @property
    def members(self) -> Mapping[str, Any]:
        """What requests may get, by name: records of a `drafter`, and whether it `is_open` to new ones."""
        ...

    def use_members(self, members: Any, /) -> None:
        """Draft with these from now on, `members` of another engine, which failed."""

    def renew(self) -> None:
        """After a crash: the same weights and drafters, an empty cache, a new engine."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the event loop may know of the model; holds none of its memory."""

    name: str
    tokenizer: Tokenizer
    max_len: int
    """Tokens of prompt and answer together."""
    num_rows: int
    """Answers made at once."""
    vocab_size: int
    drafter: str
    """Whose drafts a new answer may get."""
    compile: Callable[[GrammarSpec], Constraint]
    """Fresh state for one answer, from any thread. Raises SamplingError on a grammar that cannot be followed."""
    mocked: str = ""
    """What acceptance is mocked, for people; empty where answers are the model's own."""
    drafters: tuple[str, ...] = ()
    """Names of the drafters that a request may choose from, the default first; without "none"."""

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
