"""One finished answer and its figures, as `LLM` returns them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from paceline.lossy import Price
from paceline.report.statistics import Rounds
from paceline.types import FinishReason, Sequence, Timings, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats(Rounds):
    """Statistics of one answer. `lossless` is False if a lossy rule or a mocked acceptance produced it."""

    num_prompt_tokens: int
    num_output_tokens: int
    lossless: bool
    timings: Timings
    lossy: Price | None = None
    """Cost of the request's lossy rule; None without one."""

    @property
    def total_s(self) -> float:
        """Seconds from admission to the last token, including prefill."""
        last = self.timings.token_s[-1] if self.timings.token_s else self.timings.arrival_s
        return last - self.timings.arrival_s - self.timings.queue_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.total_s if self.total_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second after the first token."""
        span = self.timings.token_s[-1] - self.timings.first_token_s if self.timings.token_s else 0.0
        return (self.num_output_tokens - 1) / span if span > 0 else 0.0

    @property
    def time_to_first_token_s(self) -> float:
        return self.timings.first_token_s - self.timings.arrival_s

    @classmethod
    def of(cls, seq: Sequence) -> GenerationStats:
        return cls(
            **asdict(Rounds.counted(seq.rounds)),
            num_prompt_tokens=seq.prompt_len,
            num_output_tokens=seq.num_output,
            lossless=seq.lossless,
            timings=seq.timings,
            lossy=seq.ledger.price(str(seq.params.lossy)) if seq.ledger else None,
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stats: GenerationStats
    logprobs: list[TokenLogprob]
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob]
    """Log-probabilities of each prompt token except the first, if `SamplingParams.prompt_logprobs` is set; else
    empty."""
