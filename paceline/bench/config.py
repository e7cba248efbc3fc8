"""Options of the benchmarks: frozen dataclasses with a field for each option of a command. Imports quickly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

from paceline.bounds import MAX_CONTEXT, Amount, Context, Count, Rate, Streams, Timeout, at_least, check, within
from paceline.errors import ConfigError, refuse
from paceline.lossy import Lossy
from paceline.plan.speculate import Speculation
from paceline.plan.trees import MOST_NODES
from paceline.simulate.marginals import read_marginals
from paceline.types import SamplingParams

Yield = Annotated[float, within("at least 1, the bonus token included", least=1)]
BUILTIN_PROMPTS = Path(__file__).parent / "prompts.jsonl"
BASELINE = "none"
"""Name of plain decoding, the baseline of every comparison."""
WARM_UP_TOKENS = 8
"""Tokens of the warm-up answers before a measurement."""
PLAIN = 1.0
"""Tokens per round without drafts."""


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Options of `bench decode` and `evaluate`, which measure decoding speed and acceptance. Raises ConfigError on
    invalid values."""

    drafters: tuple[str, ...] = (BASELINE, "default")
    """Drafters to measure. Plain decoding, `none`, is always measured, first."""
    batches: tuple[Streams, ...] = (1,)
    """Batch sizes: requests in flight, at most as many as there are requests."""
    temperatures: tuple[float, ...] = (0.0,)
    """Sampling temperatures; 0 is greedy."""
    max_tokens: int = 128
    """Longest answer, in tokens."""
    repeat: Count = 1
    """Repetitions; settings alternate, results are medians."""
    ignore_eos: bool = False
    """Generate `max_tokens` tokens, ignoring end tokens."""
    against: tuple[str, ...] = ()
    """transformers: also run its `generate`, plain and with prompt lookup, at batch 1 and temperature 0."""
    num_drafted: int | None = None
    """Most tokens drafted per round [default: the drafter's own number]."""
    seed: int | None = 0
    """Base seed of the requests."""
    marginals: bool = False
    """Also record how often the candidate of each rank is accepted at each draft position (the marginals), for
    `paceline simulate --marginals`. This slows decoding down. It applies if speculate is full or a
    number; with tree:N the marginals are always recorded."""

    def __post_init__(self) -> None:
        check(self)
        if not (self.drafters and self.batches and self.temperatures):
            raise ConfigError("give at least one drafter, batch and temperature")
        check_peers(self.against)
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=self.seed)
        others = tuple(dict.fromkeys(name for name in self.drafters if name != BASELINE))
        for name, values in {"batches": self.batches, "temperatures": self.temperatures}.items():
            object.__setattr__(self, name, tuple(dict.fromkeys(values)))
        object.__setattr__(self, "drafters", (BASELINE, *others))


def check_peers(names: Sequence[str]) -> None:
    """Check the names of engines to compare with (option --against). Raises ConfigError for a name other than
    "transformers", the only one supported, or if Transformers is not installed."""
    if any(name != "transformers" for name in names):
        raise ConfigError("the only peer known to --against is transformers")
    if names and find_spec("transformers") is None:
        raise ConfigError("--against needs Transformers: pip install 'paceline[hf]'")


class MockSetting(NamedTuple):
    """One measurement of `bench decode` with mocked acceptance: the number of accepted drafts is set in advance instead
    of decided by the target's output."""

    batch: int
    tokens_per_round: float
    """Mocked acceptance length (tokens per round, with the bonus token). For a tree it is predicted from the marginals
    (how often the candidate of each rank is accepted at each draft position)."""
    num_nodes: int = 0
    """Number of drafts in a tree; 0 for a chain (drafts without branches)."""


@dataclass(frozen=True, slots=True)
class MockConfig:
    """Options of `bench decode` with mocked acceptance: a set number of drafts is accepted, whatever their tokens.
    Raises ConfigError on invalid values."""

    tokens_per_round: tuple[Yield, ...] = (1.0, 2.0, 4.0, 8.0)
    """Acceptance lengths to mock, the bonus token included, on random prompts. 1, plain decoding, is always
    measured."""
    batches: tuple[Streams, ...] = (1,)
    prompt_tokens: Context = 256
    """Tokens of each random prompt."""
    max_tokens: Annotated[Context, at_least(2)] = 128
    repeat: Count = 3
    num_drafted: int | None = None
    """Drafts of every round [default: as many as are accepted, the least work for this acceptance length]."""
    drafter: str = "random-dflash"
    trees: tuple[Annotated[int, within(f"between 1 and {MOST_NODES}", least=1, most=MOST_NODES)], ...] = ()
    """Also measure trees of these numbers of drafts per round; `marginals` gives their acceptance length."""
    marginals: str = "greedy"
    """Marginals: how often the candidate of each rank is accepted at each draft position of a tree. Takes the same
    values as `paceline simulate --marginals`."""

    def __post_init__(self) -> None:
        check(self)
        if self.trees:
            read_marginals(self.marginals)
        most = max(self.tokens_per_round, default=PLAIN)
        if self.num_drafted is not None and self.num_drafted + 1 < most:
            raise ConfigError(f"num_drafted {self.num_drafted} drafts cannot yield {most:g} tokens a round")
        if self.needed_len > MAX_CONTEXT:
            raise ConfigError(
                f"prompt_tokens, max_tokens and drafts need a row of {self.needed_len} tokens, more than {MAX_CONTEXT}"
            )

    @property
    def settings(self) -> list[MockSetting]:
        """All measurements to run. First come chains of drafts: each batch size with each acceptance length, and with 1
        (plain decoding). Then come draft trees: each batch size with each tree size."""
        values = sorted({PLAIN, *self.tokens_per_round})
        trees, most = sorted(set(self.trees)), max(self.trees, default=0)
        expected = read_marginals(self.marginals).expected(most) if trees else []
        return [
            *(MockSetting(batch, value) for batch in self.batches for value in values),
            *(MockSetting(batch, expected[size].tokens, size) for batch in self.batches for size in trees),
        ]

    def drafts(self, tokens_per_round: float) -> int:
        if tokens_per_round == PLAIN:
            return 0
        return self.num_drafted if self.num_drafted is not None else math.ceil(tokens_per_round) - 1

    @property
    def needed_len(self) -> int:
        """Tokens that one row of the KV cache must hold: a prompt, its answer and one round's drafts."""
        widest = max([*map(self.drafts, self.tokens_per_round), *self.trees, 0])
        return self.prompt_tokens + self.max_tokens + widest + 1


@dataclass(frozen=True, slots=True)
class StepsConfig:
    """Options of `bench steps`, which measures the times of a round's verification, drafting and remaining work (host).
    Raises ConfigError on invalid values."""

    batches: tuple[Streams, ...] = (1, 2, 4, 8)
    """Batch sizes: rows decoded together."""
    max_positions: Annotated[int, within("at least 2: a round without drafts has one", least=2)] = 17
    """Positions of the widest pass per row: the longest draft plus one."""
    context: Context = 256
    """Approximate number of tokens in each row's cache; rounds add to it."""
    repeat: Count = 15
    """Measurements of each size; results are medians."""
    tokens_per_round: Yield = 2.0
    """Mocked acceptance length, the bonus token included, as reported to the drafter."""

    def __post_init__(self) -> None:
        check(self)
        too_long = f"context and rounds need a row of {self.needed_len} tokens, more than {MAX_CONTEXT}: lower context"
        refuse(
            ConfigError,
            (not self.batches, "give at least one batch"),
            (self.needed_len > MAX_CONTEXT, too_long),
        )

    @property
    def growth(self) -> int:
        """Maximum number of tokens that one repetition adds to a row's cache. A repetition has one untimed round, and
        one timed round for each number of verified positions from 1 to `max_positions`."""
        return int((self.max_positions + 2) * (self.tokens_per_round + 1))

    @property
    def needed_len(self) -> int:
        """Tokens that one row of the KV cache must hold: the context, the tokens that one repetition adds (`growth`),
        and those of one verification."""
        return self.context + self.growth + self.max_positions


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """Options of the requests that `bench serving` sends. Raises ConfigError on invalid values."""

    concurrencies: tuple[Count, ...] | None = None
    """Closed loops: requests in flight [default: 1,2,4,8,16, or none with a rate]."""
    rates: tuple[Rate, ...] = ()
    """Open loops: request rates per second, with random arrival times (Poisson)."""
    num_requests: Count | None = None
    """Number of requests in each pass [default: one for each prompt; prompts are repeated if there are fewer than 4 per
    request in flight, or too few for 10 s of a rate]."""
    max_tokens: Count = 128
    """Longest answer, in tokens."""
    temperature: Annotated[float, within("0 or more", least=0)] = 0.0
    """Sampling temperature; 0 is greedy, and only then texts are compared."""
    seed: int = 0
    """Seed of arrival times, and base seed of the requests."""
    repeat: Count = 1
    """Repetitions; at each load, the compared speculation settings take turns."""
    ignore_eos: bool = False
    """Generate `max_tokens` tokens, ignoring end tokens."""
    timeout_s: Timeout = 600.0
    """Timeout of a request, in seconds."""

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
    """Options that select the servers of `bench serving`. Raises ConfigError on invalid values."""

    url: str | None = None
    """URL of a running server, such as http://127.0.0.1:8000 [default: start servers]."""
    model: str | None = None
    """Model to serve; with `url`, the server's name of the model."""
    api_key_file: Path | None = None
    """File with the server's key; else PACELINE_API_KEY."""
    speculate: tuple[str, ...] | None = None
    """Speculation settings to compare: off, auto, full, or a number of drafts [default: off,auto]."""
    words: tuple[str, ...] = ()
    """Options of the servers to start, as for `paceline serve`."""

    def __post_init__(self) -> None:
        for name in self.speculate or ():
            is_tree = Speculation.of(name).num_nodes > 0
            refuse(ConfigError, (is_tree, f"speculate {name}: choose from off, auto, full and numbers of drafts"))
        example = "give at least one of off, auto, full and numbers of drafts, such as off,auto"
        refuse(ConfigError, (self.speculate == (), f"speculate is empty: {example}"))
        if self.speculate:
            object.__setattr__(self, "speculate", tuple(dict.fromkeys(self.speculate)))


@dataclass(frozen=True, slots=True)
class LatencyConfig:
    """Options of the requests that `bench latency` sends. Raises ConfigError on invalid values."""

    rate: Rate | None = None
    """Requests per second, at random times (Poisson) [default: the workload's own; prompts of a file one after the
    other]."""
    concurrency: Count | None = None
    """Requests in flight, instead of a rate."""
    max_tokens: Count | None = None
    """Longest answer, in tokens [default: the workload's own]."""
    temperature: Annotated[float, within("0 or more", least=0)] = 0.0
    """Sampling temperature; 0 is greedy."""
    seed: int = 0
    """Seed of arrival times, and base seed of the requests."""
    repeat: Count = 3
    """Repetitions of each workload."""
    turn: Count = 4
    """Number of requests sent to one of the compared servers before the next server gets the same ones."""
    new_connections: bool = False
    """Open a new connection for each request, as clients without connection reuse do."""
    timeout_s: Timeout = 600.0
    """Timeout of a request, in seconds."""

    def __post_init__(self) -> None:
        check(self)
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError("give either a rate or a concurrency, not both")


@dataclass(frozen=True, slots=True)
class ArmsConfig:
    """Options that select what `bench latency` compares: drafters, for each of which a server is started, and servers
    that are already running. Raises ConfigError on invalid values."""

    drafters: tuple[str, ...] = ()
    """Drafters; a server is started for each [default: none,default, without urls]."""
    urls: tuple[str, ...] = ()
    """URLs of running OpenAI-compatible servers, such as http://127.0.0.1:8000 or vllm=http://host:8001."""
    model: str | None = None
    """Model to serve; with urls, the servers' name of the model."""
    api_key_file: Path | None = None
    """File with the servers' key; else PACELINE_API_KEY."""
    words: tuple[str, ...] = ()
    """Options of the servers to start, as for `paceline serve`."""

    def __post_init__(self) -> None:
        if not self.drafters and not self.urls:
            object.__setattr__(self, "drafters", (BASELINE, "default"))
        names = [name for name, _ in (*self.named_drafters, *self.named_urls)]
        twice = next((name for name in names if names.count(name) > 1), None)
        remedy = "name each of them, as NAME=DRAFTER or NAME=URL"
        refuse(ConfigError, (twice is not None, f"two of the compared drafters and urls are named {twice!r}: {remedy}"))

    @property
    def named_drafters(self) -> list[tuple[str, str]]:
        """Pairs of (name, drafter) to compare. NAME=DRAFTER gives the name; otherwise it is the last part of the
        drafter's path or hub id."""
        return [
            _named(drafter, drafter.rstrip("/").rpartition("/")[2] or drafter)
            for drafter in dict.fromkeys(self.drafters)
        ]

    @property
    def named_urls(self) -> list[tuple[str, str]]:
        """Pairs of (name, URL) of the running servers to compare. NAME=URL gives the name; otherwise the URL is the
        name."""
        return [_named(url, url) for url in dict.fromkeys(self.urls)]


def _named(text: str, name: str) -> tuple[str, str]:
    """Split NAME=VALUE; a value without a name gets `name`."""
    before, _, value = text.partition("=")
    return (before, value) if value and "/" not in before else (name, text)


@dataclass(frozen=True, slots=True)
class LossyConfig:
    """Options of `bench lossy`, which compares lossy acceptance rules with plain decoding and lossless speculation.
    Raises ConfigError on invalid values."""

    tasks: tuple[str, ...] = ()
    """Tasks with checkable answers, as NAME=FILE of JSON lines: tickets (recipes/support_tickets.py), humaneval,
    gsm8k."""
    settings: str = "typical:eps=0.3,delta=0.3;relaxed:n=2,delta=0.3;threshold:0.3;lenience:0.5;mixture:0.8"
    """Lossy rules with their values, separated by semicolons (docs/explanation/lossless.md)."""
    max_tv: float | None = None
    """Limit for rules without one of their own: largest total variation distance from the target's distribution, as the
    mean over an answer's tokens."""
    temperature: Amount = 0.0
    """Sampling temperature; 0 is greedy."""
    max_tokens: Count = 128
    """Longest answer, in tokens."""
    limit: Count | None = None
    """Use only the first rows of each task."""
    repeat: Count = 2
    """Repetitions; settings alternate, times are medians."""
    seed: int = 0
    """Base seed of the requests."""

    def __post_init__(self) -> None:
        check(self)
        refuse(
            ConfigError,
            (not self.tasks, "give tasks, as tickets=FILE,humaneval=FILE: recipes/support_tickets.py writes tickets"),
            (not self.rules(), "settings names no rule: write it as 'typical;lenience:0.5'"),
        )

    def rules(self) -> list[Lossy]:
        """Return the lossy acceptance rules in `settings` ("lenience:0.5;mixture:0.8"), without duplicates. A rule
        without a limit of the mean total variation gets `max_tv`. Raises SamplingError on an invalid rule."""
        rules = [Lossy.of(part) for part in self.settings.split(";") if part.strip()]
        return [rule if rule.max_tv is not None else rule.within(self.max_tv) for rule in dict.fromkeys(rules)]
