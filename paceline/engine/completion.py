"""One finished answer and its figures, as `LLM` returns them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from paceline.lossy import Price
from paceline.report.statistics import Rounds
from paceline.types import FinishReason, Sequence, Timings, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats(Rounds):
    """Statistics of one answer: numbers of rounds, drafts and tokens, and times in seconds."""

    num_prompt_tokens: int
    """Tokens of the prompt, also those reused from the prefix cache."""
    num_output_tokens: int
    """Tokens of the answer, also the token that ended it."""
    lossless: bool
    """False if a lossy rule or mocked acceptance produced the answer."""
    timings: Timings
    """Seconds of each phase, and the time of each token."""
    lossy: Price | None = None
    """Cost of the request's lossy rule; None without one."""

    @property
    def total_s(self) -> float:
        """Seconds from admission to the last token, including prefill. A request is admitted when it gets a row of the
        KV cache."""
        last = self.timings.token_s[-1] if self.timings.token_s else self.timings.arrival_s
        return last - self.timings.arrival_s - self.timings.queue_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the answer per second of `total_s` (admission to last token)."""
        return self.num_output_tokens / self.total_s if self.total_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second from the first token to the last one. Counts all tokens but the first."""
        span = self.timings.token_s[-1] - self.timings.first_token_s if self.timings.token_s else 0.0
        return (self.num_output_tokens - 1) / span if span > 0 else 0.0

    @property
    def time_to_first_token_s(self) -> float:
        """Seconds from arrival at the engine to the first token, including the queue."""
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
    """One finished answer: its text, token ids, reason for the end and statistics."""

    text: str
    """Text of the answer, without the stop string or token that ended it."""
    token_ids: list[int]
    """Token ids of the answer; a token that ended it is the last."""
    finish_reason: FinishReason | None
    """Why the answer ended: "stop" (an end token, or a stop string) or "length" (the token limit, or a limit of the
    grammar library llguidance). If a request fails, `LLM` raises the error instead."""
    stats: GenerationStats
    """Token counts, acceptance and times."""
    logprobs: list[TokenLogprob]
    """Log-probability of each token of the answer if `SamplingParams.logprobs` is set, else an empty list."""
    prompt_token_ids: list[int]
    """Token ids of the prompt."""
    prompt_logprobs: list[TokenLogprob]
    """Log-probability of each prompt token except the first if `SamplingParams.prompt_logprobs` is set, else an empty
    list."""

    @classmethod
    def of(cls, seq: Sequence, text: str) -> Completion:
        """Creates the Completion of a finished request. `text`: the text of its answer."""
        stats, prompt_ids = GenerationStats.of(seq), seq.tokens[: seq.prompt_len]
        return cls(text, seq.output_ids, seq.finish_reason, stats, seq.logprobs, prompt_ids, seq.prompt_logprobs)
