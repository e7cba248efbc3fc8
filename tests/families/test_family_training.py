"""Training a new drafter for a family lowers its loss on what it is shown, and the engine drafts with it.

tests/train/test_loop.py has what it does to documents that it is not shown, which is no matter of the family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from doubles import ByteTokenizer
from engine_runs import run
from family_models import target_of, text
from small_training import config, trainer

from paceline.config import EngineConfig
from paceline.draft.dflash.checkpoint import read_stored
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork
from paceline.draft.formats.family import read_drafter
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.model.checkpoint import load_config
from paceline.model.config.decoder import has_llama_layers
from paceline.model.remote_embedding import Ends, load_ends
from paceline.plan.planner import FixedPlanner
from paceline.train.config import DrafterShape, OptimConfig
from paceline.train.documents.dataset import Document
from paceline.train.features.hidden_states import OnlineFeatures
from paceline.train.learn.initial_weights import network_for
from paceline.types import SamplingParams

pytestmark = pytest.mark.slow

NUM_STEPS = 16
TURN = 6


def counting(number: int) -> Document:
    """A random prompt, then a count through the first few tokens, round and round: what one shows is true of all."""
    tokens = np.concatenate([text(3 + number % 4, number), (number + np.arange(10 + number % 7)) % TURN])
    return Document(f"doc-{number}@0/0", tokens.astype(np.int32), 3 + number % 4)


DOCUMENTS = [counting(number) for number in range(8)]


TRAINED = ["llama", "granite", "gemma2", "gpt-oss", "qwen3.5-moe", "gemma4", "gemma4-small"]
"""Plain, with factors at both ends, with a cap, with experts, with layers of two kinds, with heads of two sizes, with
shared keys."""


@pytest.mark.parametrize("name", TRAINED)
def test_training_lowers_the_loss(name: str, family_model: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = family_model
    target = target_of(folder, max_len=64)
    settings = config(max_steps=NUM_STEPS, blocks_per_step=16, blocks_per_pack=16, optim=OptimConfig(lr=1e-2))
    one = trainer(tmp_path, settings, target=target, learned=DOCUMENTS)
    features = OnlineFeatures(target, DOCUMENTS, cast(Any, one.network).config.target_layer_ids, needs_final=False)
    before = one.evaluate(DOCUMENTS, features)
    one.run()
    after = one.evaluate(DOCUMENTS, features)
    assert after["loss"] < before["loss"] - 0.5, (before, after)


def test_first_layers_are_copied_or_refused(name: str, family_model: tuple[Path, Any]) -> None:
    """Copied where a draft layer computes what a target layer does; also of files that hold matrices together."""
    folder, model = family_model
    target, shape = target_of(folder), DrafterShape(num_layers=1, num_taps=2, start="copied")
    if not has_llama_layers(load_config(folder).family):
        with pytest.raises(ConfigError, match="cannot be copied: start from random layers"):
            network_for(target, str(folder), shape, None, 0)
        return
    _, network = network_for(target, str(folder), shape, None, 0)
    theirs = model.model.layers[2].self_attn
    query = theirs.qkv_proj.weight[:32] if hasattr(theirs, "qkv_proj") else theirs.q_proj.weight
    assert torch.equal(cast(Any, network.layers)[0].self_attn.q_proj.weight, query)


def test_the_two_ends_alone(name: str, family_model: tuple[Path, Any]) -> None:
    """Train for a target whose layers run on another server."""
    settings = EngineConfig(str(family_model[0]), dtype="float32", device="cpu")
    whole, ends = target_of(family_model[0]), load_ends(settings)
    assert isinstance(ends, Ends) and ends.ends == whole.ends
    ids, hidden = torch.arange(10), torch.randn(3, 32)
    torch.testing.assert_close(ends.embed(ids), whole.embed(ids))
    torch.testing.assert_close(ends.head(hidden), whole.head(hidden), atol=1e-5, rtol=1e-5)


def test_the_drafter_has_the_factors_of_both_ends(name: str, family_model: tuple[Path, Any], tmp_path: Path) -> None:
    """Its file says them in the words of the authors' `dflash`, and it drafts the same tokens when it is read back."""
    folder, shape = family_model[0], load_config(family_model[0])
    target = target_of(folder, max_len=64)
    one = trainer(tmp_path / "run", config(max_steps=2), target=target)
    network = cast(DFlashNetwork, one.network)
    DFlashDrafter(network).save(tmp_path / "drafter")
    stored = read_stored(tmp_path / "drafter").config
    scales = stored.input_embedding_scale, stored.output_multiplier, stored.final_logit_softcapping
    assert scales == (target.ends.embedding, shape.logit_scale, shape.logit_cap)
    params, prompts = SamplingParams(max_tokens=12, ignore_eos=True), [list(range(1, 9))]
    texts = []
    for drafter in (None, DFlashDrafter(network), read_drafter(tmp_path / "drafter")):
        engine = Engine(target, ByteTokenizer(), drafter, planner=FixedPlanner(0 if drafter is None else None))
        texts.append([seq.output_ids for seq in run(engine, prompts, params)])
    assert texts[0] == texts[1] == texts[2]
