"""`torchrun -m paceline train`, whole: from prompts to a drafter that is served, on two and four processes as on one.

Every stage is shared out. Answers and hidden states have the same bits whoever computes them; weights differ in the order of
sums: by 2e-5 at most after eight steps, which is a neighbouring bfloat16 number for a few in a thousand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from paceline.runlog import RunFolder

pytestmark = pytest.mark.slow

WORDS = (
    "train",
    "--scale",
    "tiny",
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--threads",
    "1",
    "--max-steps",
    "8",
    "--full-precision",
)
WAYS = {1: "auto", 2: "replicated", 4: "sharded"}
"""By the number of processes."""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The JSON lines of the runs."""
    folder, done = tmp_path_factory.mktemp("runs"), {}
    for world, way in WAYS.items():
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
        words = [*WORDS, "--parallel", way, "--out", str(folder / str(world)), "--json"]
        unset = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
        alone = {name: value for name, value in os.environ.items() if name not in unset}
        ran = subprocess.run(
            [sys.executable, *launch, "-m", "paceline", *words],
            capture_output=True, text=True, timeout=600, env=alone | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert "terminate called" not in ran.stderr and "Traceback" not in ran.stderr
        done[world] = json.loads(ran.stdout.splitlines()[-1])
    return done


def answers(line: dict[str, Any]) -> list[tuple[Any, ...]]:
    files = (Path(line["run"]) / "regenerate" / "answers").glob("*.parquet")
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return sorted((row["key"], tuple(row["answer_ids"])) for row in rows)


@pytest.mark.parametrize("world", [2, 4])
def test_the_drafter_is_that_of_one_process(lines: dict[int, dict[str, Any]], world: int) -> None:
    alone, line = lines[1], lines[world]
    assert answers(line) == answers(alone) and len(answers(line)) == 96
    assert (line["steps"], line["blocks"]) == (alone["steps"], alone["blocks"])
    curves = [
        [step["objective"] for step in RunFolder(Path(each["run"])).metrics() if "objective" in step] for each in (alone, line)
    ]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    last, expected = (
        load_file(next((Path(each["run"]) / "checkpoints").glob("step-*")) / "model.safetensors") for each in (line, alone)
    )
    for name, tensor in last.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-5, msg=name)
    drafter, other = (load_file(Path(each["drafter"]) / "model.safetensors") for each in (line, alone))
    num_same = sum(int((tensor == other[name]).sum()) for name, tensor in drafter.items())
    assert num_same >= 0.99 * sum(tensor.numel() for tensor in drafter.values())
    assert line["heldout"]["heldout"] == pytest.approx(alone["heldout"]["heldout"], rel=0.1)
