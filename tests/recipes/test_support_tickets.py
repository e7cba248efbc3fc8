"""The custom workload: its tickets, and the verdict that its script ends with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import module_at

from paceline.data.prompts import read_prompts
from paceline.hub import resolve
from paceline.model.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
RUNS = Path(__file__).parents[2] / "recipes"
MAX_PROMPT_TOKENS = 384
TARGET = "smollm2-135m"

STUB = """#!/usr/bin/env bash
set -euo pipefail
echo "$@" >> "$CALLS"
while [ "$1" != --out ]; do shift; done
mkdir -p "$2"
case $2 in
    */before) figures=$BEFORE ;;
    */after) figures=$AFTER ;;
    *) exit 0 ;;
esac
echo "{\\"heldout\\": $figures}" > "$2/evaluation.json"
"""
"""A paceline that measures what it is told."""


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """recipes/ is no package: the script is loaded from its path."""
    return module_at(RUNS / "support_tickets.py")


def texts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows]


def test_tickets_are_distinct_and_heldout_ones_share_no_word_list(generator: ModuleType) -> None:
    train, heldout = texts(generator.train_tickets(1500)), texts(generator.heldout_tickets(60))
    assert len(set(train)) == 1500
    assert len(set(heldout)) == 60
    assert not set(train) & set(heldout)
    for kind in generator.Words.__dataclass_fields__:
        assert not set(getattr(generator.TRAIN, kind)) & set(getattr(generator.HELDOUT, kind)), kind


def test_every_policy_is_asked_for_equally_often(generator: ModuleType) -> None:
    ids = [row["id"].split("-", 2)[2] for row in generator.heldout_tickets(60)]
    assert {ids.count(policy.id) for policy in generator.POLICIES} == {60 // len(generator.POLICIES)}


def test_the_seed_decides_and_fewer_tickets_are_the_first_of_more(generator: ModuleType) -> None:
    assert generator.train_tickets(50) == generator.train_tickets(80)[:50]
    assert texts(generator.train_tickets(50, seed=1)) != texts(generator.train_tickets(50))


def test_worked_examples_are_answers_as_wanted(generator: ModuleType) -> None:
    shown = [json.loads(message["content"]) for message in generator.preamble() if message["role"] == "assistant"]
    assert len(shown) == len(generator.EXAMPLES)
    by_id = {policy.id: policy for policy in generator.POLICIES}
    for answer in shown:
        assert list(answer) == ["action", "policy_id", "reasoning"]
        assert by_id[answer["policy_id"]].action == answer["action"]


def test_the_command_writes_what_read_prompts_reads(generator: ModuleType, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(RUNS / "support_tickets.py"),
        "--train",
        "12",
        "--heldout",
        "5",
        "--out",
        str(tmp_path),
    ]
    subprocess.run(command, check=True, capture_output=True)
    prompts = read_prompts(tmp_path / "train.jsonl")
    assert [prompt.messages for prompt in prompts] == [row["messages"] for row in generator.train_tickets(12)]
    assert all(len(prompt.turns) == 1 for prompt in prompts)
    assert [prompt.id for prompt in read_prompts(tmp_path / "heldout.jsonl")] == [
        row["id"] for row in generator.heldout_tickets(5)
    ]


def test_prompts_are_short(generator: ModuleType) -> None:
    tokenizer = Tokenizer.from_path(resolve(TARGET))
    rows = generator.train_tickets(1500)[::12] + generator.heldout_tickets(60)
    assert max(len(tokenizer.encode_chat(row["messages"])) for row in rows) <= MAX_PROMPT_TOKENS


@pytest.mark.parametrize(
    ("after", "status", "complaint"),
    [
        ({"heldout": 4.5, "prompts": 2.1}, 0, ""),
        ({"heldout": 3.9, "prompts": 2.1}, 1, "held-out tickets improved less"),
        ({"heldout": 4.5, "prompts": 1.7}, 1, "general prompts lost more"),
    ],
)
def test_the_script_ends_with_a_verdict(tmp_path: Path, after: dict[str, float], status: int, complaint: str) -> None:
    if shutil.which("bash") is None:
        pytest.skip("the script needs bash")
    programs, calls, out = tmp_path / "bin", tmp_path / "calls", tmp_path / "out"
    programs.mkdir()
    (programs / "paceline").write_text(STUB)
    (programs / "paceline").chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    environment = {
        **os.environ,
        "PROCESSES": "1",
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(calls),
        "BEFORE": json.dumps({"heldout": 2.0, "prompts": 2.0}),
        "AFTER": json.dumps(after),
        "OUT": str(out),
        "TICKETS": "3",
        "HELDOUT": "2",
    }
    for name in ("TARGET", "DRAFTER", "MINUTES", "REPLAY", "GENERAL", "GENERAL_TRAIN"):
        environment.pop(name, None)
    command = ["bash", str(RUNS / "custom_workload.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, complaint in done.stderr) == (status, True), done.stderr
    assert f"{after['heldout'] / 2:.2f}x" in done.stdout
    assert [line.split()[0] for line in calls.read_text().splitlines()] == [
        "evaluate", "regenerate", "regenerate", "train", "evaluate",
    ]  # fmt: skip
