"""Tiny drafters of each method that device rounds draft with, and engines that run them on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_runs import run
from tiny_dflash import network, tiny_target
from tiny_dflash2 import network_2
from tiny_dspark import network_3

from paceline.draft.dflash.config import as_dflash2, as_dspark, new_config
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.dflash.static import StaticBlock
from paceline.draft.dflash2.drafter import DFlash2Drafter
from paceline.draft.dspark.drafter import DSparkDrafter
from paceline.engine.device_round import ROUNDS
from paceline.engine.engine import Engine
from paceline.model.text.tokenizer import Tokenizer
from paceline.model.torch.recorded_pass import GraphDecoder
from paceline.types import SamplingParams

VOCAB = 5
"""Vocabulary size, small enough that random drafts are sometimes right."""
PROMPTS = [[1, 2, 3, 4, 0, 2], [4, 0, 1], [2] * 20, [3, 1, 4, 1], [0]]
FEW = [0, 2, 3]
"""A draft vocabulary."""


def target(rows: int = 3, vocab: int = VOCAB) -> Any:
    return tiny_target(rows, vocab=vocab, kind=GraphDecoder)


def _raw(own: Any, keys: dict[str, Any]) -> dict[str, Any]:
    sizes = {"block_size": 6, "num_layers": 2, "head_dim": 8, "intermediate_size": 48}
    return new_config(own.hidden_size, own.vocab_size, own.num_layers, **(sizes | keys))


def _ids(draft_ids: list[int] | None) -> torch.Tensor | None:
    return None if draft_ids is None else torch.tensor(draft_ids)


def dflash(own: Any, *, draft_ids: list[int] | None = None, **keys: Any) -> DFlashDrafter:
    return DFlashDrafter(network(_raw(own, keys)), draft_ids=_ids(draft_ids))


def dflash2(own: Any, *, draft_ids: list[int] | None = None, top_k: int = 4, **keys: Any) -> DFlash2Drafter:
    """By default one token of the vocabulary is not among the candidates."""
    return DFlash2Drafter(network_2(as_dflash2(_raw(own, keys), rank=5, top_k=top_k)), draft_ids=_ids(draft_ids))


def dspark(own: Any, *, draft_ids: list[int] | None = None, **keys: Any) -> DSparkDrafter:
    return DSparkDrafter(network_3(as_dspark(_raw(own, keys), rank=5)), draft_ids=_ids(draft_ids))


DRAFTERS: dict[str, Callable[..., DFlashDrafter]] = {"dflash": dflash, "dflash2": dflash2, "dspark": dspark}


def engine_of(own: Any, drafter: Any, *, on: bool = True, **options: Any) -> Engine:
    return Engine(own, Tokenizer.stand_in(own.vocab_size), drafter, prefill_chunk=7, device_rounds=on, **options)


def texts(engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [seq.output_ids for seq in run(engine, prompts, params)]


def count_of(engine: Engine, name: str = ROUNDS) -> int:
    assert engine.device_rounds is not None
    return engine.device_rounds.counts[name]


def right_now_and_then(monkeypatch: pytest.MonkeyPatch, engine: Engine, known: list[list[int]]) -> None:
    """Blocks of this engine draft what these texts go on with, but for every fifth position."""
    conclude = StaticBlock.conclude

    def oracle(block: StaticBlock, *arguments: Any) -> tuple[Any, ...]:
        outputs = conclude(block, *arguments)
        for seq in engine.scheduler.running:
            text = next((each for each in known if each[: seq.prompt_len] == seq.tokens[: seq.prompt_len]), [])
            places = range(len(seq.tokens), min(len(seq.tokens) + outputs[0].shape[1], len(text)))
            for slot, place in enumerate(places):
                token = (text[place] + (place % 5 == 0)) % engine.target.vocab_size
                if outputs[0].is_floating_point():  # of DFlash: the best row of the head; of others: candidates
                    outputs[0][seq.row, slot, 0] = token
                else:
                    outputs[1][seq.row, slot, 0], outputs[2][seq.row, slot, :, 0] = token, 1e4
        return outputs

    monkeypatch.setattr(StaticBlock, "conclude", oracle)
