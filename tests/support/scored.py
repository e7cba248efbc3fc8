"""A tiny target with drafters, and what it serves with them, for the tests of `paceline.loop.adapt.gate.score`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from small_llm import fake_llm
from tiny_dflash import network, raw_config, tiny_target

from paceline.draft.base import Drafter
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.engine.llm import LLM
from paceline.model.native import library as native_lib
from paceline.model.native.decoder import NativeDecoder
from paceline.model.torch.decoder import Decoder
from paceline.serve.admin.traces import TraceWriter
from paceline.serve.settings import TraceConfig
from paceline.types import SamplingParams, Sequence

FASTEST: Any = Decoder if native_lib.load() is None else NativeDecoder


def tiny_llm(kind: Any, **settings: Any) -> LLM:
    """A real LLM object around a tiny target of eleven tokens."""
    return fake_llm(tiny_target(kind=kind), speculate="full", model="tiny", **settings)


def dflash(seed: int) -> DFlashDrafter:
    return DFlashDrafter(network(raw_config(), seed))


def served(
    llm: LLM, drafter: Drafter, requests: list[tuple[list[int], SamplingParams]], folder: Path | None = None
) -> list[Sequence]:
    """Answers with this drafter, in the order asked; traced as a server would when there is a folder."""
    llm.use_drafter(drafter)
    writer = TraceWriter(TraceConfig(folder), "tiny") if folder else None
    if writer:
        writer.begin(llm.tokenizer)
    ids = [llm.engine.add(prompt, params) for prompt, params in requests]
    done: dict[int, Sequence] = {}
    while llm.engine.has_work:
        for chunk in llm.engine.step():
            if chunk.finish_reason:
                done[chunk.sequence.request_id] = chunk.sequence
    for request_id in ids:
        if writer:
            writer.offer(done[request_id], done[request_id].finish_reason or "error", "tickets")
    if writer:
        writer.close()
    return [done[request_id] for request_id in ids]


def prompts(number: int) -> list[list[int]]:
    return [[(place * place + 3 * index) % 11 for place in range(4 + index % 5)] for index in range(number)]
