"""Known GPUs, and a measurement that is quick and plausible."""

from __future__ import annotations

import time

from paceline.hardware import KNOWN_GPUS, known_gpu, this_machine


def test_known_gpus() -> None:
    assert KNOWN_GPUS["B200"].flops_per_s["float8"] == 4.5e15
    assert "float4" not in KNOWN_GPUS["H100"].flops_per_s
    h200 = known_gpu("NVIDIA H200")
    assert h200 is not None
    assert h200.bytes_per_s == 4.8e12
    gh200 = known_gpu("NVIDIA GH200 480GB")
    assert gh200 is not None
    assert gh200.memory_bytes == 96 * 10**9
    assert known_gpu("NVIDIA GeForce RTX 3060") is None


def test_this_machine_is_measured_quickly() -> None:
    started = time.perf_counter()
    machine = this_machine()
    assert time.perf_counter() - started < 5
    assert 1e8 < machine.bytes_per_s < 2e12
    assert set(machine.flops_per_s) == {"bfloat16", "float32"}
    assert all(1e8 < rate < 1e16 for rate in machine.flops_per_s.values())
    assert machine.num_threads >= 1
    assert machine.name
