"""`torchrun -m paceline train`, whole: from prompts to a drafter that is served, on two processes as on one.

Every stage is shared out. Answers and hidden states have the same bits whoever computes them; weights differ in the
order of
sums: by 2e-5 at most after three steps, which is a neighbouring bfloat16 number for a few in a thousand. Larger groups
and both ways to share the work out: tests/train/test_distributed.py; answers and hidden states that two processes share
out: test_regenerate_run.py and test_features.py; all three at every change, this file in .ci/nightly.
"""

from __future__ import annotations

import contextlib
import io
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
from tiny_runs import TINY, paceline

from paceline.runs.folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
NUM_PROMPTS = 16
SHORT = ("--max-steps", "3", "--limit", str(NUM_PROMPTS), "--full-precision")
WORDS = (*TINY, *SHORT, "--parallel", "sharded", "--json", "--out")
UNSET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON line of a run on this process."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        for name in UNSET:
            patch.delenv(name, raising=False)
        paceline(*WORDS, tmp_path_factory.mktemp("alone") / "run")
    return json.loads(shown.getvalue().splitlines()[-1])


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "paceline")


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON line of a run on two processes."""
    own = {name: value for name, value in os.environ.items() if name not in UNSET} | {"OMP_NUM_THREADS": "1"}
    launch = [sys.executable, *TORCHRUN, *WORDS, str(tmp_path_factory.mktemp("two") / "run")]
    ran = subprocess.run(launch, capture_output=True, text=True, timeout=600, env=own)
    assert ran.returncode == 0, ran.stderr
    assert "terminate called" not in ran.stderr and "Traceback" not in ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def answers(line: dict[str, Any]) -> list[tuple[Any, ...]]:
    files = (Path(line["run"]) / "regenerate" / "answers").glob("*.parquet")
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return sorted((row["key"], tuple(row["answer_ids"])) for row in rows)


def test_the_drafter_is_that_of_one_process(alone: dict[str, Any], line: dict[str, Any]) -> None:
    assert answers(line) == answers(alone) and len(answers(line)) == NUM_PROMPTS
    assert (line["steps"], line["blocks"]) == (alone["steps"], alone["blocks"])
    curves = [
        [step["objective"] for step in RunFolder(Path(each["run"])).metrics() if "objective" in step]
        for each in (alone, line)
    ]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    last, expected = (
        load_file(next((Path(each["run"]) / "checkpoints").glob("step-*")) / "model.safetensors")
        for each in (line, alone)
    )
    for name, tensor in last.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-5, msg=name)
    drafter, other = (load_file(Path(each["drafter"]) / "model.safetensors") for each in (line, alone))
    num_same = sum(int((tensor == other[name]).sum()) for name, tensor in drafter.items())
    assert num_same >= 0.99 * sum(tensor.numel() for tensor in drafter.values())
    assert line["heldout"].keys() == alone["heldout"].keys() and line["heldout"]["heldout"] >= 1.0
