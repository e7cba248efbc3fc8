"""Greedy generation for drafter tests: the engine's own round and judge, chunked prefill in front."""

from __future__ import annotations

from collections.abc import Callable

from paceline.draft.base import Drafter, Observed
from paceline.engine.round import RuleJudge, decode_round
from paceline.model.target import ForwardBatch, Target
from paceline.types import Batch, RoundStats, SamplingParams, Sequence


class LogitsJudge(RuleJudge):
    """The engine's judge, with all logits in every round."""

    def only_argmax(self, batch: Batch) -> bool:
        return False


def admit(
    target: Target, drafter: Drafter, prompt: list[int], params: SamplingParams, chunk: int = 1 << 20
) -> Sequence:
    """Prefill one request, chunk by chunk, up to its first token."""
    seq = Sequence(0, list(prompt), len(prompt), params)
    row = target.cache.allocate()
    assert row is not None
    seq.row = row
    drafter.start(seq)
    for begin in range(0, len(prompt), chunk):
        tokens = prompt[begin : begin + chunk]
        out = target.forward(ForwardBatch([row], [begin], [len(tokens)], tokens, "last"))
        seq.cached_len = begin + len(tokens)
        if seq.cached_len == len(prompt):
            assert out.logits_TV is not None
            seq.accept([int(out.logits_TV[-1].argmax())])
        drafter.observe([Observed(seq, begin, len(tokens), out.taps_TF)])
    return seq


def ready(target: Target, drafter: Drafter) -> None:
    drafter.bind(target)
    target.set_taps(drafter.tap_layers)


def generate(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    max_tokens: int,
    *,
    chunk: int = 1 << 20,
    check: Callable[[Sequence], None] = lambda seq: None,
) -> tuple[list[list[int]], list[RoundStats]]:
    """Answers of all prompts as one batch, and the rounds; rows leave the batch as they end. `check`: called after
    every round for each of its rows."""
    ready(target, drafter)
    params = [SamplingParams(max_tokens=max_tokens, seed=number) for number in range(len(prompts))]
    sequences = [admit(target, drafter, prompt, each, chunk) for prompt, each in zip(prompts, params, strict=True)]
    rounds = []
    while running := [seq for seq in sequences if seq.finish_reason is None]:
        rounds.append(decode_round(Batch(running), target, drafter, LogitsJudge()))
        for seq in running:
            check(seq)
    for seq in sequences:
        drafter.drop(seq)
        target.cache.free(seq.row)
    return [seq.output_ids for seq in sequences], rounds
