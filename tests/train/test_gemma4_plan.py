"""Plans for Gemma 4 31B, from its config.json or its name alone: a prediction, a training, advice; each in seconds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import UnsupportedModelError
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.roofline import kept_bytes
from paceline.simulate.costs.shapes import Attention, Precisions

SECONDS = 5.0
SLIDING, FULL = Attention("gqa", 50, 32, 16, 256, window=1024), Attention("gqa", 10, 32, 4, 512)


@pytest.fixture
def config(tmp_path: Path) -> str:
    """config.json as on the hub: the text model's part within that of a model of pictures."""
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "vision_config": {}}
    inner = catalogue.config_of("gemma-4-31b")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**outer, "tie_word_embeddings": True, "text_config": inner}))
    return str(path)


def line(*words: str) -> dict[str, Any]:
    begin = time.perf_counter()
    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert time.perf_counter() - begin < SECONDS
    return json.loads(result.stdout.splitlines()[-1])


def test_its_layers_have_heads_of_two_sizes(config: str) -> None:
    for name in (config, "google/gemma-4-31B-it"):
        shape = catalogue.find(name)
        assert set(shape.attention) == {SLIDING, FULL} and shape.embedding == 0
        projections = 5376 * 256 * (50 * (32 + 2 * 16 + 32) + 2 * 10 * (32 + 4 + 32))
        assert shape.dense == 262144 * 5376 + projections + 60 * 3 * 5376 * 21504


def test_layers_that_share_keys_store_none() -> None:
    groups = catalogue.find("gemma-4-e2b").attention
    storing = [group for group in groups if not group.shared]
    assert sum(group.layers for group in storing) == 15 and sum(group.layers for group in groups) == 35
    assert all(kept_bytes(group, Precisions(), 100) == 0 for group in groups if group.shared)


def test_experts_stand_next_to_an_mlp() -> None:
    shape = catalogue.find("gemma-4-26b-a4b")
    assert shape.experts is not None and shape.experts.each == 30 * 3 * 2816 * 704
    assert shape.num_active / 1e9 == pytest.approx(3.8, rel=0.01)


@pytest.mark.slow
def test_a_prediction(config: str) -> None:
    on = ["--hardware", "H100", "--acceptance", "0.8", "--block", "8", "--context", "4096"]
    result = line("simulate", "--model", config, *on)
    assert result["speedup"] > 1.5
    assert result["speedup"] == line("simulate", "--model", "gemma-4-31b", *on)["speedup"]


@pytest.mark.slow
def test_a_training_is_planned(config: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Write function {number}."}) + "\n" for number in range(200)))
    to = ["--out", str(tmp_path / "run"), "--dry-run", "--device-name", "8x H100"]
    sizes = line("train", "--target", config, "--prompts", str(prompts), *to)["sizes"]
    heads = [sizes[name] for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")]
    assert heads == [5376, 32, 16, 256, 21504]


@pytest.mark.slow
def test_advice(config: str) -> None:
    advice = line("advise", "--model", config, "--hardware", "2x H100", "--streams", "16")
    assert advice["verdict"] in ("train", "collect", "no") and advice["steps"]


def test_a_gguf_header_of_it_is_refused_by_name(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "model.gguf", "gemma4")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="give the model's config.json"):
        catalogue.find(str(tmp_path / "model.gguf"))
