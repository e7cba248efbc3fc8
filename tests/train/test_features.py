"""Hidden states for training: computed or kept, the same; and a disk that is too small, full or damaged."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_models import needs_library
from small_training import HIDDEN, SHAPE, document, documents, tiny_decoder

from paceline.errors import CacheError
from paceline.model.checkpoint import random_tensors
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import ForwardBatch, Target
from paceline.runs import folder as runlog
from paceline.runs.ranks import Ranks
from paceline.train.documents.dataset import Document
from paceline.train.features import hidden_states as module
from paceline.train.features.hidden_states import CachedFeatures, OnlineFeatures, check_room, fingerprint

TAPS = (0, 2)
Usage = namedtuple("Usage", ["total", "used", "free"])


def cache_features(
    folder: Path, target: Target, docs: list[Document], taps: tuple[int, ...], needs_final: bool = False, **options: Any
) -> CachedFeatures:
    return module.cache_features(folder, OnlineFeatures(target, docs, taps, needs_final), **options)


@pytest.mark.slow
@pytest.mark.parametrize("needs_final", [False, True])
@pytest.mark.parametrize("taps", [TAPS, (1, 3)])
def test_kept_ones_equal_computed_ones(tmp_path: Path, taps: tuple[int, ...], needs_final: bool) -> None:
    target, docs = tiny_decoder(), documents()
    online = OnlineFeatures(target, docs, taps, needs_final)
    kept = cache_features(tmp_path / "features", target, docs, taps, needs_final=needs_final)
    for number in (9, 0, 3, 4, 8):
        own, read = online.of(number), kept.of(number)
        assert own.taps_SF.shape == (len(docs[number]), len(taps) * HIDDEN)
        assert torch.equal(read.taps_SF, own.taps_SF)
        assert (read.final_SD is None) == (own.final_SD is None) == (not needs_final)
        if own.final_SD is not None and read.final_SD is not None:
            assert torch.equal(read.final_SD, own.final_SD)
    assert target.cache.allocate() is not None, "rows are given back"


@pytest.mark.parametrize("taps", [TAPS, (1, 3)])
@torch.inference_mode()
def test_final_states_are_what_the_head_reads(taps: tuple[int, ...]) -> None:
    """Through the head they are the target's own logits, position by position; the taps are what decoding observes."""
    target, docs = tiny_decoder(), documents()
    features = OnlineFeatures(target, docs, taps, needs_final=True).of(5)
    twin = tiny_decoder()
    twin.set_taps(taps)
    row = twin.cache.allocate()
    assert row is not None and features.final_SD is not None
    out = twin.forward(ForwardBatch([row], [0], [len(docs[5])], docs[5].tokens.tolist()))
    assert out.logits_TV is not None and out.taps_TF is not None
    logits = target.head(features.final_SD)
    torch.testing.assert_close(logits, out.logits_TV)
    assert logits.argmax(-1).tolist() == out.logits_TV.argmax(-1).tolist()
    torch.testing.assert_close(features.taps_SF, out.taps_TF)


@needs_library
def test_a_beginning_shared_with_the_document_before_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit what the whole document gives; a row that somebody else had meanwhile lends nothing."""
    tensors = list(random_tensors(SHAPE))
    target, twin = (NativeDecoder(SHAPE, tensors, num_rows=1, max_len=64) for _ in range(2))
    first, ends = document(1, 20), [[4, 5], [4, 6, 7], [9], []]
    docs = [replace(first, tokens=np.array([*first.tokens, *end], dtype=np.int32)) for end in ends]
    docs.append(document(2, 12))
    sizes, forward = [], target.forward

    def counted(batch: ForwardBatch) -> Any:
        sizes.append(batch.num_tokens)
        return forward(batch)

    monkeypatch.setattr(target, "forward", counted)
    online = OnlineFeatures(target, docs, TAPS, True)
    for number in range(len(docs)):
        alone = OnlineFeatures(twin, docs, TAPS, True).of(number)
        shared = online.of(number)
        assert shared.final_SD is not None and alone.final_SD is not None
        assert torch.equal(shared.taps_SF, alone.taps_SF) and torch.equal(shared.final_SD, alone.final_SD)
    whole = len(first.tokens)
    assert sizes == [whole + 2, 2, 1, 1, len(docs[-1].tokens)]
    target.cache.free(target.cache.allocate() or 0)
    online.of(4)
    assert sizes[-1] == len(docs[-1].tokens)


def test_online_features_can_be_learned_from() -> None:
    """They come out of inference mode; a drafter's backward must be able to keep them."""
    weight = torch.randn(len(TAPS) * HIDDEN, 3, requires_grad=True)
    taps = OnlineFeatures(tiny_decoder(), documents(), TAPS, needs_final=False)
    (torch.cat([taps.of(0).taps_SF, taps.of(1).taps_SF]) @ weight).sum().backward()
    assert weight.grad is not None


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs, calls = documents(), []
    cache_features(tmp_path, tiny_decoder(), docs, TAPS)
    expected = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(expected) == [f"document-{number:06d}.safetensors" for number in range(10)]
    (tmp_path / "document-000001.safetensors").unlink()
    cut = tmp_path / f"document-000001.safetensors.{'0' * 16}.part"
    cut.write_bytes(b"cut short")
    os.utime(cut, (1, 1))
    runlog._drop_leftovers.cache_clear()  # as of a new process
    target = tiny_decoder()
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda batch: (calls.append(batch), forward(batch))[1])
    heard: list[int] = []
    cache_features(tmp_path, target, docs, TAPS, on_document=lambda: heard.append(1))
    assert len(calls) == 1 and len(heard) == 10
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == expected


@pytest.mark.slow
def test_processes_write_files_of_their_own(tmp_path: Path) -> None:
    docs = documents()
    for rank in (0, 1):
        cache_features(tmp_path, tiny_decoder(), docs, TAPS, ranks=Ranks(rank, 2))
        assert len(list(tmp_path.iterdir())) == (5, 10)[rank]
    online = OnlineFeatures(tiny_decoder(), docs, TAPS, needs_final=False)
    kept = cache_features(tmp_path, tiny_decoder(), docs, TAPS, ranks=Ranks(0, 2))
    assert all(torch.equal(kept.of(number).taps_SF, online.of(number).taps_SF) for number in range(10))


def test_the_size_is_known_beforehand(tmp_path: Path) -> None:
    target, docs = tiny_decoder(), documents()
    expected = sum(map(len, docs)) * OnlineFeatures(target, docs, TAPS, needs_final=True).bytes_per_position
    assert expected == sum(len(one) for one in docs) * 3 * HIDDEN * 4
    cache_features(tmp_path, target, docs, TAPS, needs_final=True)
    written = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert expected <= written < expected + 10 * 1000


def test_a_small_disk_is_refused_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10_000_000, 9_490_000, 510_000))
    target, docs = tiny_decoder(), documents()
    with pytest.raises(
        CacheError, match="features need 0.0 GB in .*: use --features online, fewer prompts, or another --out"
    ):
        cache_features(tmp_path / "new" / "features", target, docs, TAPS)
    assert not target.cache.generations[0] and not (tmp_path / "new").exists()
    check_room(tmp_path / "new", 10_000)
    with pytest.raises(CacheError):
        check_room(tmp_path / "new", 10_001)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 10**12 - 5 * 10**9, 5 * 10**9))
    check_room(tmp_path, 900_000_000)  # of a large disk a twentieth would be far too much


@pytest.mark.slow
def test_what_is_there_needs_no_more_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_features(tmp_path, tiny_decoder(), documents(), TAPS)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10_000_000, 9_500_000, 500_000))
    again = cache_features(tmp_path, tiny_decoder(), documents(), TAPS)
    assert len(again.of(0).taps_SF) == len(documents()[0])
    (tmp_path / "document-000001.safetensors").unlink()
    with pytest.raises(CacheError, match="features need"):
        cache_features(tmp_path, tiny_decoder(), documents(), TAPS)


def test_a_disk_that_fills_up_leaves_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def save(tensors: Any, path: Path) -> None:
        if written:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        written.append(path)
        save_file(tensors, path)

    save_file = module.save_file
    monkeypatch.setattr(module, "save_file", save)
    with pytest.raises(
        CacheError, match="document-000001.*No space left.*free space and run again, what is written stays"
    ):
        cache_features(tmp_path, tiny_decoder(), documents(), TAPS)
    assert [path.name for path in tmp_path.iterdir()] == ["document-000000.safetensors"]


@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    kept = cache_features(tmp_path, tiny_decoder(), documents(), TAPS)
    file = tmp_path / "document-000004.safetensors"
    file.write_bytes({"truncated": file.read_bytes()[:-100], "garbage": b"\xff" * 100, "missing": b""}[damage])
    if damage == "missing":
        file.unlink()
    assert kept.of(3).taps_SF.isfinite().all()
    with pytest.raises(
        CacheError, match="document-000004.safetensors cannot be read .*: delete the folder to have it made again"
    ):
        kept.of(4)


def test_the_fingerprint_names_all_that_decides_the_contents() -> None:
    docs = documents()
    cases = [
        fingerprint("a", torch.float32, docs, TAPS, False),
        fingerprint("b", torch.float32, docs, TAPS, False),
        fingerprint("a", torch.bfloat16, docs, TAPS, False),
        fingerprint("a", torch.float32, docs[1:], TAPS, False),
        fingerprint("a", torch.float32, docs[::-1], TAPS, False),
        fingerprint("a", torch.float32, docs, (0, 1), False),
        fingerprint("a", torch.float32, docs, TAPS, True),
    ]
    assert len(set(cases)) == len(cases) and cases[0] == fingerprint("a", torch.float32, documents(), TAPS, False)
