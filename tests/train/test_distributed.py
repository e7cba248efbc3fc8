"""Three processes train as one does: same losses, same weights, whole checkpoints, nobody left waiting.

tests/support/many_processes.py is what the processes run; one start of them goes through all of it.

Tolerances. The losses and weights of one process and of several differ by the order in which float32 gradients are
summed: 2e-6 of a loss, 1e-5 of a norm, 5e-6 of a weight (of size 0.02) after a few steps. Products in bfloat16 round a
sum that differs in its last bit to a neighbour: 2e-3 of a loss, 2e-3 of a weight. Sums of the same order have the same
bits.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from many_processes import BASE, CASES, KILLED_AT, SCENARIOS, STEP_TIMEOUT_S, WAYS, WORLD, make_trainer, run, started
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.runs.ranks import Ranks
from paceline.train.config import LoopConfig
from paceline.train.learn.checkpoint import latest_checkpoint
from paceline.train.learn.packs import PackBudget
from paceline.train.processes.buckets import _split
from paceline.train.processes.parallel import Piece, Replicated, Sharded, make_parallel

pytestmark = pytest.mark.slow
EXACT = {"objective": 2e-6, "norm": 1e-5, "heldout": 2e-6, "weight": 5e-6}
TOLERANCES = {
    "muon": {"objective": 2e-4, "norm": 2e-3, "heldout": 2e-4, "weight": 5e-4},
    "bfloat16": dict.fromkeys(EXACT, 2e-3),
}
"""Muon's Newton-Schulz iterations round to bfloat16 too."""
LAST = WORLD - 1


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """Figures and weights of every scenario on one process."""
    folder, done = tmp_path_factory.mktemp("alone"), {}
    for name in {name for name, _ in CASES}:
        trainer = make_trainer(SCENARIOS[name], folder / name)
        done[name] = (run(trainer), trainer.parallel.weights(trainer.network))
    return done


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run that one process began."""
    folder = tmp_path_factory.mktemp("begun")
    run(make_trainer(replace(BASE, checkpoint_minutes=0), folder), KILLED_AT)
    return folder


@pytest.fixture(scope="module")
def group(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the processes have filled; they also go on from what one began."""
    folder = tmp_path_factory.mktemp("processes")
    for way in WAYS:
        shutil.copytree(begun, folder / f"resumed-{way}")
    statuses, outputs = started(folder)
    ended = dict.fromkeys(("uneven", "raising", "late", "train"), [0] * WORLD)
    assert statuses == ended | {"dying": [0] * LAST + [-9]}, outputs
    return folder


def figures_of(folder: Path, name: str, rank: int = 0) -> Any:
    return json.loads((folder / f"{name}-{rank}.json").read_text())


@pytest.mark.parametrize(("name", "way"), CASES)
def test_same_losses_and_weights_as_one_process(group: Path, alone: Any, way: str, name: str) -> None:
    """Within the tolerances at the top of this file; and all processes tell the same to the bit."""
    (expected, weights), within = alone[name], TOLERANCES.get(name, EXACT)
    got = figures_of(group, way)[name]
    assert len(got["objective"]) == got["steps"] == SCENARIOS[name].max_steps
    for key in ("objective", "norm", "heldout"):
        assert got[key] == pytest.approx(expected[key], rel=within[key]), key
    for tensor_name, tensor in load_file(group / f"{name}-{way}.safetensors").items():
        torch.testing.assert_close(tensor, weights[tensor_name], rtol=0, atol=within["weight"], msg=tensor_name)
    for rank in range(1, WORLD):
        assert figures_of(group, way, rank)[name] == got


@pytest.mark.parametrize("way", WAYS)
def test_begun_by_several_continued_by_one(group: Path, alone: Any, tmp_path: Path, way: str) -> None:
    """The losses of the whole run on one process, within 2e-6."""
    shutil.copytree(group / f"killed-{way}", tmp_path / "run")
    checkpoint = latest_checkpoint(tmp_path / "run")
    assert checkpoint is not None and checkpoint.trainer["step"] == KILLED_AT - 1
    trainer = make_trainer(BASE, tmp_path / "run")
    assert trainer.resume()
    assert_continues(run(trainer), alone["base"][0])


@pytest.mark.parametrize("way", WAYS)
def test_begun_by_fewer_continued_by_several(group: Path, alone: Any, way: str) -> None:
    """The losses of the whole run on one process, within 2e-6."""
    assert_continues(figures_of(group, way)["resumed"], alone["base"][0])


def assert_continues(got: dict[str, Any], whole: dict[str, Any]) -> None:
    rest = {step: loss for step, loss in whole["objective"].items() if int(step) >= KILLED_AT}
    assert got["objective"] == pytest.approx(rest, rel=2e-6)
    assert got["heldout"] == pytest.approx(whole["heldout"], rel=2e-6)


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_are_of_one_format(group: Path, begun: Path, way: str) -> None:
    """Shapes and names to the letter, values within 5e-6."""
    files = [latest_checkpoint(folder) for folder in (begun, group / f"killed-{way}")]
    for file in ("model.safetensors", "optimiser.safetensors"):
        own, other = (load_file(each.folder / file) for each in files if each is not None)
        assert {name: tensor.shape for name, tensor in own.items()} == {
            name: tensor.shape for name, tensor in other.items()
        }
        for name, tensor in own.items():
            torch.testing.assert_close(tensor, other[name], rtol=0, atol=5e-6, msg=name)


def test_a_sharded_network_computes_in_bfloat16_and_is_kept_in_float32(group: Path) -> None:
    low, full = "torch.bfloat16", "torch.float32"
    for rank in range(WORLD):
        seen = figures_of(group, "precision", rank)
        assert seen == {"weight": low, "norm": low, "stream": full, "kept": full, "moments": full}


@pytest.mark.parametrize("way", WAYS)
def test_streamed_features_and_packs_made_ahead_change_no_bit(group: Path, way: str) -> None:
    done = figures_of(group, way)
    assert done["streamed"] == done["base"]


@pytest.mark.parametrize("way", WAYS)
def test_all_stop_at_the_same_step(group: Path, way: str) -> None:
    first, *others = (figures_of(group, way, rank)["timed"] for rank in range(WORLD))
    assert first["steps"] < 10_000 and others == [first] * (WORLD - 1)


def test_gradients_are_sent_during_the_backward_pass_and_sum_to_the_same_bits(group: Path) -> None:
    for rank in range(WORLD):
        num_overlapped, num_buckets = figures_of(group, "during", rank)
        assert num_overlapped == num_buckets > 5
        assert figures_of(group, "after", rank)[0] == 0
    during, after = (load_file(group / f"{name}.safetensors") for name in ("during", "after"))
    assert during.keys() == after.keys() and all(torch.equal(tensor, after[name]) for name, tensor in during.items())
    whole = load_file(group / "base-replicated.safetensors")  # other buckets: three numbers summed in another order
    for name, tensor in during.items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=EXACT["weight"], msg=name)


def test_all_begin_with_the_first_ones_weights_and_are_told_when_they_differ(group: Path) -> None:
    for rank in range(WORLD):
        seen = figures_of(group, "differ", rank)
        assert seen["repaired"] == figures_of(group, "replicated")["base"], "to the bit"
        for moment in ("left", "later"):
            assert f"(of {WORLD}, counted from 0) differ from process 0: process {LAST} in norm.weight" in seen[moment]
            assert "start all processes again" in seen[moment]
        assert seen["later step"] == 3
        assert "process 1 in the checkpoint it reads" in seen["resumed"]
    newest = latest_checkpoint(group / "later")
    assert newest is not None and newest.trainer["step"] == 2, "what differs is not written"


def test_a_stage_may_last_longer_than_a_step(group: Path) -> None:
    for rank in range(WORLD):
        error, seconds = figures_of(group, "uneven", rank)
        assert error == "no error" and seconds > STEP_TIMEOUT_S


def test_who_fails_dies_or_is_late_is_named(group: Path) -> None:
    for rank in range(WORLD):
        error, _ = figures_of(group, "raising", rank)
        if rank == 1:
            assert error == "ValueError: the disk is gone"
        else:
            assert error.startswith(
                f"ProcessesError: process 1 of {WORLD} (counted from 0) ended with ValueError: the disk is gone"
            )
        error, _ = figures_of(group, "late", rank)
        assert error.startswith("ProcessesError: ") and (
            rank == 1 or "a longer --step-timeout-minutes waits longer" in error
        )
        if rank < WORLD - 1:
            error, _ = figures_of(group, "dying", rank)
            assert error.startswith(f"ProcessesError: process {LAST} of {WORLD} (counted from 0) gave no sign of life")


def test_sharded_processes_take_equally_many_pieces() -> None:
    chosen = [(number, np.arange(4 + number, 8 + number)) for number in range(5)]
    shares = [Sharded(Ranks(rank, 3), torch.device("cpu")).pieces(chosen, PackBudget(4)) for rank in range(3)]
    assert [[piece.weight for piece in share] for share in shares] == [[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]
    real = [number for share in shares for piece in share if piece.weight for number, _ in piece.chosen]
    assert sorted(real) == [0, 1, 2, 3, 4]
    assert sum(len(anchors_A) for _, anchors_A in shares[2][1].chosen) == 1
    assert Replicated(Ranks(2, 3), torch.device("cpu")).pieces(chosen, PackBudget(4)) == [Piece([chosen[2]])]


def test_ways_by_name() -> None:
    device, two = torch.device("cpu"), Ranks(0, 2)
    assert [type(make_parallel(way, two, device)) for way in ("auto", *WAYS)] == [Replicated, Replicated, Sharded]
    assert type(make_parallel("sharded", Ranks(), device)) is Replicated
    with pytest.raises(ConfigError, match="auto, replicated, sharded"):
        LoopConfig(parallel="both")


def test_buckets_hold_neighbours_and_large_ones_alone() -> None:
    sizes = (2, 3, 4, 1, 9, 1)
    buckets = _split([nn.Parameter(torch.zeros(size)) for size in sizes], 4 * 5)
    assert [[len(each) for each in bucket] for bucket in buckets] == [[2, 3], [4, 1], [9], [1]]


def test_recomputed_layers_give_the_same_gradients_and_keep_less(tmp_path: Path) -> None:
    gradients, kept, names = [], [], []
    for name in ("base", "recomputed"):
        trainer = make_trainer(SCENARIOS[name], tmp_path)
        names.append(list(trainer.parallel.weights(trainer.network)))
        chosen, num_slots, _ = trainer.planner.step(trainer.state.place)
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        for layer in trainer.network.layers:  # the inputs that a recomputed layer keeps are not seen by the hooks below
            layer.register_forward_pre_hook(lambda _, inputs, keep=pack: [keep(each) for each in inputs[1:3]] and None)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, _ = trainer.pack_loss(trainer.packer.pack(chosen[:2]), trainer.head, num_slots)
        kept.append(sum(saved.values()))
        loss.backward()
        gradients.append([parameter.grad for parameter in trainer.network.parameters()])
    assert names[0] == names[1]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True))
    assert kept[1] < 0.5 * kept[0]
