"""Packs that are made beforehand: the same bits in the same order, errors where they are asked for, and no thread
left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training import Killed, config, killed_in, trainer

from paceline.errors import CacheError
from paceline.train.config import LoopConfig, LossConfig
from paceline.train.features.hidden_states import CachedFeatures, Features, OnlineFeatures, cache_features
from paceline.train.features.stream import PackPrefetcher, packs_ahead, upcoming_pieces
from paceline.train.learn.loop import Trainer
from paceline.train.learn.packs import Chosen


def cached(one: Trainer, folder: Path) -> CachedFeatures:
    """The trainer's features from disk."""
    source = one.packer.features
    assert isinstance(source, OnlineFeatures)
    kept = cache_features(CachedFeatures(folder, source.documents), source)
    object.__setattr__(one.packer, "features", kept)
    return kept


def curve(one: Trainer) -> list[tuple[float, float]]:
    steps: list[dict[str, Any]] = []
    one.run(steps.append)
    return [(step["loss"], step["grad_norm"]) for step in steps]


SETTINGS = {
    "packs": config(max_steps=12),
    "pieces": config(max_steps=12, tokens_per_pack=16, blocks_per_pack=2),
    "finals": config(loss=LossConfig("kl")),
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_no_bit_changes(tmp_path: Path, settings: LoopConfig) -> None:
    curves, networks = [], []
    for is_ahead in (False, True):
        one = trainer(tmp_path / f"run-{is_ahead}", settings)
        cached(one, tmp_path / "features")
        if is_ahead:
            with packs_ahead(one):
                curves.append(curve(one))
        else:
            curves.append(curve(one))
        networks.append(one.network.state_dict())
    assert curves[0] == curves[1] and len(curves[0]) == settings.max_steps
    assert all(torch.equal(tensor, networks[1][name]) for name, tensor in networks[0].items())


@pytest.mark.slow
def test_a_resumed_run_has_them_from_its_place_on(tmp_path: Path) -> None:
    settings = config(checkpoint_minutes=0.0)
    whole = curve(trainer(tmp_path / "whole", settings))
    first = trainer(tmp_path / "run", settings)
    with pytest.raises(Killed), packs_ahead(first):
        first.run(killed_in(5))
    again = trainer(tmp_path / "run", settings)
    assert again.resume() and again.state.step == 4
    with packs_ahead(again):
        assert curve(again) == whole[4:]


def test_a_file_that_is_gone_stops_the_trainer_with_its_error(tmp_path: Path) -> None:
    one = trainer(tmp_path / "run", config())
    kept = cached(one, tmp_path / "features")
    for path in kept.folder.rglob("*.safetensors"):
        path.unlink()
    before = threading.active_count()
    with pytest.raises(CacheError, match="delete it to have it computed again"), packs_ahead(one):
        one.run()
    assert threading.active_count() == before
    assert one.pack == one.packer.pack, "the trainer makes its packs itself again"


class Counted:
    """Features that count how often they are asked for."""

    def __init__(self) -> None:
        self.num_asked = 0

    def of(self, number: int) -> Features:
        self.num_asked += 1
        return Features(torch.full((40, 4), float(number)), None)


def test_few_packs_wait_and_none_is_made_after_the_end(tmp_path: Path) -> None:
    one, source = trainer(tmp_path, config()), Counted()
    object.__setattr__(one.packer, "features", source)
    before, pieces, num_documents = threading.active_count(), upcoming_pieces(one), 0
    ahead = PackPrefetcher(one.packer, upcoming_pieces(one), depth=2)
    for _ in range(20):
        chosen = next(pieces)
        num_documents += len(chosen)
        pack = ahead.take(chosen)
        assert pack.taps_NF[0, 0] == chosen[0][0]
        assert source.num_asked <= num_documents + 2 * 4, "two packs of four blocks at most"
    ahead.close()
    assert threading.active_count() == before
    at_the_end = source.num_asked
    ahead.close()
    assert source.num_asked == at_the_end


def test_a_plan_that_fails_does_not_leave_the_trainer_waiting(tmp_path: Path) -> None:
    one = trainer(tmp_path, config())

    def pieces() -> Iterator[list[Chosen]]:
        yield first
        raise ValueError("no plan")

    first = next(upcoming_pieces(one))
    ahead = PackPrefetcher(one.packer, pieces())
    ahead.take(first)
    for _ in range(2):
        with pytest.raises(ValueError, match="no plan"):
            ahead.take(first)
    ahead.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_packs_by_way_of_pinned_memory_are_those_made_on_the_gpu(tmp_path: Path) -> None:
    one = trainer(tmp_path / "run", config(loss=LossConfig("kl")))
    cached(one, tmp_path / "features")
    packer, pieces = replace(one.packer, device="cuda"), upcoming_pieces(one)
    ahead = PackPrefetcher(packer, upcoming_pieces(one))
    for _ in range(20):
        chosen = next(pieces)
        for own, other in zip(ahead.take(chosen).tensors(), packer.pack(chosen).tensors(), strict=True):
            assert own.device.type == "cuda" and torch.equal(own, other)
    ahead.close()
