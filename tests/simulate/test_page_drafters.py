"""The drafters of the calculator page, each with its own acceptance, cost and block, as `paceline simulate` has it;
runs.

    pytest tests/simulate/test_page_drafters.py

Runs in Node, else in Chromium, else skips.
"""

from __future__ import annotations

import json
import random
from typing import Any
from urllib.parse import urlencode

import pytest
from javascript import run_js

from paceline.simulate.answer import predict_all
from paceline.simulate.calculator_page import data
from paceline.simulate.config import CostsConfig, PredictConfig

pytestmark = pytest.mark.slow
NUM_INPUTS = 280
ALL = """({ data, links }) => links.map((link) => {
  const fields = fieldsOf(data), found = resolve(fromHash(fields, link), fields, data);
  const all = Object.entries(found.drafters).map(([kind, own]) =>
    [kind, own.error ? { error: own.error.message } : predict({ ...found, drafter: own.drafter }, own.acceptance, found.load)]);
  return { host_s: found.deployment.host_s, drafters: Object.fromEntries(all) };
})"""


def close(value: float) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-300)


def drawn_own(rng: random.Random, kind: str) -> dict[str, str]:
    """One drafter's settings, as a link has them."""
    share = rng.random() < 0.5
    cost = (
        {"cost": "share", "fraction": f"{rng.random():.3f}"}
        if share
        else {"cost": "params", "params": f"{10 ** rng.uniform(-2, 1):.3f}"}
    )
    way = rng.choice(("constant", "curve", "recorded"))
    curve = [f"{rng.random():.3f}" for _ in range(rng.randrange(1, 12))]
    kept = {
        "constant": {"chance": f"{rng.random():.3f}"},
        "curve": {"curve": ",".join(curve)},
        "recorded": {"recorded": ",".join(str(rng.randrange(1, 90)) for _ in range(rng.randrange(2, 17)))},
    }[way]
    block = {} if kind == "autoregressive" else {"block": str(rng.randrange(1, 20))}
    return {"acceptance": way, **kept, **cost, **block}


def python_options(own: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Command line for the same drafter."""
    cost = (
        {"drafter_cost": float(own["fraction"])}
        if "fraction" in own
        else {"drafter_params": 1e9 * float(own["params"])}
    )
    block = int(own.get("block", "1"))
    acceptance = {"constant": own.get("chance"), "curve": f"conditional:{own.get('curve')}"}
    return cost | ({"block": block} if block > 1 else {}), acceptance.get(
        own["acceptance"]
    ) or f"histogram:{own['recorded']}"


@pytest.mark.nightly
def test_every_drafter_of_the_page_is_predicted_as_the_command_does() -> None:
    """280 predictions: 70 links that set four drafters each, with and without overhead."""
    rng, kinds = random.Random(17), ("ideal", "autoregressive", "block", "yours")
    links, cases = [], []
    for _ in range(NUM_INPUTS // len(kinds)):
        own = {kind: drawn_own(rng, kind) for kind in kinds}
        load = {
            "model": rng.choice(("Qwen3.5-27B", "DeepSeek-V4-Pro", "gpt-oss-120b")),
            "hardware": rng.choice(("B200", "H200")),
        }
        load |= {"batch": rng.randrange(1, 300), "context": rng.randrange(1, 50_000), "max_draft": rng.randrange(1, 25)}
        over = rng.choice(
            ({}, {"overhead_ms": round(rng.uniform(0, 20), 2)}, {"plain_rate": round(rng.uniform(0.5, 3), 2)})
        )
        way = {"overhead_ms": {"overhead": "ms"}, "plain_rate": {"overhead": "rate"}}.get(next(iter(over), ""), {})
        parameters = {f"{kind}.{name}": value for kind, each in own.items() for name, value in each.items()}
        links.append("#" + urlencode({**load, **over, **way, **parameters}))
        cases.append((own, load, over))
    results = run_js(ALL, {"data": data(), "links": links})
    for ours, (own, load, over) in zip(results, cases, strict=True):
        for kind, each in own.items():
            options, acceptance = python_options(each)
            costs = CostsConfig(model=load["model"], hardware=load["hardware"], **over, **options)
            prediction_config = PredictConfig(
                batch=(load["batch"],), context=load["context"], acceptance=acceptance, max_draft=load["max_draft"]
            )
            (expected,) = predict_all(costs, prediction_config).predictions
            assert ours["drafters"][kind]["curve"] == [close(speedup) for _, speedup in expected.curve], (kind, each)
            assert ours["drafters"][kind]["plain_tokens_per_s"] == close(expected.plain_tokens_per_s)


RUNS = [
    {"results": [{"drafter": "none", "accepted_histogram": [50]},
                 {"drafter": "a", "tokens_per_round": 2.0, "accepted_histogram": [1, 2]},
                 {"drafter": "b", "tokens_per_round": 3.0, "accepted_histogram": [5, 5, 20]}]},
    {"sets": {"x": {"results": [{"drafter": "b", "tokens_per_round": 3.0, "accepted_histogram": [4, 6, 20]}]}}},
    {"text": "an answer", "accepted_histogram": [9, 1, 1]},
]  # fmt: skip


def test_runs_are_read_as_they_are_printed() -> None:
    """bench decode's line, evaluation.json, generate's line; after other lines; several traces as their sum."""
    pasted = [json.dumps(RUNS[0]), json.dumps(RUNS[1], indent=2), f"decoding ...\nreport: x\n{json.dumps(RUNS[2])}\n"]
    pasted.append("\n".join(json.dumps({"accepted_histogram": [1, 2, 3]}) for _ in range(2)))
    values = run_js("(pasted) => pasted.map((each) => readRecorded(each).values)", pasted)
    assert values == [[5, 5, 20], [4, 6, 20], [9, 1, 1], [2, 4, 6]]
