"""A drafter of another width than its target's, which embeds tokens with the rows of its own head."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from doubles import ByteTokenizer
from engine_runs import run
from safetensors.torch import load_file, save_file
from tiny_dflash import HIDDEN, KINDS, PROMPT, VOCAB, network, raw_config, tiny_target
from tiny_dflash2 import network_2, raw_2
from tiny_dspark import network_3, raw_3
from torch import Tensor

from paceline.config import EngineConfig
from paceline.draft.dflash.checkpoint import read_stored
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork
from paceline.draft.formats.export import FORMATS, export
from paceline.draft.formats.family import drafter_of, network_of, read_drafter
from paceline.draft.formats.inspection import described
from paceline.draft.vocabulary import rows_of_tokens
from paceline.engine.engine import Engine
from paceline.errors import ConfigError, DrafterMismatchError, ModelFileError, UnsupportedModelError
from paceline.loop.adapt.gate.retrain import vocabulary_of
from paceline.loop.rl.follow import DFlashFollower, FollowConfig
from paceline.model.torch.recorded_pass import GraphDecoder
from paceline.plan.planner import FixedPlanner
from paceline.train.card import card_text
from paceline.train.config import DrafterShape, LoopConfig, LossConfig, TrainConfig
from paceline.train.documents.dataset import Corpus
from paceline.train.learn.initial_weights import continued_vocabulary
from paceline.train.methods.kinds import initial_drafter
from paceline.types import SamplingParams

IDS, MASK, WIDE = torch.tensor([0, 2, 3, 5, 7, 10]), VOCAB - 1, 64
KINDS_OF = {"v1": (raw_config, network), "second": (raw_2, network_2), "dspark": (raw_3, network_3)}


def widened(raw: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[DFlashConfig, dict[str, Tensor]]:
    """The same drafter for a target of width WIDE, of whose hidden states it reads the first HIDDEN numbers."""
    fc_DTF = tensors["fc.weight"].unflatten(1, (-1, HIDDEN))
    wide = torch.cat([fc_DTF, torch.zeros(*fc_DTF.shape[:2], WIDE - HIDDEN)], dim=-1).flatten(1)
    return DFlashConfig.from_json({**raw, "target_hidden_size": WIDE}), {**tensors, "fc.weight": wide}


def moved(kind: str = "v1", **options: Any) -> tuple[DFlashDrafter, DFlashDrafter]:
    """A drafter of a target of width HIDDEN, and the same one for a target of width WIDE."""
    raw_of, network_for = KINDS_OF[kind]
    raw, own = raw_of(), network_for(raw_of())
    rows_VD = tiny_target().matrix_embed(torch.arange(VOCAB))[IDS].clone()
    narrow = drafter_of(own, draft_ids=IDS, head_VD=rows_VD)
    wide = network_of(*widened(raw, dict(own.state_dict())))
    return narrow, drafter_of(wide, draft_ids=IDS, head_VD=rows_VD, **options)


@pytest.mark.parametrize("kind", KINDS_OF)
@pytest.mark.parametrize("target", KINDS)
def test_it_drafts_as_the_drafter_of_its_own_width(kind: str, target: Any) -> None:
    both = moved(kind)
    taps_TW = torch.randn(9, len(both[0].tap_layers), WIDE, generator=torch.Generator().manual_seed(0))
    read = []
    for drafter, width in zip(both, (HIDDEN, WIDE), strict=True):
        drafter.bind(tiny_target(hidden=width, kind=target))
        path = cast(Any, drafter)._path
        path.inject([0], [0], [9], taps_TW[..., :width].flatten(1).contiguous())
        read.append([path.read([0], [anchor], 3, 8)[1] for anchor in (2, 7, MASK, 4)])
    for narrow, wide in zip(read[0][:3], read[1][:3], strict=True):
        torch.testing.assert_close(wide, narrow, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(read[1][3], read[1][2])  # token 4 has no row, and stands as the mask token


@pytest.mark.parametrize("kind", KINDS_OF)
@pytest.mark.parametrize("target", [*KINDS, GraphDecoder])
def test_answers_are_those_of_plain_decoding(kind: str, target: Any) -> None:
    params = SamplingParams(max_tokens=40)

    def answered(drafter: DFlashDrafter | None) -> Any:
        wide = tiny_target(hidden=WIDE, kind=target)
        return run(Engine(wide, cast(Any, ByteTokenizer()), drafter, planner=FixedPlanner()), [PROMPT], params)[0]

    drafted = answered(moved(kind)[1])
    assert drafted.output_ids == answered(None).output_ids and any(each.num_drafted for each in drafted.rounds)


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_head_and_tokens_are_stored(tmp_path: Path, in_8_bits: bool) -> None:
    drafter = moved("second")[1]
    drafter.save(tmp_path, in_8_bits=in_8_bits)
    again = read_drafter(tmp_path)
    assert again.config.has_own_width and again.config.target_hidden_size == WIDE
    assert again.draft_ids is not None and again.draft_ids.tolist() == IDS.tolist()
    assert drafter.head_VD is not None and again.head_VD is not None
    rounding = 0.02 * float(drafter.head_VD.abs().max()) if in_8_bits else 0.0
    torch.testing.assert_close(again.head_VD.float(), drafter.head_VD.float(), rtol=0, atol=rounding)
    facts = {fact.what: fact for fact in described(read_stored(tmp_path), tmp_path)}
    assert f"hidden size {WIDE}" in facts["made for"].value and "embed" in facts["draft vocabulary"].meaning
    save_file({"ids": IDS[1:]}, tmp_path / "draft_ids.safetensors")
    with pytest.raises(
        (ModelFileError, DrafterMismatchError), match="rows for 5 tokens" if in_8_bits else "no head of its own"
    ):
        read_drafter(tmp_path).bind(tiny_target(hidden=WIDE))
    drafter.save(tmp_path, in_8_bits=in_8_bits)
    for form in FORMATS:
        with pytest.raises(UnsupportedModelError, match="another width"):
            export(read_stored(tmp_path), form, tmp_path / f"out-{form}.gguf")


def test_what_does_not_fit_is_refused() -> None:
    drafter = moved()[1]
    head_VD = drafter.head_VD
    assert head_VD is not None
    with pytest.raises(DrafterMismatchError, match="hidden size: the drafter says 64, the target has 32"):
        drafter.bind(tiny_target())
    without = drafter_of(drafter.network, draft_ids=IDS)
    with pytest.raises(DrafterMismatchError, match="no head of its own"):
        without.bind(tiny_target(hidden=WIDE))
    no_mask = drafter_of(drafter.network, draft_ids=IDS[:-1], head_VD=head_VD[:-1])
    with pytest.raises(DrafterMismatchError, match=f"no row for its mask token {MASK}"):
        no_mask.bind(tiny_target(hidden=WIDE))


def test_a_token_without_a_row_has_the_mask_tokens() -> None:
    assert rows_of_tokens(torch.tensor([1, 3]), 3, 5).tolist() == [1, 0, 1, 1, 1]
    assert rows_of_tokens(None, 3, 4).tolist() == [0, 1, 2, 3]


def test_a_training_goes_on_with_its_own_matrix(tmp_path: Path) -> None:
    moved()[1].save(tmp_path)
    target, corpus = tiny_target(hidden=WIDE), Corpus([], [])
    config = TrainConfig(init=str(tmp_path), target=EngineConfig("none"))
    initial = initial_drafter(config, target, None)
    rows_VD = read_stored(tmp_path).vocabulary.head_VD
    assert rows_VD is not None and initial.head.weight_VD.shape == (len(IDS), HIDDEN)
    assert initial.embedding_VD.shape == (VOCAB, HIDDEN)
    torch.testing.assert_close(initial.embedding_VD[IDS], rows_VD.to(initial.embedding_VD))
    assert initial.drafting_head.columns is not None and initial.drafting_head.columns.tolist() == IDS.tolist()
    assert continued_vocabulary(tmp_path, corpus, target).ids is not None
    assert isinstance(initial.network, DFlashNetwork) and vocabulary_of(tmp_path) is None
    with pytest.raises(ConfigError, match="leave --draft-vocab out"):
        initial_drafter(TrainConfig(init=str(tmp_path), shape=DrafterShape(draft_vocab=4)), target, IDS)
    compared = TrainConfig(init=str(tmp_path), target=EngineConfig("none"), loop=LoopConfig(loss=LossConfig("kl")))
    with pytest.raises(ConfigError, match="choose --loss d-pace"):
        initial_drafter(compared, target, None)


def test_a_head_among_the_weights_is_kept_without_a_list_of_tokens(tmp_path: Path) -> None:
    """The head of such a file has one row for each of the target's tokens."""
    drafter = moved()[1]
    rows_VD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
    drafter_of(drafter.network).save(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "lm_head.weight": rows_VD}, file)
    target = tiny_target(hidden=WIDE)
    read_drafter(tmp_path).bind(target)
    own = continued_vocabulary(tmp_path, Corpus([], []), target)
    assert own.ids is None and own.head_VD is not None and torch.equal(own.head_VD, rows_VD)


def test_one_that_follows_a_policy_learns_from_tokens_alone() -> None:
    with pytest.raises(ConfigError, match="choose --loss d-pace"):
        DFlashFollower(moved()[1], FollowConfig(loss=LossConfig("kl")))
    assert DFlashFollower(moved()[1]).drafter.config.has_own_width


def test_its_card_names_no_program_that_cannot_read_it(tmp_path: Path) -> None:
    moved()[1].save(tmp_path)
    card = card_text(TrainConfig(target=EngineConfig("smollm2-135m")), tmp_path, {}, {})
    assert "embeddings of its own" in card and "paceline alone reads it" in card
    assert "paceline export" not in card and "vllm" not in card.lower()
