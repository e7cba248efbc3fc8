"""Entries against published totals; names, aliases and paths."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from paceline.simulate.costs import catalogue

TOTALS = {
    "smollm2-135m": 0.1345,
    "qwen2.5-coder-0.5b": 0.494,
    "qwen2.5-coder-1.5b": 1.544,
    "Qwen3-0.6B": 0.596,
    "Qwen3-8B": 8.19,
    "Qwen3-32B": 32.76,
    "Qwen3-30B-A3B": 30.53,
    "Qwen3-235B-A22B": 235.1,
    "Qwen3.5-397B-A17B": 397,
    "Qwen3.5-122B-A10B": 122,
    "Qwen3.5-35B-A3B": 34.7,
    "Llama-3.2-1B": 1.236,
    "Llama-3.1-8B": 8.03,
    "Llama-3.3-70B": 70.55,
    "Llama-3.1-405B": 405.85,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "gemma-2-27b": 27.23,
    "gemma-3-1b": 1.0,
    "gemma-3-27b": 27.0,
    "gemma-4-31b": 30.7,
    "gemma-4-26b-a4b": 25.2,
    "DeepSeek-V3": 671,
    "DeepSeek-V4-Flash": 284,
}
"""Billions of parameters of the language model, as published."""


@pytest.mark.parametrize("name", list(TOTALS))
def test_published_totals(name: str) -> None:
    assert catalogue.find(name).num_parameters / 1e9 == pytest.approx(TOTALS[name], rel=0.005)


@pytest.mark.parametrize(
    ("name", "active"),
    [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13), ("DeepSeek-V3", 36.6), ("Qwen3-235B-A22B", 21.6)],
)
def test_published_active_parameters(name: str, active: float) -> None:
    assert catalogue.find(name).num_active / 1e9 == pytest.approx(active, rel=0.01)


def test_every_entry_is_whole() -> None:
    shapes = catalogue.all_shapes()
    assert len(shapes) >= 35
    for name, shape in shapes.items():
        assert shape.source, name
        assert sum(group.layers for group in shape.attention) == shape.num_layers, name
        assert shape.vocab_size > 10_000 and shape.max_context >= 8192, name
        json.dumps(asdict(shape), allow_nan=False)


def test_figures_of_the_performance_model() -> None:
    flash, pro = catalogue.find("DeepSeek-V4-Flash"), catalogue.find("DeepSeek-V4-Pro")
    assert flash.experts is not None and pro.experts is not None
    assert flash.experts.each == 43 * 3 * 4096 * 2048
    assert flash.experts.shared == pytest.approx(flash.experts.each)
    assert pro.experts.each == 61 * 3 * 7168 * 3072
    small = catalogue.find("Qwen3.6-35B-A3B")
    assert small.experts is not None and small.experts.each == 40 * 3145728


@pytest.mark.slow
def test_sizes_that_are_not_public_are_refused() -> None:
    for name, entry in catalogue.entries().items():
        if "unavailable" in entry:
            with pytest.raises(UnsupportedModelError, match="not public"):
                catalogue.find(name)
            assert name not in catalogue.all_shapes()


@pytest.mark.parametrize("name", ["qwen3-8b", "Qwen/Qwen3-8B", "QWEN3-8B"])
def test_names_in_any_case_and_hub_ids(name: str) -> None:
    assert catalogue.find(name).name == "Qwen3-8B"


def test_other_names() -> None:
    assert catalogue.find("meta-llama/Llama-3.3-70B-Instruct").name == "Llama-3.3-70B"
    assert catalogue.served_name("Llama-3.3-70B") == "meta-llama/Llama-3.3-70B-Instruct"
    assert catalogue.served_name("smollm2-135m") == "smollm2-135m"
    assert catalogue.known_name("None") == "None"  # some entries have no hub id


def test_unknown_names_suggest_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="Qwen3-8B"):
        catalogue.find("Qwen3-8")
    with pytest.raises(ModelNotFoundError, match="give a config.json"):
        catalogue.find(str(tmp_path))
    with pytest.raises(ModelNotFoundError):
        catalogue.find("x" * 5000)


def test_a_config_and_a_shape_by_path(tmp_path: Path) -> None:
    config = catalogue.entries()["Qwen3-8B"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert catalogue.find(str(tmp_path)).dense == catalogue.find("Qwen3-8B").dense
    own = tmp_path / "own.json"
    own.write_text(json.dumps(asdict(catalogue.find("Qwen3-8B"))))
    assert catalogue.find(str(own)).attention == catalogue.find("Qwen3-8B").attention
    for text, remedy in (("{", "not JSON"), ("[1]", "no JSON object"), ("{}", "no num_hidden_layers")):
        own.write_text(text)
        with pytest.raises(UnsupportedModelError, match=remedy):
            catalogue.find(str(own))


def test_machines() -> None:
    for name in ("B200", "B300", "H100", "H200", "GH200", "L40S", "RTX 4090", "RTX Pro 6000", "MI300X", "laptop CPU"):
        machine = catalogue.machines()[name]
        assert machine.bytes_per_s > 1e10 and machine.memory_bytes > 1e10 and machine.flops_per_s
    single = {name for name, each in catalogue.machines().items() if not each.link_bytes_per_s}
    assert single == {name for name in catalogue.machines() if name.startswith("Apple")} | {"laptop CPU"}


@pytest.mark.parametrize(
    ("name", "gigabytes", "gigabytes_per_s", "format_name", "teraflops"),
    [
        ("A100", 80, 2039, "bfloat16", 312),
        ("A100 40GB", 40, 1555, "bfloat16", 312),
        ("L4", 24, 300, "bfloat16", 121),
        ("A10G", 24, 600, "bfloat16", 70),
        ("T4", 16, 320, "bfloat16", 65),
        ("RTX 3090", 24, 936, "bfloat16", 71),
        ("RTX 4090", 24, 1008, "bfloat16", 165.2),
        ("RTX 5090", 32, 1792, "bfloat16", 209.5),
        ("MI300X", 192, 5300, "bfloat16", 1307.4),
        ("Apple M1", 16, 68.25, "float32", 2.6),
        ("Apple M4 Max", 128, 546, "float32", 13),
    ],
)
def test_machines_that_people_have(
    name: str, gigabytes: float, gigabytes_per_s: float, format_name: str, teraflops: float
) -> None:
    machine = catalogue.machines()[name]
    assert (machine.memory_bytes / 1e9, machine.bytes_per_s / 1e9) == (gigabytes, gigabytes_per_s)
    assert machine.flops_per_s[format_name] == teraflops * 1e12


def test_machines_by_their_names() -> None:
    for written, name in {
        "a100-40gb": "A100 40GB",
        "rtx4090": "RTX 4090",
        "m4 max": "Apple M4 Max",
        "apple_m1": "Apple M1",
        "laptop": "laptop CPU",
        "L4": "L4",
    }.items():
        machine = catalogue.machine(written)
        assert machine and machine.name == name
    assert catalogue.machine("RTX") is None and catalogue.machine("Apple") is None, "several begin so"
    assert catalogue.machine("abacus") is None


COUNTED = {
    "H100": (1, "H100"),
    " RTX 4090 ": (1, "RTX 4090"),
    "8 H100": (8, "H100"),
    "8x H100": (8, "H100"),
    "8xH100": (8, "H100"),
    "2 × RTX 4090": (2, "RTX 4090"),
    "4 * L40S": (4, "L40S"),
}


@pytest.mark.parametrize("written", list(COUNTED))
def test_a_count_before_a_machines_name(written: str) -> None:
    assert catalogue.counted("--hardware", written) == COUNTED[written]


def test_no_machines_are_refused() -> None:
    for written in ("0x H100", "0 H100"):
        with pytest.raises(ConfigError, match=f"^--train-on '{written}': give at least one machine$"):
            catalogue.counted("--train-on", written)
