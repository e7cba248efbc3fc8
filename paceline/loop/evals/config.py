"""What `paceline evals` is asked for: frozen dataclasses, whose fields are the commands' options. Quick to import."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from paceline.bounds import Amount, Count, Positive, Share, check, within
from paceline.errors import ConfigError, refuse

if TYPE_CHECKING:
    from paceline.loop.evals.suite import Case

KINDS = ("auto", "exact", "numeric", "regex", "json", "code", "judge")


@dataclass(frozen=True, slots=True)
class EvalSampling:
    """How answers are drawn."""

    max_tokens: Count = 256
    """Longest answer, in tokens."""
    temperature: Annotated[float, within("0 or more", least=0)] = 0.0
    """0 is greedy."""
    seed: int = 0
    """Base of the requests' seeds: a case and a sample have the same one in every run with this base."""
    at_once: Count = 8
    """Answers under way at once."""

    def __post_init__(self) -> None:
        check(self)

    def seed_of(self, case: Case, sample: int) -> int:
        """By the case's id, not its place: a suite that grows keeps its answers."""
        return zlib.crc32(f"{self.seed}/{case.id}/{sample}".encode())


@dataclass(frozen=True, slots=True)
class MakeConfig:
    """Which cases a suite has, and how they are scored."""

    sources: tuple[str, ...] = ()
    """A store, whose side for evals is taken; or JSON lines, Parquet or a data set id."""
    scorer: Annotated[str, KINDS] = "auto"
    """auto: by what a row has: a number, tests, a JSON answer."""
    limit: Count | None = None
    """Only so many cases."""
    fields: tuple[str, ...] = ()
    """json: fields of the recorded answer that must be equal [default: all of them]."""
    schema: Path | None = None
    """json: file with the schema that answers must keep."""
    pattern: str | None = None
    """regex: what must be found in every answer."""
    tolerance: Amount = 0.0
    """numeric: how far a number may be off."""
    criteria: str | None = None
    """judge: what makes an answer the better one."""
    tag: str | None = None
    """Of a store: only rows with this tag."""
    seed: int = 0
    """Which cases a limit leaves."""

    def __post_init__(self) -> None:
        check(self)
        refuse(ConfigError, (self.scorer == "regex" and self.pattern is None, "scorer regex needs a pattern"))


@dataclass(frozen=True, slots=True)
class GateConfig:
    """When `evals run` and `compare` end with exit status 3."""

    fail_below: Share | None = None
    """Least score."""
    surely: bool = False
    """The low end of the score's 95% interval must not be below it either."""
    no_worse_than: Path | None = None
    """Run folder of evals: be held against it, case by case."""
    margin: Share | None = None
    """Most that may be lost beside the other run, and surely so: the low end of the difference's 95% interval [default: it must
    not be surely worse]."""
    same_text: bool = False
    """Every answer must be the other run's, letter by letter: what a drafter owes."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """A server to be asked in place of a model here."""

    url: str | None = None
    """Address of an OpenAI-compatible server, as http://HOST:PORT [default: the model runs here]."""
    served_name: str | None = None
    """What it calls its model [default: the first it names]."""
    key_file: Path | None = None
    """File with its key; else PACELINE_API_KEY."""
    timeout_s: Positive = 600.0
    """Seconds after which a request has failed."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class JudgeConfig:
    """Who ranks answers of suites that need a judge."""

    url: str | None = None
    """Address of an OpenAI-compatible server."""
    served_name: str | None = None
    """Its model [default: the first it names]."""
    key_file: Path | None = None
    """File with its key; else PACELINE_JUDGE_KEY."""


@dataclass(frozen=True, slots=True)
class PricesConfig:
    """What answers cost, in any currency."""

    price_per_hour: Amount | None = None
    """Price of an hour of this machine."""
    price_in: Amount | None = None
    """Price of a million prompt tokens of the endpoint."""
    price_out: Amount | None = None
    """Price of a million answer tokens of the endpoint."""

    def __post_init__(self) -> None:
        check(self)

    def of_1000(self, wall_s: float, num_answers: int, prompt_tokens: int, answer_tokens: int) -> float | None:
        """Of 1,000 answers; None without any price."""
        if not num_answers or (self.price_per_hour, self.price_in, self.price_out) == (None, None, None):
            return None
        tokens = prompt_tokens * (self.price_in or 0.0) + answer_tokens * (self.price_out or 0.0)
        return 1000 / num_answers * (wall_s / 3600 * (self.price_per_hour or 0.0) + tokens / 1e6)
