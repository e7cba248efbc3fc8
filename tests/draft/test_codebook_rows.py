"""Packed DFlash 2 drafters without the codebook rows of tokens that are never drafted: one meaning on every path."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from round_loop import admit, ready
from safetensors.torch import load_file, save_file
from stored_drafters import IDS, drafted
from tiny_dflash import HIDDEN, PROMPT, VOCAB, needs_native, tiny_target
from tiny_dflash2 import network_2, raw_2

from paceline.draft.dflash.checkpoint import read_stored, weights_file
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.dflash2.drafter import DFlash2Drafter, DFlash2Network
from paceline.draft.dflash2.paths import DFlash2NativePath, DFlash2Path
from paceline.draft.dflash2.selector import BOOKS, score
from paceline.draft.formats.export import FORMATS, export
from paceline.draft.formats.family import network_of, read_drafter
from paceline.draft.formats.inspection import described
from paceline.draft.formats.packed import BOOK_IDS, PACKED
from paceline.errors import ModelFileError
from paceline.model.native.decoder import NativeDecoder
from paceline.model.torch.decoder import Decoder
from paceline.train.config import DrafterShape
from paceline.train.learn.initial_weights import network_for
from paceline.types import SamplingParams

pytestmark = pytest.mark.slow
OUTSIDE = sorted(set(range(VOCAB)) - set(IDS.tolist()))
ANCHORS = [OUTSIDE[0], OUTSIDE[-1], int(IDS[0])]
NAMES = [f"candidate_selector.{book}" for book in BOOKS]
SCRIPT = Path(__file__).parents[2] / "recipes" / "pack_drafter.py"
KINDS: list[Any] = [
    Decoder,
    pytest.param(NativeDecoder, marks=needs_native),
]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A packed drafter that drafts among IDS."""
    DFlash2Drafter(network_2(raw_2(top_k=3)), draft_ids=IDS).save(tmp_path / "small", in_8_bits=True)
    return tmp_path / "small"


def with_all_rows(folder: Path) -> DFlash2Drafter:
    """Builds the fixture's drafter with codebooks of full size; its other matrices are rounded alike."""
    tensors, books = read_stored(folder).tensors, network_2(raw_2(top_k=3)).state_dict()
    network = network_of(read_stored(folder).config, tensors | {name: books[name] for name in NAMES})
    assert isinstance(network, DFlash2Network)
    return DFlash2Drafter(network, draft_ids=IDS)


def test_the_file_holds_rows_of_drafted_tokens_alone(small: Path) -> None:
    stored = load_file(small / PACKED)
    assert [len(stored[name]) for name in NAMES] == [len(IDS), len(IDS)] and stored[BOOK_IDS].tolist() == IDS.tolist()
    tensors, before = read_stored(small).tensors, network_2(raw_2(top_k=3)).state_dict()
    assert BOOK_IDS not in tensors
    for name in NAMES:
        assert tensors[name].shape == before[name].shape
        assert torch.equal(tensors[name][IDS], before[name][IDS]) and not tensors[name][OUTSIDE].any()


def test_other_drafters_keep_every_row(tmp_path: Path) -> None:
    """Without a draft vocabulary any token is a candidate; DFlash v1 has no codebooks."""
    DFlash2Drafter(network_2(raw_2())).save(tmp_path / "all", in_8_bits=True)
    stored = load_file(tmp_path / "all" / PACKED)
    assert BOOK_IDS not in stored and all(len(stored[name]) == VOCAB for name in NAMES)
    first = DFlashDrafter.random(tiny_target(), head_dim=8)
    DFlashDrafter(first.network, draft_ids=IDS).save(tmp_path / "first", in_8_bits=True)
    assert BOOK_IDS not in load_file(tmp_path / "first" / PACKED)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_all_rows_but_behind_an_anchor_without_one(kind: Any, small: Path) -> None:
    """Behind such an anchor the first draft's scores differ by those of the head alone; later drafts are untouched."""
    target, picks = tiny_target(kind=kind), dict[str, list[Any]]()
    for name, drafter in (("small", read_drafter(small)), ("all", with_all_rows(small))):
        ready(target, drafter)
        seq = admit(target, drafter, PROMPT, SamplingParams(max_tokens=40))
        path = drafter._path
        assert isinstance(path, DFlash2NativePath if kind is NativeDecoder else DFlash2Path)
        picks[name] = []
        for anchor in ANCHORS:
            logits_KV = path.read([seq.row], [anchor], 7, 8)[1][0].float()
            picks[name].append((path.pick([seq.row], [anchor], 7, 8), logits_KV))
        target.cache.free(seq.row)
    for anchor, (ours, logits_KV), (full, _) in zip(ANCHORS, picks["small"], picks["all"], strict=True):
        assert torch.equal(ours.tokens_BKM, full.tokens_BKM)
        torch.testing.assert_close(ours.scores_BKPM[:, 1:], full.scores_BKPM[:, 1:])
        if anchor in OUTSIDE:
            of_head_M = logits_KV[0][ours.chosen_BKM[0, 0].long()]
            torch.testing.assert_close(
                ours.scores_BKPM[0, 0, 0] - ours.scores_BKPM[0, 0, 0, 0], of_head_M - of_head_M[0], atol=1e-5, rtol=1e-5
            )
            assert not torch.allclose(ours.scores_BKPM[0, 0, 0], full.scores_BKPM[0, 0, 0], atol=1e-3)
        else:
            torch.testing.assert_close(ours.scores_BKPM[:, 0], full.scores_BKPM[:, 0])


@needs_native
def test_both_paths_draft_the_same(small: Path) -> None:
    drafts = [drafted(tiny_target(kind=kind), read_drafter(small)) for kind in (Decoder, NativeDecoder)]
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("form", FORMATS)
def test_other_programs_get_codebooks_of_full_size(form: str, small: Path, tmp_path: Path) -> None:
    """And the drafts are the same once the draft vocabulary, which not every format has, is there again."""
    out = tmp_path / ("out.gguf" if form == "gguf" else "out")
    export(read_stored(small), form, out, verifier={"name_or_path": "tiny"})
    again = read_stored(out)
    for name, tensor in read_stored(small).tensors.items():
        assert torch.equal(again.tensors[name], tensor), name
    network = network_of(again.config, again.tensors)
    assert isinstance(network, DFlash2Network)
    drafts = [drafted(tiny_target(), each) for each in (DFlash2Drafter(network, draft_ids=IDS), read_drafter(small))]
    assert drafts[0] == drafts[1]


def test_training_goes_on_from_it_and_rows_of_other_tokens_learn(small: Path) -> None:
    _, network = network_for(tiny_target(), "none", DrafterShape(kind="dflash2"), small, 0)
    assert isinstance(network, DFlash2Network)
    selector = network.candidate_selector
    assert all(selector.get_parameter(book).shape == (VOCAB, 5) for book in BOOKS)
    hidden, logits = torch.randn(1, 3, HIDDEN), torch.randn(1, 3, len(IDS))
    score(selector, hidden, logits, torch.tensor([OUTSIDE[0]]), IDS).scores_BKPM[..., 0].sum().backward()
    gradient = selector.get_parameter(BOOKS[0]).grad
    assert gradient is not None and bool(gradient[OUTSIDE[0]].any()) and not gradient[OUTSIDE[1:]].any()


def test_inspect_says_how_many_rows_there_are(small: Path, tmp_path: Path) -> None:
    DFlash2Drafter(network_2(raw_2()), draft_ids=IDS).save(tmp_path / "dense")
    kinds = list[str]()
    for folder in (small, tmp_path / "dense"):
        kinds += [fact.meaning for fact in described(read_stored(folder), folder) if fact.what == "kind"]
    assert kinds[0].endswith("; its codebooks have rows of 4 tokens: behind others it adds nothing")
    assert "rows" not in kinds[1]


def test_a_packed_folder_is_made_smaller_block_by_block(small: Path, tmp_path: Path) -> None:
    """No number is rounded twice, and what is small already stays as it is."""
    full = tmp_path / "full"
    DFlash2Drafter(network_2(raw_2(top_k=3))).save(full, in_8_bits=True)
    (full / "README.md").write_text("card")
    save_file({"ids": IDS}, full / "draft_ids.safetensors")
    pack = runpy.run_path(str(SCRIPT))["pack"]
    pack(full, tmp_path / "once")
    pack(tmp_path / "once", tmp_path / "twice")
    assert {file.name for file in (tmp_path / "once").iterdir()} == {file.name for file in full.iterdir()}
    before, after = load_file(full / PACKED), load_file(tmp_path / "once" / PACKED)
    assert before.keys() | {BOOK_IDS} == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor[IDS] if name in NAMES else tensor), name
    once, twice = (weights_file(tmp_path / name) for name in ("once", "twice"))
    assert once.read_bytes() == twice.read_bytes()
    assert once.stat().st_mode == (full / PACKED).stat().st_mode


@pytest.mark.parametrize("ids", [[1, 5, 4, 9], [1, 4, 5, VOCAB], [1, 4, 5]], ids=["order", "unknown token", "fewer"])
def test_damaged_rows_are_refused(small: Path, ids: list[int]) -> None:
    stored = load_file(small / PACKED)
    save_file({**stored, BOOK_IDS: torch.tensor(ids, dtype=torch.int32)}, small / PACKED)
    with pytest.raises(ModelFileError, match="fetch the drafter again"):
        read_stored(small)
