"""This machine's speeds: measured once, kept for each number of threads, and not kept where others disturbed them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.hardware import BusyClock, Machine
from paceline.hub import cache_home
from paceline.train.plan import target_facts as facts

QUIET, BUSY = 0.02, 0.6


@pytest.fixture(scope="module", autouse=True)
def known_machine() -> None:
    """In the place of that of the folder: here the machine is measured."""


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    return tmp_path


def measuring(monkeypatch: pytest.MonkeyPatch, rates: list[float], others: float) -> list[Machine]:
    """Simulate measurements with this share of the processors taken; the list records them."""
    machines: list[Machine] = []

    def measure(device: str) -> Machine:
        rate = rates[len(machines) % len(rates)]
        machines.append(Machine(device, rate, {"bfloat16": 10 * rate}, 2, 2**30, cached_bytes_per_s={"4": 2 * rate}))
        return machines[-1]

    monkeypatch.setattr(facts, "this_machine", measure)
    monkeypatch.setattr(BusyClock, "others_share", lambda clock: others)
    return machines


def test_once_for_each_number_of_threads(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    machines = measuring(monkeypatch, [3e9, 5e9], QUIET)
    assert [facts.machine_of(None, "cpu").machine.bytes_per_s for _ in range(3)] == [3e9] * 3
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert facts.machine_of(None, "cpu").machine.bytes_per_s == 5e9
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    measured = facts.machine_of(None, "cpu")
    assert measured.machine.bytes_per_s == 3e9 and not measured.is_busy and len(machines) == 2
    assert len(json.loads((home / facts.FILE).read_text())["machines"]) == 2


def test_disturbed_the_best_counts_and_is_not_kept(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    machines = measuring(monkeypatch, [3e9, 6e9, 4e9], BUSY)
    measured = facts.machine_of(None, "cpu")
    assert len(machines) == facts.MEASUREMENTS == 3 and measured.is_busy and not (home / facts.FILE).exists()
    assert measured.machine.bytes_per_s == 6e9 and measured.machine.flops_per_s == {"bfloat16": 6e10}
    assert measured.machine.cached_bytes_per_s == {"4": 1.2e10}
    measuring(monkeypatch, [7e9], QUIET)
    assert facts.machine_of(None, "cpu").machine.bytes_per_s == 7e9 and (home / facts.FILE).exists()


def test_what_another_version_kept_is_measured_again(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    machines = measuring(monkeypatch, [2e9], QUIET)
    facts.machine_of(None, "cpu")
    stored = json.loads((home / facts.FILE).read_text())
    [[mark, entry]] = stored["machines"].items()
    spoilt = {"machines": {mark: entry | {"machine": entry["machine"] | {"bytes_per_s": "fast"}}}}
    for number, content in enumerate(
        ({"mark": {"cpu": "x"}, "machine": {}, "has_gpu": False}, {"machines": []}, spoilt), 2
    ):
        (home / facts.FILE).write_text(json.dumps(content))
        assert facts.machine_of(None, "cpu").machine.bytes_per_s == 2e9 and len(machines) == number
        assert json.loads((home / facts.FILE).read_text()) == stored


def test_tests_leave_the_user_s_own_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their speeds are made up in part: a plan of the user's would be wrong afterwards."""
    monkeypatch.undo()  # PACELINE_HOME is that of the user again
    assert facts.speeds_file() != cache_home() / facts.FILE
