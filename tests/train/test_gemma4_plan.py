"""Plans for Gemma 4 31B, from its config.json or its name alone: a prediction, a training, advice; each in seconds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.roofline import kept_bytes
from paceline.simulate.costs.shapes import Attention, Precisions

SECONDS = 5.0


@pytest.fixture
def config(tmp_path: Path) -> str:
    """config.json as on the hub: the text model's part within that of a model of pictures."""
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": catalogue.config_of("gemma-4-31b")}))
    return str(tmp_path / "config.json")


def line(*words: str) -> dict[str, Any]:
    begin = time.perf_counter()
    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0 and time.perf_counter() - begin < SECONDS, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_its_layers_have_heads_of_two_sizes(config: str) -> None:
    shape = catalogue.find(config)
    assert shape.attention == catalogue.find("google/gemma-4-31B-it").attention
    sliding, full = Attention("gqa", 50, 32, 16, 256, window=1024), Attention("gqa", 10, 32, 4, 512)
    projections = 5376 * 256 * (50 * (32 + 2 * 16 + 32) + 2 * 10 * (32 + 4 + 32))
    assert set(shape.attention) == {sliding, full}
    assert shape.dense == 262144 * 5376 + projections + 60 * 3 * 5376 * 21504


def test_layers_that_share_keys_store_none_and_experts_stand_next_to_an_mlp() -> None:
    groups = catalogue.find("gemma-4-e2b").attention
    assert [sum(group.layers for group in groups if group.shared == kind) for kind in (0, 1)] == [15, 20]
    assert all((kept_bytes(group, Precisions(), 100) == 0) == bool(group.shared) for group in groups)
    assert catalogue.find("gemma-4-26b-a4b").num_active / 1e9 == pytest.approx(3.8, rel=0.01)


@pytest.mark.slow
def test_plans(config: str, tmp_path: Path) -> None:
    assert line("simulate", "--model", config, "--hardware", "H100", "--block", "8")["speedup"] > 1.5
    assert line("advise", "--model", config, "--hardware", "2x H100", "--streams", "16")["steps"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Write function {number}."}) + "\n" for number in range(200)))
    to = ["--out", str(tmp_path / "run"), "--dry-run", "--device-name", "8x H100"]
    sizes = line("train", "--target", config, "--prompts", str(prompts), *to)["sizes"]
    heads = [sizes[name] for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")]
    assert heads == [5376, 32, 16, 256, 21504]
