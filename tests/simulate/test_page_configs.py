"""A pasted config.json read by the calculator page, against `model_config.shape_of`: the catalogue's, and spoiled ones.

    pytest tests/simulate/test_page_configs.py

Runs in Node, else in Chromium (PACELINE_NO_NODE=1 takes Chromium), else skips.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from typing import Any

import pytest
from javascript import run_js

from paceline.bounds import MAX_CONTEXT, MAX_LAYERS, MAX_STREAMS
from paceline.errors import PacelineError
from paceline.simulate.calculator_page import data
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.model_config import shape_of

pytestmark = pytest.mark.slow
QUANTIZATIONS = (
    {"quant_method": "fp8"},
    {"quant_method": "awq", "bits": 4},
    {"quant_method": "gptq", "bits": 8},
    {"quant_method": "mxfp4"},
    {"quant_algo": "FP8"},
    {"load_in_4bit": True},
    {},
)
READ = """({ formats, configs }) => configs.map((config) => {
  try {
    const { shape, used } = readConfig(config, formats);
    return { shape, used, again: readConfig(used, formats).shape };
  } catch (error) {
    if (!(error instanceof InputError)) throw error;
    return { error: error.message };
  }
})"""


def configs() -> list[dict[str, Any]]:
    return [entry["config"] for entry in catalogue.entries().values() if "config" in entry]


def comparable(shape: dict[str, Any]) -> dict[str, Any]:
    """Without words and empty values."""
    groups = [{key: value for key, value in group.items() if value not in (None, 0)} for group in shape["attention"]]
    names = ("num_layers", "hidden_size", "vocab_size", "dense", "embedding", "max_context", "experts", "precisions")
    return {**{name: shape[name] for name in names}, "attention": groups}


def spoiled(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """A config with a few keys dropped, emptied or changed."""
    changed = json.loads(json.dumps(config))
    for key in rng.sample(sorted(changed), min(len(changed), rng.randrange(1, 4))):
        values = (None, 0, 1, -1, 2.5, 64, "64", True, [], {}, [0] * 80)
        changed[key] = rng.choice(values)
        if rng.random() < 0.4:
            del changed[key]
    if rng.random() < 0.3:
        changed["quantization_config"] = rng.choice(QUANTIZATIONS)
    if rng.random() < 0.3:
        changed = {"text_config": changed, "model_type": "wrapper", "tie_word_embeddings": True}
    return changed


def test_every_config_of_the_catalogue_is_read_as_python_reads_it() -> None:
    results = run_js(READ, {"formats": data()["formats"], "configs": configs()})
    assert len(results) > 20
    for ours, config in zip(results, configs(), strict=True):
        assert comparable(ours["shape"]) == comparable(asdict(shape_of(config))), config
        assert ours["again"] == ours["shape"]


def test_spoiled_configs_are_read_or_refused_as_python_does() -> None:
    rng = random.Random(1)
    cases = [spoiled(rng, config) for config in configs() for _ in range(9)]
    results = run_js(READ, {"formats": data()["formats"], "configs": cases})
    refused = 0
    for ours, config in zip(results, cases, strict=True):
        try:
            expected = comparable(asdict(shape_of(config)))
        except PacelineError:
            expected = None
        refused += expected is None
        assert ("error" in ours) == (expected is None), (ours, config)
        assert expected is None or comparable(ours["shape"]) == expected, config
    assert 30 < refused < len(cases) - 30


def test_as_many_layers_are_read_as_the_decoder_runs() -> None:
    """The page read 2,000 layers, the command 10,000."""
    config = {**catalogue.entries()["Qwen3-8B"]["config"], "layer_types": None}
    most, beyond = ({**config, "num_hidden_layers": number} for number in (MAX_LAYERS, MAX_LAYERS + 1))
    read, refused = run_js(READ, {"formats": data()["formats"], "configs": [most, beyond]})
    assert comparable(read["shape"]) == comparable(asdict(shape_of(most)))
    assert refused["error"] == "num_hidden_layers is above 4096: check the config.json"
    limits = run_js("(data) => { const { batch, context } = fieldsOf(data); return [batch.max, context.max]; }", data())
    assert limits == [MAX_STREAMS, MAX_CONTEXT]


def test_a_pasted_shape_is_checked() -> None:
    good = asdict(catalogue.find("DeepSeek-V4-Flash"))
    wrong = [
        {**good, "dense": 0},
        {**good, "num_layers": 5},
        {**good, "attention": [{"kind": "x", "layers": 43}]},
        {**good, "hidden_size": "<img>"},
    ]
    wrong += [
        {**good, "experts": {**good["experts"], "per_token": 0}},
        {**good, "precisions": {"weights": "constructor"}},
    ]
    results = run_js(
        READ,
        {
            "formats": data()["formats"],
            "configs": [good, *wrong, {"model_type": "mamba"}, {"num_hidden_layers": 10**9}],
        },
    )
    assert comparable(results[0]["shape"]) == comparable(good)
    assert all("error" in each for each in results[1:])
