"""Engines over fake targets, run to the end."""

from __future__ import annotations

import pytest
from doubles import FakeTarget, ScriptedDrafter

from paceline.draft.base import Drafter
from paceline.engine.engine import Chunk, Engine
from paceline.types import SamplingParams, Sequence


def byte_target(**options: object) -> FakeTarget:
    return FakeTarget(vocab_size=258, **options)  # pyright: ignore[reportArgumentType]


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[Sequence]:
    """Answer all prompts together; the finished sequences, in order."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    ids = [engine.add(prompt, own) for prompt, own in zip(prompts, each, strict=True)]
    done: dict[int, Sequence] = {}
    while engine.has_work:
        for chunk in engine.step():
            if chunk.finish_reason:
                done[chunk.sequence.request_id] = chunk.sequence
        engine.check_integrity()
    return [done[request_id] for request_id in ids]


def collect(engine: Engine) -> list[Chunk]:
    chunks = []
    while engine.has_work:
        chunks += engine.step()
    return chunks


def check_logprobs(target: FakeTarget, seq: Sequence, num_top: int) -> None:
    """The log-probabilities of an answer are those of the target, with its `num_top` most probable tokens."""
    assert len(seq.logprobs) == len(seq.output_ids)
    for index, entry in enumerate(seq.logprobs):
        expected = target.logits_after(seq.tokens[: seq.prompt_len + index]).log_softmax(-1)
        assert entry.token_id == seq.output_ids[index]
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-5)
        assert [token for token, _ in entry.top] == expected.topk(num_top).indices.tolist()


def drafters(target: FakeTarget) -> dict[str, Drafter | None]:
    return {
        "none": None,
        "always": ScriptedDrafter(target, accuracy=1.0, tap_layers=(0, 2)),
        "never": ScriptedDrafter(target, accuracy=0.0, tap_layers=(1,)),
        "sometimes": ScriptedDrafter(target, accuracy=0.6),
        "sometimes, with probabilities": ScriptedDrafter(target, accuracy=0.6, with_probs=True),
        "adversarial": ScriptedDrafter(target, mode="adversarial", with_probs=True),
    }
