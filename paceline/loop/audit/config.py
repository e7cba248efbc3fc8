"""Options of `paceline audit`, and tolerances for an honest server's rounding errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.bounds import Checked, Count, Positive, Timeout, Whole, within

Precision = Literal["float32", "bfloat16", "quantised"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest deviations that rounding errors cause on a server that runs the model; an audit ignores smaller ones."""

    nats: float
    """Error of the mean surprisal (-log of a token's probability), in nats."""
    tie: float
    """Logit difference below which two tokens are a near tie: either may be the most probable."""
    mass: float
    """Error of the total probability of the tokens in the top-p nucleus."""
    logprob: float
    """Median difference between the server's and the local model's log-probability of a token, in nats."""


TOLERANCES = {
    "float32": Tolerance(nats=0.002, tie=0.02, mass=0.002, logprob=0.01),
    "bfloat16": Tolerance(nats=0.01, tie=0.5, mass=0.02, logprob=0.15),
    "quantised": Tolerance(nats=0.05, tie=2.0, mass=0.08, logprob=0.5),
}


@dataclass(frozen=True, slots=True)
class AuditConfig(Checked):
    """Options of an audit: requests to send, and limits of the checks. Raises ConfigError if an option is invalid."""

    served_name: str | None = None
    """Name of the model on the server [default: the first that it lists]."""
    temperatures: tuple[Positive, ...] = (1.0, 0.7)
    """Comma-separated temperatures of the sampled answers."""
    top_p: Annotated[float, within("above 0 and at most 1", above=0, most=1)] = 0.8
    """Top-p of further answers at temperature 1; 1 leaves them out."""
    answers: Count = 192
    """Answers sampled per temperature: more detect smaller faults, and take longer."""
    max_tokens: Count = 32
    """Maximum tokens of a sampled answer."""
    greedy_tokens: Whole = 96
    """Maximum tokens of a greedy answer, one per prompt; 0 leaves greedy answers out."""
    server_precision: Precision = "bfloat16"
    """Number format of the server's computation, which bounds its rounding difference from float32."""
    false_alarms: Annotated[float, within("above 0 and below 0.5", above=0, most=0.49)] = 0.01
    """Probability that an honest server is called faulty by the sampled answers, over all tests."""
    concurrency: Count = 4
    """Requests in flight at the same time."""
    timeout_s: Timeout = 120.0
    """Longest wait for an answer, in seconds."""

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES[self.server_precision]
