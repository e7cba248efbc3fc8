"""Two processes train as one does: same losses, same weights, whole checkpoints, nobody left waiting.

The file is also what the two processes run, as torchrun would start them: `python test_distributed.py FOLDER` with RANK and
the like in the environment. They go through all scenarios in one start and leave their figures in FOLDER.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.draft.checkpoint import DFlashConfig, new_config
from paceline.draft.dflash import DFlashNetwork
from paceline.errors import ConfigError
from paceline.train.checkpoint import latest_checkpoint
from paceline.train.config import LoopConfig, OptimConfig
from paceline.train.dataset import Corpus, Document
from paceline.train.features import Features, train_in_scaled_units
from paceline.train.loop import Trainer
from paceline.train.losses import Head
from paceline.train.packs import DFlashTrainable
from paceline.train.parallel import Piece, Replicated, Sharded, make_parallel, process_group
from paceline.train.ranks import Ranks

HIDDEN, VOCAB, TAPS, STEPS, KILLED_AT = 32, 96, (1, 3), 6, 4
PATIENCE = 300
"""Seconds, on a machine with other work too, after which two processes count as deadlocked and say where they are."""

BASE = LoopConfig(max_steps=STEPS, blocks_per_step=24, anchors=5, blocks_per_pack=10, autocast=False, checkpoint_minutes=1e6)
SCENARIOS = {
    "base": BASE,
    "muon": replace(BASE, max_steps=3, optim=OptimConfig("muon")),
    "recomputed": replace(BASE, gradient_checkpointing=True),
    "one-document": replace(BASE, blocks_per_step=5, blocks_per_pack=5),
    "vocabulary": replace(BASE, loss=replace(BASE.loss, vocab=24)),
}
WAYS = ("replicated", "sharded")


class RandomFeatures:
    """Hidden states drawn from the document's number."""

    def __init__(self, documents: list[Document]) -> None:
        self._documents = documents

    def of(self, number: int) -> Features:
        generator = torch.Generator().manual_seed(number)
        return Features(torch.randn(len(self._documents[number]), len(TAPS) * HIDDEN, generator=generator), None)


def make_trainer(config: LoopConfig, folder: Path, ranks: Ranks | None = None) -> Trainer:
    raw = new_config(
        HIDDEN, VOCAB, 6,
        num_layers=2, block_size=4, mask_token_id=VOCAB - 1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48,
    )  # fmt: skip
    raw["dflash_config"]["target_layer_ids"] = list(TAPS)
    draw = np.random.default_rng(0)
    documents = [
        Document(f"{number}", draw.integers(0, VOCAB - 1, int(draw.integers(12, 40))).astype(np.int32), 4)
        for number in range(14)
    ]
    weight_VD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
    network = DFlashNetwork.random(DFlashConfig.from_json(raw))
    train_in_scaled_units(network, torch.exp2(torch.arange(len(TAPS) * HIDDEN) % 3 - 1.0))
    trainer = Trainer(
        DFlashTrainable(network, raw), Corpus(documents[:13], documents[13:]),
        RandomFeatures(documents), weight_VD, Head(weight_VD), config, folder=folder, ranks=ranks,
    )  # fmt: skip
    trainer.heldout["heldout"] = (documents[13:], RandomFeatures(documents[13:]))  # one: a second process has none
    return trainer


class Killed(Exception):
    """Stops a run between its checkpoints."""


def run(trainer: Trainer, killed_at: int | None = None) -> dict[str, Any]:
    """Figures of a run: objective, norm and held-out loss by step."""
    figures: dict[str, Any] = {"objective": {}, "norm": {}}

    def on_step(seen: dict[str, Any]) -> None:
        if seen["step"] == killed_at:
            raise Killed
        figures["objective"][str(seen["step"])] = seen["objective"]
        figures["norm"][str(seen["step"])] = seen["grad_norm"]
        if "heldout" in seen:
            figures["heldout"] = seen["heldout"]["loss"]

    try:
        trainer.run(on_step)
    except Killed:
        return figures
    return figures | {"steps": trainer.state.step}


@contextlib.contextmanager
def clock_times(factor: float) -> Iterator[None]:
    """The loop's clock that many times as fast."""
    clock = SimpleNamespace(perf_counter=lambda: factor * time.perf_counter(), monotonic=time.monotonic)
    with mock.patch("paceline.train.loop.time", clock):
        yield


def one_of_two(folder: Path) -> None:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    ranks = Ranks.here()
    with process_group(ranks, "cpu") as wait:
        for way in WAYS:
            done: dict[str, Any] = {}
            for name, config in SCENARIOS.items():
                trainer = make_trainer(replace(config, parallel=way), folder / f"{name}-{way}", ranks)
                done[name] = run(trainer)
                weights = trainer.parallel.weights(trainer.network)
                if ranks.is_first:
                    save_file(weights, folder / f"{name}-{way}.safetensors")
            killed = replace(BASE, parallel=way, checkpoint_minutes=0)
            done["killed"] = run(make_trainer(killed, folder / f"killed-{way}", ranks), KILLED_AT)
            timed = replace(BASE, parallel=way, max_steps=10_000, max_minutes=0.4 / 60)
            with clock_times(1 + 2 * ranks.rank):
                done["timed"] = run(make_trainer(timed, folder / f"timed-{way}", ranks))
            wait()
            if ranks.is_first:
                shutil.copytree(folder / "killed-alone", folder / f"resumed-{way}")
            wait()
            resumed = make_trainer(replace(BASE, parallel=way), folder / f"resumed-{way}", ranks)
            assert resumed.resume()
            done["resumed"] = run(resumed)
            (folder / f"{way}-{ranks.rank}.json").write_text(json.dumps(done))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """Figures and weights of every scenario on one process."""
    folder, done = tmp_path_factory.mktemp("alone"), {}
    for name, config in SCENARIOS.items():
        trainer = make_trainer(config, folder / name)
        done[name] = (run(trainer), trainer.parallel.weights(trainer.network))
    return done


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that two processes have filled."""
    folder = tmp_path_factory.mktemp("pair")
    run(make_trainer(replace(BASE, checkpoint_minutes=0), folder / "killed-alone"), KILLED_AT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=PATIENCE + 30)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return folder


def figures_of(pair: Path, way: str, rank: int = 0) -> dict[str, Any]:
    return json.loads((pair / f"{way}-{rank}.json").read_text())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "muon"])
def test_same_losses_and_weights_as_one_process(pair: Path, alone: Any, way: str, name: str) -> None:
    expected, weights = alone[name]
    got = figures_of(pair, way)[name]
    assert len(got["objective"]) == got["steps"] == SCENARIOS[name].max_steps
    assert got["objective"] == pytest.approx(expected["objective"], rel=2e-6)
    assert got["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    assert got["heldout"] == pytest.approx(expected["heldout"], rel=2e-6)
    for tensor_name, tensor in load_file(pair / f"{name}-{way}.safetensors").items():
        torch.testing.assert_close(tensor, weights[tensor_name], rtol=0, atol=5e-6, msg=tensor_name)
    assert got == figures_of(pair, way, 1)[name]


@pytest.mark.parametrize("way", WAYS)
def test_muon_on_two_processes(pair: Path, alone: Any, way: str) -> None:
    """Its Newton-Schulz iterations round to bfloat16, so a last bit of a gradient shows."""
    assert figures_of(pair, way)["muon"]["objective"] == pytest.approx(alone["muon"][0]["objective"], rel=2e-4)


@pytest.mark.parametrize("way", WAYS)
def test_begun_by_two_continued_by_one(pair: Path, alone: Any, tmp_path: Path, way: str) -> None:
    shutil.copytree(pair / f"killed-{way}", tmp_path / "run")
    checkpoint = latest_checkpoint(tmp_path / "run")
    assert checkpoint is not None and checkpoint.trainer["step"] == KILLED_AT - 1
    trainer = make_trainer(BASE, tmp_path / "run")
    assert trainer.resume()
    assert_continues(run(trainer), alone["base"][0])


@pytest.mark.parametrize("way", WAYS)
def test_begun_by_one_continued_by_two(pair: Path, alone: Any, way: str) -> None:
    assert_continues(figures_of(pair, way)["resumed"], alone["base"][0])


def assert_continues(got: dict[str, Any], whole: dict[str, Any]) -> None:
    rest = {step: loss for step, loss in whole["objective"].items() if int(step) >= KILLED_AT}
    assert got["objective"] == pytest.approx(rest, rel=2e-6)
    assert got["heldout"] == pytest.approx(whole["heldout"], rel=2e-6)


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_are_of_one_format(pair: Path, way: str) -> None:
    files = [latest_checkpoint(pair / name) for name in ("killed-alone", f"killed-{way}")]
    for file in ("model.safetensors", "optimiser.safetensors"):
        own, other = (load_file(each.folder / file) for each in files if each is not None)
        assert {name: tensor.shape for name, tensor in own.items()} == {name: tensor.shape for name, tensor in other.items()}
        for name, tensor in own.items():
            torch.testing.assert_close(tensor, other[name], rtol=0, atol=5e-6, msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_all_stop_at_the_same_step(pair: Path, way: str) -> None:
    first, second = (figures_of(pair, way, rank)["timed"] for rank in range(2))
    assert first["steps"] == second["steps"] < 10_000
    assert first == second


def test_sharded_processes_take_equally_many_pieces() -> None:
    chosen = [(number, np.arange(4 + number, 8 + number)) for number in range(5)]
    shares = [Sharded(Ranks(rank, 3), torch.device("cpu")).pieces(chosen, 4) for rank in range(3)]
    assert [[piece.weight for piece in share] for share in shares] == [[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]
    real = [number for share in shares for piece in share if piece.weight for number, _ in piece.chosen]
    assert sorted(real) == [0, 1, 2, 3, 4]
    assert sum(len(anchors_A) for _, anchors_A in shares[2][1].chosen) == 1
    assert Replicated(Ranks(2, 3), torch.device("cpu")).pieces(chosen, 4) == [Piece([chosen[2]])]


def test_ways_by_name() -> None:
    device, two = torch.device("cpu"), Ranks(0, 2)
    assert [type(make_parallel(way, two, device)) for way in ("auto", *WAYS)] == [Replicated, Replicated, Sharded]
    assert type(make_parallel("sharded", Ranks(), device)) is Replicated
    with pytest.raises(ConfigError, match="auto, replicated, sharded"):
        LoopConfig(parallel="both")


def test_recomputed_layers_give_the_same_gradients_and_keep_less(tmp_path: Path) -> None:
    gradients, kept, names = [], [], []
    for is_recomputed in (False, True):
        trainer = make_trainer(replace(BASE, gradient_checkpointing=is_recomputed), tmp_path)
        names.append(list(trainer.parallel.weights(trainer.network)))
        chosen, num_slots, _ = trainer.planner.step(trainer.state.place)
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        for layer in trainer.network.layers:  # the inputs that a recomputed layer keeps are not seen by the hooks below
            layer.register_forward_pre_hook(lambda _, given, keep=pack: [keep(each) for each in given[1:3]] and None)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, _ = trainer.pack_loss(trainer.packer.pack(chosen[:2]), trainer.head, num_slots)
        kept.append(sum(saved.values()))
        loss.backward()
        gradients.append([parameter.grad for parameter in trainer.network.parameters()])
    assert names[0] == names[1]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True))
    assert kept[1] < 0.5 * kept[0]


if __name__ == "__main__":
    one_of_two(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(
        0
    )  # all figures are written; threads of gloo have ended a process with "terminate called" while Python was ending it
