"""Settings of `paceline evals`: frozen dataclasses whose fields are the commands' options. Cheap to import."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from paceline.bounds import Amount, Checked, Count, Streams, Timeout, check, refuse_unused, within
from paceline.errors import ConfigError, refuse

if TYPE_CHECKING:
    from paceline.loop.evals.suite import Case

KINDS = ("auto", "exact", "numeric", "regex", "json", "code", "judge")


@dataclass(frozen=True, slots=True)
class EvalSampling(Checked):
    """Settings for generating the answers: length, temperature, seed, number of concurrent requests."""

    max_tokens: Count = 256
    """Longest answer, in tokens."""
    temperature: Annotated[float, within("0 or more", least=0)] = 0.0
    """Sampling temperature; 0 is greedy."""
    seed: int = 0
    """Base seed; the seed of each request is derived from it, the case and the sample."""
    at_once: Streams = 8
    """Concurrent requests."""

    def seed_of(self, case: Case, sample: int) -> int:
        """Returns the seed of a request, derived from the base seed, the case's id and the sample's number. Adding
        cases to a suite does not change the seeds of the others."""
        return zlib.crc32(f"{self.seed}/{case.id}/{sample}".encode())


@dataclass(frozen=True, slots=True)
class MakeConfig:
    """Settings of a new suite: sources of its cases, and their scorer."""

    sources: tuple[str, ...] = ()
    """A store (its evals split), JSON lines, Parquet, or a data set id."""
    scorer: Annotated[str, KINDS] = "auto"
    """How answers are scored. auto: code if the row has tests, json if its answer is a JSON object, numeric if its
    answer is a number."""
    limit: Count | None = None
    """Use at most this many cases."""
    fields: tuple[str, ...] = ()
    """json: fields that must equal the recorded answer's [default: all of them]."""
    schema: Path | None = None
    """json: file of the JSON schema that answers must satisfy."""
    pattern: str | None = None
    """regex: pattern that every answer must contain."""
    tolerance: Amount = 0.0
    """numeric: maximum accepted error of the number."""
    criteria: str | None = None
    """judge: the question by which the judge compares two answers."""
    tag: str | None = None
    """Store: use only rows with this tag."""
    seed: int = 0
    """Seed of the random choice under a limit."""

    def __post_init__(self) -> None:
        check(self)
        refuse(ConfigError, (self.scorer == "regex" and self.pattern is None, "scorer regex needs a pattern"))
        for kinds, name in ((("regex",), "pattern"), (("judge",), "criteria"), (("auto", "numeric"), "tolerance")):
            refuse_unused(self, self.scorer in kinds, f"for scorer {self.scorer}", name)
        refuse_unused(self, self.scorer in ("auto", "json"), f"for scorer {self.scorer}", "fields", "schema")
        refuse_unused(self, self.limit is not None, "without a limit", "seed")


@dataclass(frozen=True, slots=True)
class EndpointConfig(Checked):
    """OpenAI-compatible server that answers the cases in place of a local model."""

    url: str | None = None
    """Address of an OpenAI-compatible server, as http://HOST:PORT [default: the model runs here]."""
    served_name: str | None = None
    """The server's name of the model [default: the first it lists]."""
    key_file: Path | None = None
    """File with its key; else PACELINE_API_KEY."""
    timeout_s: Timeout = 600.0
    """Timeout of a request in seconds."""


@dataclass(frozen=True, slots=True)
class JudgeConfig:
    """Server and model of the LLM judge, which compares answers with references in cases with the scorer "judge"."""

    url: str | None = None
    """Address of an OpenAI-compatible server."""
    served_name: str | None = None
    """The judge's model [default: the first the server lists]."""
    key_file: Path | None = None
    """File with its key; else PACELINE_JUDGE_KEY."""


@dataclass(frozen=True, slots=True)
class PricesConfig(Checked):
    """Prices for the cost of answers, in any currency."""

    price_per_hour: Amount | None = None
    """Price of an hour of this machine."""
    price_in: Amount | None = None
    """Price of a million prompt tokens of the endpoint."""
    price_out: Amount | None = None
    """Price of a million answer tokens of the endpoint."""

    def of_1000(self, wall_s: float, num_answers: int, prompt_tokens: int, answer_tokens: int) -> float | None:
        """Returns the price of 1,000 answers; None if no price is set, or `num_answers` is 0. The arguments are totals
        over the `num_answers` answers; `wall_s`: seconds that they took."""
        if not num_answers or (self.price_per_hour, self.price_in, self.price_out) == (None, None, None):
            return None
        tokens = prompt_tokens * (self.price_in or 0.0) + answer_tokens * (self.price_out or 0.0)
        return 1000 / num_answers * (wall_s / 3600 * (self.price_per_hour or 0.0) + tokens / 1e6)
