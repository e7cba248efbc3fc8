"""Hidden states for training: computed or kept, the same; and a disk that is too small, full or damaged."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_models import needs_library
from small_training import HIDDEN, SHAPE, document, documents, tiny_decoder

from paceline.config import EngineConfig
from paceline.errors import CacheError, ConfigError
from paceline.model.backends import Form
from paceline.model.checkpoint import random_tensors
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import ForwardBatch, Target
from paceline.report.tables import Progress
from paceline.runs import folder as runlog
from paceline.runs.ranks import Ranks
from paceline.train.config import LoopConfig, LossConfig, RemoteConfig, TrainConfig
from paceline.train.documents.dataset import Document
from paceline.train.features import hidden_states as module
from paceline.train.features import on_ray
from paceline.train.features.hidden_states import CachedFeatures, Features, OnlineFeatures, check_room, fingerprint
from paceline.train.features.on_ray import mark_of_target, stored_features
from paceline.train.features.quantised import Int8
from paceline.train.features.sources import Sources
from paceline.train.plan.choices import for_chains
from paceline.train.processes import agreement
from paceline.train.tiny import write_tiny_target

TAPS = (0, 2)
Usage = namedtuple("Usage", ["total", "used", "free"])


def cache_features(
    folder: Path, target: Target, docs: list[Document], taps: tuple[int, ...], needs_final: bool = False, **options: Any
) -> CachedFeatures:
    return module.cache_features(
        CachedFeatures(folder, docs), OnlineFeatures(target, docs, taps, needs_final), **options
    )


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def counted(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[ForwardBatch]:
    """The passes of the target from now on."""
    passes, forward = [], target.forward
    monkeypatch.setattr(target, "forward", lambda batch: (passes.append(batch), forward(batch))[1])
    return passes


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
    docs = documents()
    file = cache_features(tmp_path, tiny_decoder(), docs, TAPS).path(1)
    expected = files_in(tmp_path)
    assert len(expected) == 10
    file.unlink()
    cut = file.with_name(f"{file.name}.{'0' * 16}.part")
    cut.write_bytes(b"cut short")
    os.utime(cut, (1, 1))
    runlog._drop_leftovers.cache_clear()  # as of a new process
    target = tiny_decoder()
    passes = counted(target, monkeypatch)
    heard: list[int] = []
    cache_features(tmp_path, target, docs, TAPS, on_document=lambda: heard.append(1))
    assert len(passes) == 1 and len(heard) == 10
    assert files_in(tmp_path) == expected


def test_other_selections_compute_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents in another order, under other keys, twice, or left out."""
    docs, target = documents(12), tiny_decoder()
    cache_features(tmp_path, tiny_decoder(), docs[:8], TAPS)
    passes = counted(target, monkeypatch)
    others = [*docs[:3:-1], replace(docs[9], key="of another source"), replace(docs[2], key="of a third")]
    heard: list[int] = []
    kept = cache_features(tmp_path, target, others, TAPS, on_document=lambda: heard.append(1))
    assert [batch.tokens for batch in passes] == [docs[number].tokens.tolist() for number in (11, 10, 9, 8)]
    assert len(heard) == len(others) and len(files_in(tmp_path)) == 12
    online = OnlineFeatures(tiny_decoder(), others, TAPS, needs_final=False)
    assert all(torch.equal(kept.of(number).taps_SF, online.of(number).taps_SF) for number in range(len(others)))
    cache_features(tmp_path, target, docs[3:6], TAPS)
    assert len(passes) == 4


def test_two_runs_at_once_write_whole_files(tmp_path: Path) -> None:
    docs, both = documents(), threading.Barrier(2, timeout=20)

    @contextlib.contextmanager
    def together(source: OnlineFeatures, numbers: list[int]) -> Iterator[Callable[[int], Features]]:
        both.wait()
        assert numbers == [*range(10)]
        yield source.of

    def run() -> CachedFeatures:
        source = OnlineFeatures(tiny_decoder(), docs, TAPS, needs_final=False)
        return module.cache_features(CachedFeatures(tmp_path, docs), source, computing=partial(together, source))

    with ThreadPoolExecutor(2) as pool:
        first, second = (job.result() for job in [pool.submit(run), pool.submit(run)])
    assert len(files_in(tmp_path)) == 10
    assert all(torch.equal(first.of(number).taps_SF, second.of(number).taps_SF) for number in range(10))


@pytest.mark.slow
def test_processes_write_files_of_their_own(tmp_path: Path) -> None:
    docs = documents()
    for rank in (0, 1):
        cache_features(tmp_path, tiny_decoder(), docs, TAPS, ranks=Ranks(rank, 2))
        assert len(files_in(tmp_path)) == (5, 10)[rank]
    online = OnlineFeatures(tiny_decoder(), docs, TAPS, needs_final=False)
    kept = cache_features(tmp_path, tiny_decoder(), docs, TAPS, ranks=Ranks(0, 2))
    assert all(torch.equal(kept.of(number).taps_SF, online.of(number).taps_SF) for number in range(10))


def test_the_size_is_known_beforehand(tmp_path: Path) -> None:
    target, docs = tiny_decoder(), documents()
    expected = sum(map(len, docs)) * OnlineFeatures(target, docs, TAPS, needs_final=True).bytes_per_position
    assert expected == sum(len(one) for one in docs) * 3 * HIDDEN * 4
    cache_features(tmp_path, target, docs, TAPS, needs_final=True)
    written = sum(map(len, files_in(tmp_path).values()))
    assert expected <= written < expected + 10 * 1000


def test_a_small_disk_is_refused_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10_000_000, 9_999_000, 1_000))
    target, docs = tiny_decoder(), documents()
    with pytest.raises(
        CacheError, match="features need 0.0 GB in .*: use --features online, fewer prompts, or another --out"
    ):
        cache_features(tmp_path / "new" / "features", target, docs, TAPS)
    assert not target.cache.generations[0] and not (tmp_path / "new").exists()


@pytest.mark.parametrize(("free", "most"), [(510_000, 255_000), (1_100_000, 600_000)])
def test_room_is_left_for_as_much_again_but_at_most_for_a_twentieth_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, most: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10_000_000, 10_000_000 - free, free))
    check_room(tmp_path / "new", most)
    with pytest.raises(CacheError):
        check_room(tmp_path / "new", most + 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 10**12 - 5 * 10**9, 5 * 10**9))
    check_room(tmp_path, 900_000_000)  # of a large disk a twentieth would be far too much


@pytest.mark.slow
def test_what_is_there_needs_no_more_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_features(tmp_path, tiny_decoder(), documents(), TAPS)
    size = len(documents()[1]) * len(TAPS) * HIDDEN * 4
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10_000_000, 10_000_000 - size, 2 * size - 1))
    again = cache_features(tmp_path, tiny_decoder(), documents(), TAPS)
    assert len(again.of(0).taps_SF) == len(documents()[0])
    again.path(1).unlink()
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

    save_file, cached = module.save_file, CachedFeatures(tmp_path, documents())
    monkeypatch.setattr(module, "save_file", save)
    problem = f"{cached.path(1).name}.*No space left.*free space and run again, what is written stays"
    with pytest.raises(CacheError, match=problem):
        cache_features(tmp_path, tiny_decoder(), documents(), TAPS)
    assert [*files_in(tmp_path)] == [cached.path(0).name]


@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    kept = cache_features(tmp_path, tiny_decoder(), documents(), TAPS)
    file = kept.path(4)
    file.write_bytes({"truncated": file.read_bytes()[:-100], "garbage": b"\xff" * 100, "missing": b""}[damage])
    if damage == "missing":
        file.unlink()
    assert kept.of(3).taps_SF.isfinite().all()
    with pytest.raises(CacheError, match=f"{file.name} cannot be read .*: delete it to have it computed again"):
        kept.of(4)


def test_the_fingerprint_names_all_that_decides_the_contents() -> None:
    scale_F = torch.ones(2 * HIDDEN)
    cases = [
        fingerprint("a", torch.float32, TAPS, False),
        fingerprint("b", torch.float32, TAPS, False),
        fingerprint("a", torch.bfloat16, TAPS, False),
        fingerprint("a", torch.float32, (0, 1), False),
        fingerprint("a", torch.float32, TAPS, True),
        fingerprint("a", torch.float32, TAPS, False, Int8(scale_F, 2, torch.float32)),
        fingerprint("a", torch.float32, TAPS, False, Int8(2 * scale_F, 2, torch.float32)),
    ]
    assert len(set(cases)) == len(cases) and cases[0] == fingerprint("a", torch.float32, TAPS, False)


def test_runs_share_a_folder_for_one_target_only(tmp_path: Path) -> None:
    """Another dtype, other taps, another loss or another model under the same name have folders of their own."""
    model, target = write_tiny_target(tmp_path / "target"), tiny_decoder()
    one = TrainConfig(tmp_path / "a", EngineConfig(model=str(model)), shared_features=tmp_path / "shared")

    def folder(config: TrainConfig, taps: tuple[int, ...] = TAPS) -> Path:
        return stored_features(config, target, mark_of_target(config, target), documents(), taps).folder

    assert folder(one) == folder(replace(one, out=tmp_path / "b")) and folder(one).parent == tmp_path / "shared"
    assert folder(replace(one, shared_features=None)).parent == one.out
    others = [folder(one, (0, 1)), folder(replace(one, loop=LoopConfig(loss=LossConfig("kl"))))]
    others.append(folder(replace(one, target=replace(one.target, weight_format="q8_0"))))
    remote = replace(one, remote=RemoteConfig(features_from="http://gpu:8000"))
    others += [folder(remote), folder(replace(one, remote=RemoteConfig(features_from="http://gpu:8001")))]
    alone = replace(remote, shared_features=None)
    elsewhere = replace(alone, remote=RemoteConfig(features_from="http://gpu:8001"))
    assert folder(alone) == folder(elsewhere), "a run may go on with its server elsewhere"
    before = folder(one)
    os.utime(model / "model.safetensors", (1, 1))
    others.append(folder(one))
    assert len({before, *others}) == 7
    target.dtype = torch.bfloat16
    assert folder(one) not in (before, *others)


def test_the_format_in_which_auto_was_loaded_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(tmp_path, EngineConfig(model=str(write_tiny_target(tmp_path / "target"))))
    dense = mark_of_target(config, tiny_decoder())
    monkeypatch.setattr(on_ray, "form_of", lambda target: Form("native", "avx2", "Q4_1+Q8_0"))
    assert mark_of_target(config, tiny_decoder()) != dense


def test_processes_with_model_caches_of_their_own_share_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second machine has downloaded the same target to another place at another time."""
    shutil.copytree(write_tiny_target(tmp_path / "a"), tmp_path / "b", copy_function=shutil.copyfile)
    os.utime(tmp_path / "b" / "model.safetensors", (1, 1))
    sent: list[torch.Tensor] = []

    def broadcast(tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(sent[0]) if sent else sent.append(tensor.clone())

    monkeypatch.setattr(agreement.dist, "broadcast", broadcast)
    docs, folders = documents(), []
    for rank, name in enumerate("ab"):
        config = TrainConfig(tmp_path / "run", EngineConfig(model=str(tmp_path / name)), features="cached")
        sources = Sources(config, tiny_decoder(), TAPS, docs, Ranks(rank, 2), Progress(), lambda: None)
        source = sources.of(docs)
        assert isinstance(source, CachedFeatures)
        folders.append(source.folder)
    assert folders[0] == folders[1] and not source.missing()


@pytest.mark.parametrize("options", [{"feature_dtype": "int8"}, {"features": "online"}, {"features": "streamed"}])
def test_what_is_not_stored_as_computed_is_not_shared(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="shared_features"):
        for_chains(TrainConfig(shared_features=Path("a"), **options))
