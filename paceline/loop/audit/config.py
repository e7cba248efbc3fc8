"""What `paceline audit` is asked, and how far an honest server's numbers may be from ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.bounds import Count, Positive, Rate, Whole, check, within

Precision = Literal["float32", "bfloat16", "quantised"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What rounding alone may do. All of it is taken off before anything counts against a server."""

    nats: float
    """Mean of a token's surprisal."""
    tie: float
    """Logits of two tokens that are nearer than this are a near tie: either may be the likelier one."""
    mass: float
    """Probability at the edge of a nucleus."""
    logprob: float
    """Median difference of a log-probability."""


TOLERANCES = {
    "float32": Tolerance(nats=0.002, tie=0.02, mass=0.002, logprob=0.01),
    "bfloat16": Tolerance(nats=0.01, tie=0.5, mass=0.02, logprob=0.15),
    "quantised": Tolerance(nats=0.05, tie=2.0, mass=0.08, logprob=0.5),
}


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """How much is asked, and what counts as a fault. Raises ConfigError."""

    served_name: str | None = None
    """What the server calls the model [default: the first that it lists]."""
    temperatures: tuple[Positive, ...] = (1.0, 0.7)
    """Sampled answers are drawn at each of these."""
    top_p: Annotated[float, within("above 0 and at most 1", above=0, most=1)] = 0.8
    """And at temperature 1 with this top-p; 1 leaves that out."""
    answers: Count = 192
    """Answers drawn at each temperature: more find smaller faults, and take longer."""
    max_tokens: Count = 32
    """Longest sampled answer, in tokens."""
    greedy_tokens: Whole = 96
    """Longest greedy answer, one for each prompt; 0 leaves greedy answers out."""
    server_precision: Precision = "bfloat16"
    """In what the server computes: rounding may move its numbers so far from ours, in float32, and no further."""
    false_alarms: Annotated[float, within("above 0 and below 0.5", above=0, most=0.49)] = 0.01
    """Chance that an honest server is called faulty by the sampled answers, all tests together."""
    concurrency: Count = 4
    """Requests under way at the same time."""
    timeout_s: Rate = 120.0
    """Longest wait for an answer, in seconds."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES[self.server_precision]
