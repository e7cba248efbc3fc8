"""What each benchmark is asked: frozen dataclasses, whose fields are the options of its command. Quick to import."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

from paceline.bounds import Amount, Count, Positive, Rate, at_least, check, within
from paceline.errors import ConfigError, refuse
from paceline.lossy import Lossy
from paceline.plan.trees import MOST_NODES
from paceline.simulate.marginals import read_marginals
from paceline.types import SamplingParams

Yield = Annotated[float, within("at least 1, the bonus token included", least=1)]
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
    batches: tuple[Count, ...] = (1,)
    """Requests in flight at once."""
    temperatures: tuple[float, ...] = (0.0,)
    """0 is greedy."""
    max_tokens: int = 128
    """Longest answer, in tokens."""
    repeat: Count = 1
    """Repetitions; settings take turns, figures are medians."""
    ignore_eos: bool = False
    """Go on to `max_tokens` whatever the model says."""
    against: tuple[str, ...] = ()
    """transformers: run its generate too, plain and with prompt lookup, at batch 1 and temperature 0."""
    num_drafted: int | None = None
    """Most tokens drafted per round [default: the drafter's own number]."""
    seed: int | None = 0
    """Base of the requests' seeds."""
    marginals: bool = False
    """With plan fixed, also count how often each slot's candidates stand, for `paceline simulate --marginals`; it takes time.
    With plan tree:N they are counted anyway."""

    def __post_init__(self) -> None:
        check(self)
        if not (self.drafters and self.batches and self.temperatures):
            raise ConfigError("give at least one drafter, batch and temperature")
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


class MockSetting(NamedTuple):
    """One of the mocked acceptances that are measured."""

    batch: int
    tokens_per_round: float
    """Of a tree, those that its marginals make expected."""
    num_nodes: int = 0
    """Drafts of a tree; 0: a chain."""


@dataclass(frozen=True, slots=True)
class MockConfig:
    """What `bench decode` measures with mocked acceptance. Raises ConfigError on impossible values."""

    tokens_per_round: tuple[Yield, ...] = (1.0, 2.0, 4.0, 8.0)
    """Random prompts, and every round keeps so many tokens, the bonus token included; beside the roofline. 1, plain decoding,
    is always measured."""
    batches: tuple[Count, ...] = (1,)
    prompt_tokens: Count = 256
    """Tokens of those prompts."""
    max_tokens: Annotated[int, at_least(2)] = 128
    repeat: Count = 3
    num_drafted: int | None = None
    """Drafts of every round; None drafts no more than stand, the least work for the yield."""
    drafter: str = "random-dflash"
    trees: tuple[Annotated[int, within(f"between 1 and {MOST_NODES}", least=1, most=MOST_NODES)], ...] = ()
    """Also trees of so many drafts in every round, which keep what trees of that size keep by `marginals`."""
    marginals: str = "greedy"
    """How often a tree's nodes stand, as of `paceline simulate --marginals`."""

    def __post_init__(self) -> None:
        check(self)
        if self.trees:
            read_marginals(self.marginals)
        most = max(self.tokens_per_round, default=PLAIN)
        if self.num_drafted is not None and self.num_drafted + 1 < most:
            raise ConfigError(f"num_drafted {self.num_drafted} drafts cannot yield {most:g} tokens a round")

    @property
    def settings(self) -> list[MockSetting]:
        """Plain decoding first, trees last."""
        values = sorted({PLAIN, *self.tokens_per_round})
        trees, most = sorted(set(self.trees)), max(self.trees, default=0)
        kept = read_marginals(self.marginals).expected(most) if trees else []
        return [
            *(MockSetting(batch, value) for batch in self.batches for value in values),
            *(MockSetting(batch, kept[size].tokens, size) for batch in self.batches for size in trees),
        ]

    def drafts(self, tokens_per_round: float) -> int:
        if tokens_per_round == PLAIN:
            return 0
        return self.num_drafted if self.num_drafted is not None else math.ceil(tokens_per_round) - 1

    @property
    def needed_len(self) -> int:
        """Tokens a cache row has to hold."""
        widest = max([*map(self.drafts, self.tokens_per_round), *self.trees, 0])
        return self.prompt_tokens + self.max_tokens + widest + 1


@dataclass(frozen=True, slots=True)
class StepsConfig:
    """What `bench steps` measures. Raises ConfigError on impossible values."""

    batches: tuple[Count, ...] = (1, 2, 4, 8)
    """Rows that decode together."""
    max_positions: Annotated[int, within("at least 2: a round without drafts has one", least=2)] = 17
    """Widest pass of a row: one more than the longest draft."""
    context: Count = 256
    """Tokens in each row's cache, about: rounds add to it."""
    repeat: Count = 15
    """Times each size is measured; figures are medians."""
    tokens_per_round: float = 2.0
    """Mocked acceptance, the bonus token included: what a drafter observes after a round."""

    def __post_init__(self) -> None:
        check(self)
        refuse(ConfigError, (not self.batches, "give at least one batch"))

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

    concurrencies: tuple[Count, ...] | None = None
    """Closed loops: requests in flight [default: 1,2,4,8,16, or none with a rate]."""
    rates: tuple[Rate, ...] = ()
    """Open loops: requests a second at random times (Poisson)."""
    num_requests: Count | None = None
    """Requests of each pass [default: every prompt, 4 for each in flight, 10 s of a rate]."""
    max_tokens: Count = 128
    """Longest answer, in tokens."""
    temperature: Annotated[float, within("0 or more", least=0)] = 0.0
    """0 is greedy; only then texts are compared."""
    seed: int = 0
    """Of arrival times, and base of the requests' seeds."""
    repeat: Count = 1
    """Repetitions; contenders take turns at each load."""
    ignore_eos: bool = False
    """Go on to `max_tokens` whatever the model says."""
    timeout_s: Positive = 600.0
    """Seconds after which a request has failed."""

    def __post_init__(self) -> None:
        if self.concurrencies is None:
            object.__setattr__(self, "concurrencies", () if self.rates else (1, 2, 4, 8, 16))
        check(self)
        refuse(ConfigError, (not self.closed and not self.rates, "give at least one --concurrency or --rate"))

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


@dataclass(frozen=True, slots=True)
class LatencyConfig:
    """What `bench latency` sends. Raises ConfigError on impossible values."""

    rate: Rate | None = None
    """Requests a second at random times (Poisson) [default: the workload's own; prompts of a file one after the other]."""
    concurrency: Count | None = None
    """Requests in flight, in place of a rate."""
    max_tokens: Count | None = None
    """Longest answer, in tokens [default: the workload's own]."""
    temperature: Annotated[float, within("0 or more", least=0)] = 0.0
    """0 is greedy."""
    seed: int = 0
    """Of arrival times, and base of the requests' seeds."""
    repeat: Count = 3
    """Repetitions of each workload."""
    turn: Count = 4
    """Requests after which it is the next arm's turn."""
    new_connections: bool = False
    """Connect anew for each request: what callers pay who keep no connection open."""
    timeout_s: Positive = 600.0
    """Seconds after which a request has failed."""

    def __post_init__(self) -> None:
        check(self)
        refuse(
            ConfigError,
            (self.rate is not None and self.concurrency is not None, "give either a rate or a concurrency, not both"),
        )


@dataclass(frozen=True, slots=True)
class ArmsConfig:
    """Whom `bench latency` asks. Raises ConfigError on impossible values."""

    drafters: tuple[str, ...] = ()
    """Drafters: a server is started for each [default: none,default, unless there are urls]."""
    urls: tuple[str, ...] = ()
    """A server that runs, ours or another OpenAI-compatible one, such as http://127.0.0.1:8000 or vllm=http://host:8001."""
    model: str | None = None
    """Which model to serve; with urls, what they call it."""
    api_key_file: Path | None = None
    """File with the servers' key; else PACELINE_API_KEY."""
    words: tuple[str, ...] = ()
    """Options of the servers to be started, as for `paceline serve`."""

    def __post_init__(self) -> None:
        if not self.drafters and not self.urls:
            object.__setattr__(self, "drafters", (BASELINE, "default"))
        names = [name for name, _ in (*self.named_drafters, *self.named_urls)]
        twice = next((name for name in names if names.count(name) > 1), None)
        refuse(ConfigError, (twice is not None, f"two arms are called {twice!r}: write them as NAME=..."))

    @property
    def named_drafters(self) -> list[tuple[str, str]]:
        """Names and drafters; a folder is called by its last part."""
        return [_named(each, each.rstrip("/").rpartition("/")[2] or each) for each in dict.fromkeys(self.drafters)]

    @property
    def named_urls(self) -> list[tuple[str, str]]:
        return [_named(each, each) for each in dict.fromkeys(self.urls)]


def _named(text: str, name: str) -> tuple[str, str]:
    """NAME=VALUE, or a value with the name that it has otherwise."""
    before, _, value = text.partition("=")
    return (before, value) if value and "/" not in before else (name, text)


@dataclass(frozen=True, slots=True)
class LossyConfig:
    """What `bench lossy` runs. Plain decoding and the lossless lane always run. Raises ConfigError on impossible values."""

    tasks: tuple[str, ...] = ()
    """Tasks whose answers can be checked, as NAME=FILE of JSON lines: tickets, of recipes/support_tickets.py, humaneval,
    gsm8k."""
    settings: str = "typical:eps=0.3,delta=0.3;relaxed:n=2,delta=0.3;threshold:0.3;lenience:0.5;mixture:0.8"
    """Lossy rules with their values, divided by semicolons (docs/explanation/lossless.md)."""
    max_tv: float | None = None
    """Budget of all settings that name none: most mean total variation of an answer."""
    temperature: Amount = 0.0
    """0 is greedy."""
    max_tokens: Count = 128
    """Longest answer, in tokens."""
    limit: Count | None = None
    """Only the first rows of each task."""
    repeat: Count = 2
    """Repetitions; settings take turns, seconds are medians."""
    seed: int = 0
    """Base of the requests' seeds."""

    def __post_init__(self) -> None:
        check(self)
        refuse(
            ConfigError,
            (not self.tasks, "give tasks, as tickets=FILE,humaneval=FILE: recipes/support_tickets.py writes tickets"),
            (not self.rules(), "settings names no rule: write it as 'typical;lenience:0.5'"),
        )

    def rules(self) -> list[Lossy]:
        """Raises SamplingError on a setting that is no lossy rule."""
        each = [Lossy.of(part) for part in self.settings.split(";") if part.strip()]
        return [rule if rule.max_tv is not None else rule.within(self.max_tv) for rule in dict.fromkeys(each)]
