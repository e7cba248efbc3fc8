"""Entries against published totals; names, aliases and paths."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from paceline import hub
from paceline.draft.shipped import SHIPPED
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


def names_of(entry: dict[str, Any]) -> list[str]:
    return [entry["name"], entry["hub"], *entry.get("aliases", {})]


def test_no_two_entries_share_a_name_or_the_tail_of_a_hub_id() -> None:
    owners = dict[str, str]()
    for name, entry in catalogue.entries().items():
        for other in {each.rpartition("/")[2].lower() for each in names_of(entry)}:
            assert owners.setdefault(other, name) == name, other


def test_every_name_finds_its_entry() -> None:
    for name, entry in catalogue.entries().items():
        for other in names_of(entry):
            for written in (other, other.upper(), other.rpartition("/")[2]):
                assert catalogue.entry_of(written)["name"] == name, written
        assert (catalogue.served_name(name), catalogue.served_name(entry["hub"])) == (entry["hub"], entry["hub"])


def test_other_names() -> None:
    assert catalogue.find("meta-llama/Llama-3.3-70B-Instruct").name == "Llama-3.3-70B"
    assert catalogue.served_name("Llama-3.3-70B") == "meta-llama/Llama-3.3-70B-Instruct"
    assert catalogue.served_name("Llama-3-405B") == "meta-llama/Llama-3.1-405B-Instruct"
    assert catalogue.served_name("smollm2-360m") == "HuggingFaceTB/SmolLM2-360M-Instruct"


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-R1", "Qwen/Qwen3-4B-Thinking-2507", "unsloth/Qwen3-8B", "None"])
def test_another_model_of_the_same_sizes_is_served_under_its_own_name(name: str) -> None:
    assert catalogue.served_name(name) == name


def test_an_alias_without_its_owner_is_served_under_its_hub_id() -> None:
    assert catalogue.served_name("deepseek-r1") == "deepseek-ai/DeepSeek-R1"


def test_an_alias_has_its_own_context() -> None:
    assert catalogue.find("Qwen/Qwen3-4B-Instruct-2507").max_context == 262144
    assert catalogue.find("Qwen3-4B").max_context == catalogue.config_of("qwen3-4b")["max_position_embeddings"] == 40960
    assert catalogue.find("meta-llama/Meta-Llama-3-8B").max_context == 8192


def test_entries_with_a_config_inherit_the_familys() -> None:
    inherited = {"hidden_size": 7168, "n_routed_experts": 256, "kv_lora_rank": 512, "vocab_size": 129280}
    for name, model_type in {
        "DeepSeek-V3": "deepseek_v3",
        "DeepSeek-R1": "deepseek_v3",
        "DeepSeek-V3.2": "deepseek_v32",
    }.items():
        config = catalogue.config_of(name)
        assert config["model_type"] == model_type and inherited.items() <= config.items()
    assert "index_topk" not in catalogue.config_of("DeepSeek-V3")
    for name in ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro"):  # 256 and 384 experts, of other sizes
        assert "config" not in catalogue.entry_of(name)
        with pytest.raises(UnsupportedModelError, match="not its config.json"):
            catalogue.config_of(name)


def test_builtin_models_have_the_hub_id_of_their_base() -> None:
    rows = json.loads(Path(hub.__file__).with_name("builtins.json").read_text(encoding="utf-8"))
    assert len({row["name"] for row in rows}) == len({row["file"] for row in rows}) == len(hub.BUILTINS) == len(rows)
    assert {name: catalogue.served_name(name) for name in hub.BUILTINS} == {row["name"]: row["base"] for row in rows}
    assert SHIPPED.keys() <= hub.BUILTINS.keys()


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
