"""experiments/distil_tickets.py: what is right, what is scored, which bars were missed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[3] / "experiments" / "distil_tickets.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("distil_tickets", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_kind_of_ticket_has_one_right_answer(script: ModuleType) -> None:
    rows = script.SHOP["heldout_tickets"](40)
    for row in rows:
        right, policy = script.wanted(row), "-".join(row["id"].split("-")[2:])
        assert right["policy_id"] == policy and right["action"] in row["messages"][-1]["content"]
        assert right["reasoning"].endswith(f"is {right['action']}.") and "  " not in right["reasoning"]
        assert script.accuracy([json.dumps(right)], [row]) == [1.0]
        assert script.accuracy([json.dumps(right | {"action": "sing"})], [row]) == [pytest.approx(2 / 3)]
        assert script.accuracy(["[1]"], [row]) == script.accuracy(["no"], [row]) == [0.0]


def test_stages_are_done_once(script: ModuleType, tmp_path: Path) -> None:
    stages, made = script.Run(script.argparse.Namespace(out=tmp_path)), []
    for _ in range(2):
        assert stages.stage("texts", lambda: made.append(1) or ["a"]) == ["a"]
    assert made == [1] and "texts" in json.loads((tmp_path / "seconds.json").read_text())


def test_bars(script: ModuleType) -> None:
    good = {"kept": 0.99, "speedup": 2.1, "best": "soft", "status": {"soft": 0, "hard": 0, "untaught": 1}}
    assert script.faults_of(good) == []
    bad = {"kept": 0.9, "speedup": 1.5, "best": "soft", "status": {"soft": 1, "hard": 0, "untaught": 0}}
    assert len(script.faults_of(bad)) == 4
