"""Each family's greedy text is Transformers' `generate`, token for token, with a twin, DFlash and one other kind of
drafter; Gemma 4's with every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import ByteTokenizer
from engine_runs import run
from family_models import FAMILIES, IN_PYTORCH, target_of, text

from paceline.draft.base import Drafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.registry import make_drafter
from paceline.draft.small_model import SmallModelDrafter
from paceline.engine.engine import Engine
from paceline.plan.planner import FixedPlanner
from paceline.types import SamplingParams

pytestmark = pytest.mark.slow

NUM_TOKENS = 16
PROMPTS = [text(5), text(19, 1), text(4, 2) * 3]
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@torch.no_grad()
def generated(model: Any, prompt: list[int]) -> list[int]:
    """By Transformers."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
    )
    return out[0, len(prompt) :].tolist()


def test_the_text_is_generate_s(name: str, family_model: tuple[Path, Any]) -> None:
    folder, model = family_model
    expected = [generated(model, prompt) for prompt in PROMPTS]
    assert len({token for answer in expected for token in answer}) > 5, "the test needs texts that wander"
    target, tokenizer = target_of(folder, num_rows=3, max_len=64), ByteTokenizer()
    others = ["ngram", "dflash2", "eagle3", "dspark"]
    if name not in IN_PYTORCH:
        others = [others[list(FAMILIES).index(name) % 3]]
    drafters: dict[str, Drafter] = {
        "small_model": SmallModelDrafter(target_of(folder, num_rows=3, max_len=64), num_drafted=3),
        "dflash": make_drafter("random-dflash", target),
    }
    for other in others:
        is_ngram = other == "ngram"
        drafters[other] = NgramDrafter(min_match=1) if is_ngram else make_drafter(f"random-{other}", target)
    drafted, accepted = dict[str, int](), dict[str, int]()
    for kind, drafter in drafters.items():
        engine = Engine(target, tokenizer, drafter, planner=FixedPlanner(most_chunk=8))
        sequences = run(engine, PROMPTS, PARAMS)
        assert [seq.output_ids for seq in sequences] == expected, kind
        drafted[kind] = sum(each.num_drafted for seq in sequences for each in seq.rounds)
        accepted[kind] = sum(each.num_accepted for seq in sequences for each in seq.rounds)
    assert all(drafted[kind] > 0 for kind in drafters)
    assert accepted["small_model"] == drafted["small_model"], "the target's twin is always right"
    assert accepted["dflash"] < drafted["dflash"], "refused drafts are taken back"
