"""Known GPUs, and a measurement that is quick and plausible."""

from __future__ import annotations

import os
import time
from typing import ClassVar

import pytest
import torch

from paceline import hardware
from paceline.hardware import BusyClock, Machine, this_machine
from paceline.simulate.costs import catalogue

MEASURED = hardware._matmul_flops_per_s
"""The real one, in whose place conftest.py puts another."""


def test_known_gpus() -> None:
    assert catalogue.machines()["B200"].flops_per_s["float8"] == 4.5e15
    assert "float4" not in catalogue.machines()["H100"].flops_per_s
    assert catalogue.machines()["H200"].bytes_per_s == 4.8e12
    assert catalogue.machines()["GH200"].memory_bytes == 96 * 10**9


@pytest.mark.slow
def test_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_matmul_flops_per_s", MEASURED)
    machine = this_machine()
    assert 1e8 < machine.bytes_per_s < 2e12
    assert (
        all(1e8 < rate < 1e14 for rate in machine.cached_bytes_per_s.values()) and len(machine.cached_bytes_per_s) == 4
    )
    assert set(machine.flops_per_s) == {"bfloat16", "float32"}
    assert all(1e8 < rate < 1e16 for rate in machine.flops_per_s.values())
    assert machine.num_threads >= 1
    assert machine.name


def test_the_ceiling_counts_what_caches_hold() -> None:
    """Weights that fit a cache are read faster than memory: the ceiling is that of the largest measured size below
    theirs."""
    machine = Machine("test", 1e9, {}, 1, 1, cached_bytes_per_s={"1000": 8e9, "4000": 5e9, "16000": 6e9, "64000": 9e8})
    assert machine.read_bytes_per_s(500) == 8e9 and machine.read_bytes_per_s(3999) == 8e9
    assert machine.read_bytes_per_s(4000) == 6e9  # of as much, or of more: 5e9 was disturbed
    assert machine.ceiling_tokens_per_s(20_000) == 6e9 / 20_000
    assert machine.ceiling_tokens_per_s(64_000) == 1e9 / 64_000
    assert Machine("test", 1e9, {}, 1, 1).ceiling_tokens_per_s(10) == 1e8


def test_what_others_take_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """(clock, all processors at work, this process) in seconds; this process's own work is not others'."""
    times = iter([(10.0, 100.0, 5.0), (12.0, 103.0, 6.0)])
    monkeypatch.setattr(BusyClock, "_now", staticmethod(lambda: next(times)))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert BusyClock().others_share() == pytest.approx((3.0 - 1.0) / (4 * 2.0))


@pytest.mark.slow
def test_working_alone_is_not_disturbed_by_oneself() -> None:
    clock = BusyClock()
    began, busy, own = clock._began
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    now = clock._now()
    assert now[2] - own >= 0.25 and now[0] > began and (busy == 0.0 or now[1] - busy >= 0.2)


class FakeEvents:
    """A GPU's clock and queue: work takes 2 ms there, however long the host waits."""

    now_ms = 0.0
    recorded: ClassVar[list[float]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        self.at_ms = FakeEvents.now_ms
        FakeEvents.recorded.append(self.at_ms)
        assert stream == "stream of cuda:0"

    def synchronize(self) -> None:
        FakeEvents.now_ms += 1000.0  # of waiting, which is nobody's work

    def elapsed_time(self, end: FakeEvents) -> float:
        return end.at_ms - self.at_ms


def test_a_gpu_is_measured_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several runs between two events, none of the host's time, and no wait between the runs."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvents)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")

    def work() -> None:
        FakeEvents.now_ms += 2.0

    def wait(device: object) -> None:
        raise AssertionError("the host waits for each run")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    assert hardware._best_s(work, torch.device("cuda:0"), budget_s=0.0) == pytest.approx(0.002)
    assert len(FakeEvents.recorded) >= 2 and FakeEvents.recorded[1] - FakeEvents.recorded[0] > 2.0


def test_a_gpu_multiplies_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ones would be multiplied faster than weights are."""
    kinds: list[str] = []
    monkeypatch.setattr(torch, "randn", lambda shape, device: kinds.append(f"{device}") or torch.zeros(1))
    assert hardware._numbers(2, 3, device=torch.device("cuda:0")).shape == (1,) and kinds == ["cuda:0"]
    assert hardware._numbers(2, 3, device=torch.device("cpu")).shape == (2, 3) and kinds == ["cuda:0"]
