"""The stage `rounds`: texts of rounds on the device against those of ordinary rounds."""

from __future__ import annotations

from typing import Any

from gpu_day_stages.exact import random_prompts
from gpu_day_stages.models import decoder, stand_in_tokenizer
from gpu_day_stages.tiny_models import add_counts, are_same, loud_tensors, parted, texts, tiny_llama
from gpu_day_stages.visit import Visit
from paceline.draft.base import Drafter
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.dflash2.drafter import DFlash2Drafter
from paceline.engine.engine import Engine
from paceline.plan.planner import FixedPlanner
from paceline.types import SamplingParams

MOST_PARTED = 0.05
"""Share of seeded texts that may differ: draws whose numbers lie within a few last bits of float32 logits."""


def rounds(visit: Visit) -> None:
    """Greedy texts are equal but at near-ties of the target, seeded ones but for last bits."""
    config = tiny_llama(vocab=visit.sized(64, 16))
    tensors, prompts = loud_tensors(config), random_prompts(3)
    prompts = [[token % config.vocab_size for token in prompt] for prompt in prompts]
    target = decoder(config, tensors, visit.device, rows=3, max_len=128)
    count = visit.sized(48, 6)
    sizes: dict[str, Any] = {"block_size": 6, "num_layers": 2, "head_dim": 8, "intermediate_size": 48}
    for name, kind in (("none", None), ("dflash", DFlashDrafter), ("dflash2", DFlash2Drafter)):
        drafter = kind.random(target, **sizes) if kind else None
        with visit.part(f"greedy {name}"):
            greedy(visit, name, target, drafter, prompts, SamplingParams(max_tokens=count, ignore_eos=True))
        with visit.part(f"seeded {name}"):
            seeded(visit, name, target, drafter, prompts, count)


def greedy(
    visit: Visit, name: str, target: Any, drafter: Drafter | None, prompts: list[list[int]], params: SamplingParams
) -> None:
    counts: dict[str, int] = {}
    expected = texts(target, drafter, prompts, params, device=False)
    together = texts(target, drafter, prompts, params, counts=counts)
    alone = [texts(target, drafter, [prompt], params, counts=counts)[0] for prompt in prompts]
    joined = joins_and_leaves(target, drafter, prompts, params, counts)
    for what, own in (("in a batch of 3", together), ("alone", alone), ("with joins and leaves", joined)):
        parts = parted(target, prompts, expected, own)
        visit.check(f"greedy texts of device rounds, {name}, {what}", are_same(parts), parted=parts)
    recorder = target.recorder
    failed = dict(recorder.failed) if recorder else {}
    visit.check(f"device rounds, {name}", counts.keys() == {"device"} and not failed, counts=counts, failed=failed)


def seeded(
    visit: Visit, name: str, target: Any, drafter: Drafter | None, prompts: list[list[int]], count: int
) -> None:  # fmt: skip
    counts, differing, whole = dict[str, int](), list[Any](), 0
    shapes: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 5},
    ]
    for shape in shapes:
        for seed in range(visit.sized(10, 1)):
            params = [
                SamplingParams(**shape, seed=100 * seed + row, max_tokens=count, ignore_eos=True) for row in range(3)
            ]
            expected = texts(target, drafter, prompts, params, device=False)
            own = texts(target, drafter, prompts, params, counts=counts)
            differing += [(shape, seed, row) for row in range(3) if own[row] != expected[row]]
            whole += 3
    allowed = len(differing) <= MOST_PARTED * whole
    visit.check(f"seeded texts of device rounds, {name}", allowed, differing=differing, texts=whole, counts=counts)


def joins_and_leaves(
    target: Any, drafter: Drafter | None, prompts: list[list[int]], params: SamplingParams, counts: dict[str, int]
) -> list[list[int]]:
    """Texts of requests that come one after another, beside others that come and are aborted."""
    engine = Engine(
        target, stand_in_tokenizer(target.vocab_size), drafter,
        planner=FixedPlanner(None, 32), prefill_chunk=32, device_rounds=True,
    )  # fmt: skip
    done, ids, others, number = dict[int, list[int]](), list[int](), list[int](), 0
    while len(done) < len(prompts):
        if number % 3 == 0 and len(ids) < len(prompts):
            ids.append(engine.add(prompts[len(ids)], params))
        if number % 4 == 1:
            others.append(engine.add([1, 2, 3 + number % 5], params))
        if number % 4 == 3 and others:
            engine.abort(others.pop(0))
        for chunk in engine.step():
            if chunk.finish_reason and chunk.sequence.request_id in ids:
                done[chunk.sequence.request_id] = chunk.sequence.output_ids
        number += 1
    for request in others:
        engine.abort(request)
    add_counts(counts, engine)
    return [done[request] for request in ids]
