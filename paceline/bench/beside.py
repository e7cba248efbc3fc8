"""One answer beside plain decoding, and beside Transformers: for `paceline generate --compare --against transformers`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.bench.identity import logits_after
from paceline.bench.passes import Request
from paceline.bench.peers import TransformersPeer
from paceline.engine.llm import LLM, Completion
from paceline.figures import first_difference
from paceline.types import SamplingParams

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class BesidePlain:
    """Plain decoding of the same prompt in the same process."""

    plain_tokens_per_s: float
    speedup: float
    identical: bool | None
    """Whether the tokens are the same; None when sampled, where only the distribution has to be."""
    first_difference: int | None = None
    """Tokens that are still the same, where they are not all the same."""
    top2_gap: float | None = None
    """Best logit minus second-best at the first difference: how nearly the target was undecided there."""

    @classmethod
    def of(cls, llm: LLM, completion: Completion, plain: Completion, params: SamplingParams) -> BesidePlain:
        speed = plain.stats.tokens_per_s
        speedup = completion.stats.tokens_per_s / speed if speed else 0.0
        if not params.is_greedy:
            return cls(speed, speedup, None)
        at = first_difference(completion.token_ids, plain.token_ids)
        if at is None:
            return cls(speed, speedup, True)
        best, second = logits_after(llm.target, plain.prompt_token_ids + plain.token_ids[:at]).topk(2).values.tolist()
        return cls(speed, speedup, False, at, best - second)

    def line(self, tokens_per_s: float, dtype: str, is_exact: bool) -> str:
        """For people; `is_exact`: passes of any width give the same bits."""
        same = {None: "sampled: texts need not agree", True: "token-identical", False: "not token-identical"}[self.identical]
        if self.top2_gap is not None:
            same += f" after {self.first_difference} tokens, where {dtype} has the top two logits {self.top2_gap:.3f} apart"
            same += "" if is_exact or dtype == "float32" else "; --backend native, or --dtype float32, is exact"
        speeds = f"plain {self.plain_tokens_per_s:.1f} tokens/s, with drafts {tokens_per_s:.1f} tokens/s"
        return f"{speeds}: {self.speedup:.2f}x, {same}"


@dataclass(frozen=True, slots=True)
class BesideTransformers:
    """Transformers' greedy answer to the same tokens."""

    tokens_per_s: float
    speedup: float
    first_difference: int | None
    """Tokens that are still the same; None when all are."""

    def line(self, dtype: str) -> str:
        """For people: what it means when the tokens are not the same."""
        speeds = f"Transformers {self.tokens_per_s:.1f} tokens/s: {self.speedup:.1f}x as fast"
        if self.first_difference is None:
            return f"{speeds}, the same tokens"
        begins = f"the first {self.first_difference} tokens are the same, then" if self.first_difference else "here"
        if dtype == "float32":
            return f"{speeds}, NOT the same tokens: {begins} the two differ, which float32 leaves no reason for but a near-tie"
        return (
            f"{speeds}; {begins} the two choose different tokens, as they may in {dtype}: each rounds in its own way, which "
            "decides where two tokens are almost equally likely. The proof is --dtype float32, where the tokens are the same"
        )

    def as_json(self) -> dict[str, Any]:
        return {"transformers": {"tokens_per_s": self.tokens_per_s, "speedup": self.speedup}}


def answer_plainly(llm: LLM, token_ids: list[int], params: SamplingParams) -> Completion:
    """Plain decoding, after a warm-up of it and of the drafter; leaves the drafter as it was."""
    drafter = llm.drafter
    warm_up = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens), logprobs=None)
    llm.generate_ids([token_ids], warm_up)
    llm.use_drafter("none")
    try:
        llm.generate_ids([token_ids], warm_up)
        return llm.generate_ids([token_ids], params)[0]
    finally:
        llm.use_drafter(drafter)


def ask_transformers(llm: LLM, completion: Completion, params: SamplingParams) -> BesideTransformers:
    """What Transformers says to the same prompt, after a warm-up."""
    peer, request = TransformersPeer(llm), [Request("prompt", completion.prompt_token_ids)]
    peer.run("transformers", request, WARM_UP_TOKENS, True)
    answer = peer.run("transformers", request, params.max_tokens, params.ignore_eos).answers[0]
    speed = len(answer.token_ids) / answer.seconds
    speedup = completion.stats.tokens_per_s / speed
    return BesideTransformers(speed, speedup, first_difference(completion.token_ids, answer.token_ids))
