"""What tests of several training processes share: a tiny trainer, its runs, and the processes that torchrun would
start.

The file is also what the processes run: `python many_processes.py FOLDER` forks them, each with RANK and the like in
its environment. They go through all scenarios in one start and leave their figures in FOLDER. Three train; those of the
groups that fail, three for each kind of failure, mostly wait meanwhile.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import signal
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
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from small_training import Killed

from paceline.draft.dflash.config import DFlashConfig, new_config
from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.errors import ProcessesError
from paceline.runs.ranks import Ranks
from paceline.train.config import LoopConfig, OptimConfig
from paceline.train.documents.dataset import Corpus, Document
from paceline.train.features.hidden_states import Features, train_in_scaled_units
from paceline.train.features.stream import StreamedFeatures, packs_ahead, upcoming
from paceline.train.learn.loop import Trainer
from paceline.train.learn.losses import Head
from paceline.train.learn.packs import DFlashTrainable
from paceline.train.processes.group import process_group

HIDDEN, VOCAB, TAPS, STEPS, KILLED_AT = 32, 96, (1, 3), 4, 3
PATIENCE = 300
"""Seconds, on a machine with other work too, after which processes count as deadlocked and say where they are."""
WORLD = 3
"""Processes of a group: an odd number, and of three one passes on what it gets from another."""
STEP_TIMEOUT_S = 6.0
"""Limit of a step, in seconds, in groups that are to fail; in it processes must also connect, on busy cores."""
TOO_LATE_S = 7.0

BASE = LoopConfig(
    max_steps=STEPS, blocks_per_step=24, anchors=5, blocks_per_pack=10, autocast=False, checkpoint_minutes=1e6
)
SCENARIOS = {
    "base": BASE,
    "muon": replace(BASE, max_steps=2, optim=OptimConfig("muon")),
    "recomputed": replace(BASE, max_steps=2, gradient_checkpointing=True),
    "one-document": replace(BASE, max_steps=2, blocks_per_step=5, blocks_per_pack=5),
    "vocabulary": replace(BASE, max_steps=2, loss=replace(BASE.loss, vocab=24)),
    "bfloat16": replace(BASE, max_steps=2, autocast=True),
}
"""In `one-document` all processes but one have nothing to compute."""
WAYS = ("replicated", "sharded")
CASES = [(name, "sharded") for name in ("base", "muon", "one-document", "bfloat16")]
CASES += [(name, "replicated") for name in ("base", "vocabulary")]
CASES += [("recomputed", "sharded"), ("one-document", "replicated")] if os.environ.get("PACELINE_NIGHTLY") else []
"""Scenarios and the ways that each is trained in: what touches the network's layers where these are in parts."""
SMALL_BUCKETS = mock.patch("paceline.train.processes.buckets.BUCKET_BYTES", 4096)


class RandomFeatures:
    """Hidden states drawn from the document's number."""

    def __init__(self, documents: list[Document], size: int = len(TAPS) * HIDDEN) -> None:
        self.documents, self.size = documents, size

    def of(self, number: int) -> Features:
        generator = torch.Generator().manual_seed(number)
        return Features(torch.randn(len(self.documents[number]), self.size, generator=generator), None)


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
    trainer.heldout["heldout"] = (documents[13:], RandomFeatures(documents[13:]))  # one: other processes have none
    return trainer


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


def started(folder: Path) -> tuple[dict[str, list[int]], str]:
    """Exit statuses by group and rank, and all output, of processes that go through this file's scenarios in
    `folder`."""
    ports = []
    with contextlib.ExitStack() as probes:  # all open at once: no port twice
        for _ in GROUPS:
            probe = probes.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(str(probe.getsockname()[1]))
    group = {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "PORTS": ",".join(ports), "OMP_NUM_THREADS": "1"}
    command, own = [sys.executable, __file__, str(folder)], {**os.environ, **group}
    process = subprocess.Popen(command, env=own, start_new_session=True)
    try:
        process.wait(PATIENCE + 30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outputs = "\n".join(f"{file.name}: {file.read_text()}" for file in sorted(folder.glob("output-*.txt")))
    return json.loads((folder / "statuses.json").read_text()), outputs


@contextlib.contextmanager
def clock_times(factor: float) -> Iterator[None]:
    """The loop's clock that many times as fast."""
    clock = SimpleNamespace(perf_counter=lambda: factor * time.perf_counter(), monotonic=time.monotonic)
    with mock.patch("paceline.train.learn.loop.time", clock):
        yield


def weights_of(trainer: Trainer, file: Path) -> None:
    weights = trainer.parallel.weights(trainer.network)
    if trainer.ranks.is_first:
        save_file(weights, file)


def train_in_all_ways(folder: Path, ranks: Ranks) -> None:
    """The scenarios, replicated and sharded, and runs that begin or end elsewhere."""
    for way in WAYS:
        done: dict[str, Any] = {}
        for name in (each for each, how in CASES if how == way):
            trainer = make_trainer(replace(SCENARIOS[name], parallel=way), folder / f"{name}-{way}", ranks)
            done[name] = run(trainer)
            weights_of(trainer, folder / f"{name}-{way}.safetensors")
        killed = replace(BASE, parallel=way, checkpoint_minutes=0)
        done["killed"] = run(make_trainer(killed, folder / f"killed-{way}", ranks), KILLED_AT)
        resumed = make_trainer(replace(BASE, parallel=way), folder / f"resumed-{way}", ranks)
        assert resumed.resume()
        done["resumed"] = run(resumed)
        done["streamed"] = streamed(make_trainer(replace(BASE, parallel=way), folder / f"streamed-{way}", ranks))
        timed = replace(BASE, parallel=way, max_steps=10_000, max_minutes=0.2 / 60)
        with clock_times(1 + 2 * ranks.rank):
            done["timed"] = run(make_trainer(timed, folder / f"timed-{way}", ranks))
        (folder / f"{way}-{ranks.rank}.json").write_text(json.dumps(done))


def precision(folder: Path, ranks: Ranks) -> None:
    """In which numbers a sharded network computes, and in which it is kept."""
    seen: dict[str, str] = {}

    def look(layer: Any, arguments: tuple[Any, ...]) -> None:
        seen.update(weight=str(layer.self_attn.q_proj.weight.dtype), norm=str(layer.input_layernorm.weight.dtype))
        seen.update(stream=str(arguments[1].dtype))

    trainer = make_trainer(replace(BASE, autocast=True, parallel="sharded", max_steps=1), folder / "precision", ranks)
    next(iter(trainer.drafter.layers)).register_forward_pre_hook(look)
    run(trainer)
    seen["kept"] = ", ".join({str(each.dtype) for each in trainer.network.parameters()})
    seen["moments"] = ", ".join({str(tensor.dtype) for _, tensor in trainer.optimisers.states()})
    (folder / f"precision-{ranks.rank}.json").write_text(json.dumps(seen))


def streamed(trainer: Trainer) -> dict[str, Any]:
    """A run whose features are produced ahead, and its packs too."""
    source = trainer.packer.features
    assert isinstance(source, RandomFeatures)
    stream = StreamedFeatures(source, lambda number: len(source.documents[number]), 100)
    object.__setattr__(trainer.packer, "features", stream)
    stream.begin(upcoming(trainer))
    with contextlib.closing(stream), packs_ahead(trainer):
        figures = run(trainer)
    assert stream.num_out_of_order == 0
    return figures


def overlap(folder: Path, ranks: Ranks) -> None:
    """The same run with gradients sent during the backward pass, and after it, in small messages."""
    for name, arm in (("during", None), ("after", lambda self: None)):
        with SMALL_BUCKETS, contextlib.ExitStack() as stack:
            if arm:
                stack.enter_context(mock.patch("paceline.train.processes.buckets.GradientBuckets.arm", arm))
            trainer = make_trainer(BASE, folder / name, ranks)
            run(trainer)
        weights_of(trainer, folder / f"{name}.safetensors")
        buckets = trainer.parallel._buckets
        assert buckets is not None
        (folder / f"{name}-{ranks.rank}.json").write_text(json.dumps([buckets.num_overlapped, len(buckets.buckets)]))


def differ(folder: Path, ranks: Ranks) -> None:
    """Networks that differ: at the beginning, where nothing repairs it, later on; and checkpoints of different
    steps."""
    results: dict[str, Any] = {}

    def spoil(trainer: Trainer) -> None:
        if ranks.rank == ranks.world - 1:
            with torch.no_grad():
                trainer.network.norm.weight[0] += 1e-6

    repaired = make_trainer(BASE, folder / "repaired", ranks)
    spoil(repaired)
    results["repaired"] = run(repaired)
    with mock.patch("paceline.train.processes.parallel.give_first", return_value=None):
        left = make_trainer(BASE, folder / "left", ranks)
        spoil(left)
        results["left"] = refused(left)
    later = make_trainer(replace(BASE, checkpoint_minutes=0), folder / "later", ranks)
    results["later"] = refused(later, lambda seen: spoil(later) if seen["step"] == 3 else None)
    results["later step"] = later.state.step
    elsewhere = "killed-replicated" if ranks.is_first else "resumed-replicated"
    other = make_trainer(BASE, folder / elsewhere, ranks)
    try:
        other.resume()
    except ProcessesError as error:
        results["resumed"] = str(error)
    (folder / f"differ-{ranks.rank}.json").write_text(json.dumps(results))


def refused(trainer: Trainer, on_step: Any = lambda seen: None) -> str:
    try:
        trainer.run(on_step)
    except ProcessesError as error:
        return str(error)
    return "it ran"


def uneven(ranks: Ranks, wait: Any) -> None:
    """A stage that takes one process longer than a step may take; then a step."""
    if ranks.is_first:
        time.sleep(TOO_LATE_S)
    wait()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert float(total) == ranks.world


def raising(ranks: Ranks, wait: Any) -> None:
    """A process that ends with an error while others wait in a stage."""
    if ranks.rank == 1:
        raise ValueError("the disk is gone")
    wait()


def late(ranks: Ranks, wait: Any) -> None:
    """A process that lives, and is late in a step."""
    if ranks.rank == 1:
        time.sleep(TOO_LATE_S)
    dist.all_reduce(torch.ones(1))


def all_here(folder: Path, name: str, ranks: Ranks) -> None:
    """Wait for each other by files, so that a short limit for steps is not spent on whoever comes later."""
    (folder / f"{name}-{ranks.rank}.here").touch()
    while len(list(folder.glob(f"{name}-*.here"))) < ranks.world:
        time.sleep(0.02)


def dying(ranks: Ranks, wait: Any) -> None:
    """A process that ends without a word while others are in a step; the last one, which no port waits for."""
    wait()  # until all have found each other
    if ranks.rank == ranks.world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(torch.ones(1))


FAILURES = {each.__name__: each for each in (uneven, raising, late, dying)}
"""Functions that run in a process group of their own, with a short time limit for steps."""


def fail(name: str, folder: Path, ranks: Ranks) -> None:
    all_here(folder, name, ranks)
    start, message = time.monotonic(), "no error"
    try:
        with process_group(ranks, "cpu", STEP_TIMEOUT_S / 60, beat_s=0.4) as wait:
            FAILURES[name](ranks, wait)
    except (ProcessesError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"
    (folder / f"{name}-{ranks.rank}.json").write_text(json.dumps([message, time.monotonic() - start]))


def train(folder: Path, ranks: Ranks) -> None:
    with process_group(ranks, "cpu") as wait:
        train_in_all_ways(folder, ranks)
        precision(folder, ranks)
        overlap(folder, ranks)
        wait()
        differ(folder, ranks)


GROUPS = {name: functools.partial(fail, name) for name in FAILURES} | {"train": train}


def one_of_several(folder: Path, group: str, port: str, rank: int) -> None:
    """Function that each process runs."""
    with (folder / f"output-{group}-{rank}.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    GROUPS[group](folder, Ranks.here())


def several(folder: Path) -> None:
    """Import once what every process needs, which takes longer than all that they do; then fork them."""
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.experimental"):
        importlib.import_module(name)
    gc.freeze()  # none of them looks for garbage in what was imported
    children: dict[str, list[int]] = {}
    for group, port in zip(GROUPS, os.environ["PORTS"].split(","), strict=True):
        children[group] = []
        for rank in range(WORLD):
            children[group].append(os.fork())
            if not children[group][-1]:
                one_of_several(folder, group, port, rank)
                return
    statuses = {
        group: [os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in own] for group, own in children.items()
    }
    (folder / "statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    several(Path(sys.argv[1]))
