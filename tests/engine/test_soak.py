"""Random engine steps: requests come, go, are aborted, stop early, overflow the cache; nothing leaks or mixes."""

from __future__ import annotations

import os
import random

import pytest
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter

from paceline.draft.ngram import NgramDrafter
from paceline.engine.engine import Engine
from paceline.errors import ContextLengthError
from paceline.types import SamplingParams, Sequence

pytestmark = pytest.mark.slow

NUM_STEPS = 3_000 if os.environ.get("PACELINE_NIGHTLY") else 400


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        presence_penalty=rng.choice([0.0, 0.5]),
        seed=rng.randrange(1000),
        max_tokens=rng.randint(1, 40),
        stop=rng.choice([(), ("a", "e"), ("\x10\x11",)]),
        stop_token_ids=rng.choice([(), (7, 8)]),
        logprobs=rng.choice([None, None, 1]),
    )


def check_answer(target: FakeTarget, seq: Sequence) -> None:
    """A greedy answer without penalties must be the target's own, whoever ran beside it."""
    if seq.params.is_greedy and not seq.params.has_penalties:
        assert seq.output_ids == target.greedy(seq.tokens[: seq.prompt_len], seq.num_output)
    assert seq.params.logprobs is None or len(seq.logprobs) == seq.num_output


def check_rows(engine: Engine, target: FakeTarget) -> None:
    for seq in engine.scheduler.running:
        target.fake_cache.check(seq)


@pytest.mark.parametrize("kind", ["scripted", "ngram"])
def test_random_steps(kind: str) -> None:
    rng = random.Random(0)
    target = FakeTarget(vocab_size=258, num_rows=3, max_len=96, order=1 if kind == "ngram" else 2)
    scripted = ScriptedDrafter(target, num_drafted=5, accuracy=0.7, tap_layers=(1,), with_probs=True)
    engine = Engine(target, ByteTokenizer(), scripted if kind == "scripted" else NgramDrafter(), prefill_chunk=7)
    alive: set[int] = set()
    num_finished = 0
    for _ in range(NUM_STEPS):
        if len(alive) < 6 and rng.random() < 0.3:
            prompt = [rng.randrange(256) for _ in range(rng.choice([1, 3, 20, 50]))]
            try:
                alive.add(engine.add(prompt, random_params(rng)))
            except ContextLengthError:
                engine.check_integrity()
        if alive and rng.random() < 0.02:
            gone = rng.choice(sorted(alive))
            assert engine.abort(gone) is not None
            alive.remove(gone)
        for chunk in engine.step():
            if chunk.finish_reason:
                alive.remove(chunk.sequence.request_id)
                check_answer(target, chunk.sequence)
                num_finished += 1
        engine.check_integrity()
        check_rows(engine, target)
        target.calls.clear()
    for request_id in alive:
        engine.abort(request_id)
    engine.check_integrity()
    assert not engine.has_work
    assert target.cache.num_free == target.cache.num_rows
    assert num_finished > NUM_STEPS / 20
