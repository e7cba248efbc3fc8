"""What each benchmark is asked: frozen dataclasses, whose fields are the options of its command. Quick to import."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import ConfigError, refuse, refuse_below
from paceline.types import SamplingParams

BUILTIN_PROMPTS = Path(__file__).parent / "prompts.jsonl"
BASELINE = "none"
"""The drafter that every other is compared with: plain decoding."""
WARM_UP_TOKENS = 8
"""Of the short answers that come before what is measured."""
PLAIN = 1.0
"""Tokens per round without drafts."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What `bench decode` and `evaluate` run. Raises ConfigError on impossible values."""

    drafters: tuple[str, ...] = (BASELINE, "default")
    """Plain decoding, `none`, always runs, first."""
    batches: tuple[int, ...] = (1,)
    """Requests in flight at once."""
    temperatures: tuple[float, ...] = (0.0,)
    """0 is greedy."""
    max_tokens: int = 128
    """Longest answer, in tokens."""
    repeat: int = 1
    """Repetitions; settings take turns, figures are medians."""
    ignore_eos: bool = False
    """Go on to `max_tokens` whatever the model says."""
    against: tuple[str, ...] = ()
    """transformers: run its generate too, plain and with prompt lookup, at batch 1 and temperature 0."""
    num_drafted: int | None = None
    """Most tokens drafted per round [default: the drafter's own number]."""
    seed: int | None = 0
    """Base of the requests' seeds."""

    def __post_init__(self) -> None:
        refuse_below(1, batch=min(self.batches, default=0), repeat=self.repeat)
        refuse(
            ConfigError,
            (not self.drafters or not self.temperatures, "give at least one drafter and one temperature"),
        )
        check_peers(self.against)
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=self.seed)
        others = tuple(dict.fromkeys(name for name in self.drafters if name != BASELINE))
        object.__setattr__(self, "drafters", (BASELINE, *others))


def check_peers(names: Sequence[str]) -> None:
    """Raises ConfigError: only Transformers can be measured beside ours, and only where it is installed."""
    refuse(
        ConfigError,
        (any(name != "transformers" for name in names), "the only peer known to --against is transformers"),
        (bool(names) and find_spec("transformers") is None, "--against needs Transformers: pip install 'paceline[hf]'"),
    )


@dataclass(frozen=True, slots=True)
class MockConfig:
    """What `bench decode` measures with mocked acceptance. Raises ConfigError on impossible values."""

    tokens_per_round: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    """Random prompts, and every round keeps so many tokens, the bonus token included; beside the roofline. 1, plain decoding,
    is always measured."""
    batches: tuple[int, ...] = (1,)
    prompt_tokens: int = 256
    """Tokens of those prompts."""
    max_tokens: int = 128
    repeat: int = 3
    num_drafted: int | None = None
    """Drafts of every round; None drafts no more than stand, the least work for the yield."""
    drafter: str = "random-dflash"

    def __post_init__(self) -> None:
        most = max(self.tokens_per_round, default=PLAIN)
        refuse(
            ConfigError,
            (
                not all(math.isfinite(each) and each >= 1 for each in self.tokens_per_round),
                "tokens_per_round counts the bonus token: every value must be at least 1",
            ),
            (
                self.num_drafted is not None and self.num_drafted + 1 < most,
                f"num_drafted {self.num_drafted} drafts cannot yield {most:g} tokens a round",
            ),
        )
        refuse_below(1, batch=min(self.batches, default=0), prompt_tokens=self.prompt_tokens, repeat=self.repeat)
        refuse_below(2, max_tokens=self.max_tokens)

    @property
    def settings(self) -> list[tuple[int, float]]:
        """(batch, tokens per round), plain decoding first."""
        values = sorted({PLAIN, *self.tokens_per_round})
        return [(batch, value) for batch in self.batches for value in values]

    def drafts(self, tokens_per_round: float) -> int:
        if tokens_per_round == PLAIN:
            return 0
        return self.num_drafted if self.num_drafted is not None else math.ceil(tokens_per_round) - 1

    @property
    def needed_len(self) -> int:
        """Tokens a cache row has to hold."""
        return self.prompt_tokens + self.max_tokens + max(map(self.drafts, self.tokens_per_round)) + 1


@dataclass(frozen=True, slots=True)
class StepsConfig:
    """What `bench steps` measures. Raises ConfigError on impossible values."""

    batches: tuple[int, ...] = (1, 2, 4, 8)
    """Rows that decode together."""
    max_positions: int = 17
    """Widest pass of a row: one more than the longest draft."""
    context: int = 256
    """Tokens in each row's cache, about: rounds add to it."""
    repeat: int = 15
    """Times each size is measured; figures are medians."""
    tokens_per_round: float = 2.0
    """Mocked acceptance, the bonus token included: what a drafter observes after a round."""

    def __post_init__(self) -> None:
        refuse_below(1, batch=min(self.batches, default=0), context=self.context, repeat=self.repeat)
        refuse(ConfigError, (self.max_positions < 2, "max_positions must be at least 2: a round without drafts has one"))

    @property
    def growth(self) -> int:
        """Tokens that a turn over all widths adds to a row at most, its first round included."""
        return int((self.max_positions + 2) * (self.tokens_per_round + 1))

    @property
    def needed_len(self) -> int:
        """Tokens a cache row has to hold."""
        return self.context + self.growth + self.max_positions


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """What `bench serving` sends. Raises ConfigError on impossible values."""

    concurrencies: tuple[int, ...] | None = None
    """Closed loops: requests in flight [default: 1,2,4,8,16, or none with a rate]."""
    rates: tuple[float, ...] = ()
    """Open loops: requests a second at random times (Poisson)."""
    num_requests: int | None = None
    """Requests of each pass [default: every prompt, 4 for each in flight, 10 s of a rate]."""
    max_tokens: int = 128
    """Longest answer, in tokens."""
    temperature: float = 0.0
    """0 is greedy; only then texts are compared."""
    seed: int = 0
    """Of arrival times, and base of the requests' seeds."""
    repeat: int = 1
    """Repetitions; contenders take turns at each load."""
    ignore_eos: bool = False
    """Go on to `max_tokens` whatever the model says."""
    timeout_s: float = 600.0
    """Seconds after which a request has failed."""

    def __post_init__(self) -> None:
        if self.concurrencies is None:
            object.__setattr__(self, "concurrencies", () if self.rates else (1, 2, 4, 8, 16))
        refuse_below(1, concurrency=min(self.closed, default=1), requests=self.num_requests, max_tokens=self.max_tokens)
        refuse_below(1, repeat=self.repeat)
        refuse(
            ConfigError,
            (any(not 0 < each < math.inf for each in self.rates), "rate must be above 0"),
            (not self.closed and not self.rates, "give at least one --concurrency or --rate"),
            (not 0 <= self.temperature < math.inf, "temperature must be 0 or more"),
            (not self.timeout_s > 0, "timeout must be above 0 seconds"),
        )

    @property
    def closed(self) -> tuple[int, ...]:
        return self.concurrencies or ()


@dataclass(frozen=True, slots=True)
class ServersConfig:
    """Which servers `bench serving` asks, and how. Raises ConfigError on impossible values."""

    url: str | None = None
    """A server that runs, such as http://127.0.0.1:8000 [default: start own ones]."""
    model: str | None = None
    """Which model to serve; with `url`, what the server calls it."""
    api_key_file: Path | None = None
    """File with the server's key; else PACELINE_API_KEY."""
    speculate: tuple[str, ...] | None = None
    """Contenders: off, auto, full, or a number of drafts [default: off,auto]."""
    words: tuple[str, ...] = ()
    """Options of the servers to be started, as for `paceline serve`."""

    def __post_init__(self) -> None:
        for name in self.speculate or ():
            is_known = name in ("off", "auto", "full") or (name.isdecimal() and name.isascii())
            known = "choose from off, auto, full and numbers of drafts"
            refuse(ConfigError, (not is_known, f"speculate {name!r} is not known: {known}"))
        refuse(ConfigError, (self.speculate == (), "speculate names no contender: write it as off,auto"))
        if self.speculate:
            object.__setattr__(self, "speculate", tuple(dict.fromkeys(self.speculate)))
