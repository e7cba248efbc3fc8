"""The calculator page's JavaScript against the Python it follows: formulas, flags, commands, limits, links.

    pytest tests/simulate/test_page_formulas.py

Runs in Node, else in Chromium (PACELINE_NO_NODE=1 takes Chromium), else skips.
"""

from __future__ import annotations

import itertools
import json
import random
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from javascript import run_js
from landmarks import COST, MOST, WAYS, walked
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import ConfigError
from paceline.simulate import limits
from paceline.simulate import speedup as acceptances
from paceline.simulate.calculator_page import data
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.overhead import overhead_s, with_overhead
from paceline.simulate.costs.roofline import COLLECTIVE_LATENCY_S, Deployment, memory_need
from paceline.simulate.costs.rounds import DrafterCost, FractionDrafter, RooflineCosts, ShapeDrafter
from paceline.simulate.costs.shapes import FORMATS, Attention, ModelShape, Precisions
from paceline.simulate.flags import METHODS, Serving, server_flags
from paceline.simulate.speedup import Load, predict

pytestmark = pytest.mark.slow
NUM_INPUTS = 400
RELATIVE = 1e-9
SHAPES = catalogue.all_shapes()
ODD = ModelShape(
    "every kind at once",
    num_layers=6,
    hidden_size=512,
    dense=3e8,
    embedding=7e7,
    precisions=Precisions(),
    attention=(
        Attention("mla", 1, 8, latent=64, rope=16, ratio=8, indexer_heads=4, indexer_dim=32),
        Attention("mla", 1, 8, latent=64, rope=16, window=256, ratio=8, topk=100),
        Attention("mla", 1, 8, latent=64, rope=16),
        Attention("gqa", 1, 8, kv_heads=2, head_dim=64, window=1024),
        Attention("gqa", 1, 8, kv_heads=8, head_dim=64),
        Attention("linear", 1, state_bytes=99000.0),
    ),
)
"""Features that no model of the catalogue has: histories without windows, all in one."""
PAIRS = list(itertools.product([*SHAPES.values(), *[ODD] * 3], catalogue.machines().values()))
PREDICT = """(inputs) => inputs.map(({ shape, deployment, drafter, kind, values, load, plain_rate }) => {
  const makers = { survival: fromSurvival, histogram: fromHistogram };
  const made = makers[kind] ? makers[kind](values) : acceptanceOf(values, kind);
  const host_s = plain_rate ? overheadSeconds({ shape, deployment }, { ...load, batch: 1 }, plain_rate) : deployment.host_s;
  const there = { ...deployment, host_s };
  return { ...predict({ shape, deployment: there, drafter }, made, load), host_s, memory: memoryNeed(shape, deployment, load) };
})"""
FROM_LINK = """({ data, links }) => links.map((link) => {
  const fields = fieldsOf(data), state = fromHash(fields, link), found = resolve(state, fields, data);
  const own = found.drafters[state.drafter];
  if (own.error) throw own.error;
  return { ...predict({ ...found, drafter: own.drafter }, own.acceptance, found.load), used: found.used,
    command: simulateCommand(state, ownOf(state, state.drafter), own.told, data),
    link: toHash(fields, state), again: toHash(fields, fromHash(fields, toHash(fields, state))) };
})"""


def close(value: float) -> Any:
    return pytest.approx(value, rel=RELATIVE, abs=1e-300)


def drawn_acceptance(rng: random.Random) -> tuple[str, list[float]]:
    kind = rng.choice(("constant", "conditional", "survival", "histogram"))
    if kind == "constant":
        return kind, [rng.choice((0.0, 1.0, rng.random()))]
    if kind == "histogram":
        counts = [float(rng.randrange(0, 500)) for _ in range(rng.randrange(2, 18))]
        return kind, [1.0 + counts[0], *counts[1:]]
    chances = [rng.random() for _ in range(rng.randrange(1, 20))]
    return kind, sorted(chances, reverse=True) if kind == "survival" else chances


def drawn_deployment(rng: random.Random, shape: ModelShape, machine: Any) -> Deployment:
    kept = asdict(shape.precisions)
    precisions = Precisions(**{part: rng.choice((name, rng.choice(list(FORMATS)))) for part, name in kept.items()})
    gpus = rng.choice((1, 1, 2, 4, 7, 64)) if machine.link_bytes_per_s else 1
    locality = rng.choice((0.0, 0.255, 1.0, rng.random()))
    return Deployment(machine, precisions, gpus, locality, rng.choice((False, True)))


def drawn_drafter(rng: random.Random, deployment: Deployment) -> DrafterCost:
    block = rng.choice((None, rng.randrange(1, 33)))
    if rng.random() < 0.5:
        return FractionDrafter(rng.choice((0.0, rng.random(), 3.0)), block)
    rates = deployment.flops_per_s("bfloat16"), deployment.bytes_per_s
    return ShapeDrafter(10 ** rng.uniform(6, 11), *rates, rng.choice((0.53, 1.0, 2.0)), block)


def told_deployment(deployment: Deployment, host_s: float) -> dict[str, Any]:
    formats = {part: {"name": name, **asdict(FORMATS[name])} for part, name in asdict(deployment.precisions).items()}
    return {
        "machine": asdict(deployment.machine),
        "precisions": formats,
        "num_gpus": deployment.num_gpus,
        "locality": deployment.expert_locality,
        "per_layer": deployment.per_layer,
        "latency_s": COLLECTIVE_LATENCY_S,
        "host_s": host_s,
    }


def drawn_case(rng: random.Random, place: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs for JavaScript, and the same inputs for Python."""
    shape, machine = PAIRS[place * len(PAIRS) // NUM_INPUTS]
    deployment = drawn_deployment(rng, shape, machine)
    drafter, host_s = drawn_drafter(rng, deployment), rng.choice((0.0, rng.random() * 1e-3, None))
    kind, values = drawn_acceptance(rng)
    load = Load(round(2 ** rng.uniform(0, 12)), round(2 ** rng.uniform(0, 21)), rng.randrange(0, 33))
    acceptance = acceptances.constant(values[0]) if kind == "constant" else acceptances.WRITTEN[kind](values)
    costs, plain_rate = RooflineCosts(shape, deployment, drafter, 0.0), None
    if host_s is None:  # solved from a rate below what the roofline allows
        plain_rate = rng.uniform(0.1, 1.0) / costs.round_s(1, 0, load.context)
        host_s = overhead_s(costs, Load(1, load.context), plain_rate)
    costs = with_overhead(costs, host_s)
    expected = asdict(predict(costs, acceptance, load)) | {"host_s": host_s}
    length = expected["best_draft_length"]
    expected["parts"] = costs.split(load.batch, length + 1, load.context)
    expected["memory"] = memory_need(shape, deployment, load.batch, load.context)
    given_s = 0.0 if plain_rate else host_s
    inputs = {"shape": asdict(shape), "deployment": told_deployment(deployment, given_s), "drafter": asdict(drafter)}
    return {**inputs, "plain_rate": plain_rate, "kind": kind, "values": values, "load": asdict(load)}, expected


def test_random_inputs_agree() -> None:
    rng = random.Random(6)
    cases = [drawn_case(rng, place) for place in range(NUM_INPUTS)]
    results = run_js(PREDICT, [inputs for inputs, _ in cases])
    assert len(results) == NUM_INPUTS
    for ours, (inputs, expected) in zip(results, cases, strict=True):
        agree(ours, expected, inputs)
    assert len({expected["best_draft_length"] for _, expected in cases}) > 10, "the inputs are too alike to tell much"
    least = NUM_INPUTS // 5
    assert sum(inputs["plain_rate"] is not None for inputs, _ in cases) > least
    assert sum(expected["host_s"] == 0 for _, expected in cases) > least


def test_a_rate_that_cannot_be_is_refused_as_python_refuses_it() -> None:
    shape = SHAPES["Qwen3.5-27B"]
    deployment = Deployment(catalogue.machines()["B200"], shape.precisions)
    costs = RooflineCosts(shape, deployment, FractionDrafter(0.1, None))
    main = """({ shape, deployment, rates }) => rates.map((rate) => {
      try { return overheadSeconds({ shape, deployment }, { batch: 1, context: 4096 }, rate); }
      catch (error) { return error instanceof InputError ? error.message : null; }
    })"""
    rates = [75.0, 154.0, 157.0, 0.0, -3.0]
    inputs = {"shape": asdict(shape), "deployment": told_deployment(deployment, 0.0), "rates": rates}
    for rate, ours in zip(rates, run_js(main, inputs), strict=True):
        if rate in (75.0, 154.0):
            assert ours == close(overhead_s(costs, Load(1, 4096), rate))
            continue
        told_why = "without any overhead" if rate > 0 else "above 0"
        with pytest.raises(ConfigError, match=told_why):
            overhead_s(costs, Load(1, 4096), rate)
        assert told_why in ours


def agree(ours: dict[str, Any], expected: dict[str, Any], inputs: dict[str, Any]) -> None:
    assert ours["host_s"] == pytest.approx(expected["host_s"], rel=1e-6, abs=1e-12 * expected["plain_round_s"])
    assert ours["curve"] == [close(speedup) for _, speedup in expected["curve"]]
    for name in ("speedup", "tokens_per_s", "plain_tokens_per_s", "plain_round_s"):
        assert ours[name] == (
            close(expected[name]) if name != "tokens_per_s" else pytest.approx(expected[name], rel=1e-8)
        ), name
    for change, other in zip(ours["sensitivity"], expected["sensitivity"], strict=True):
        assert change["points"] == other["points"] and change["speedup"] == close(other["speedup"])
    need = expected["memory"]
    assert ours["memory"]["weights"] == close(need.weight_bytes) and ours["memory"]["cache"] == close(need.cache_bytes)
    assert ours["memory"]["fits"] == need.fits
    if ours["best_draft_length"] != expected["best_draft_length"]:  # lengths of one speed-up, but for the last bit
        tied = expected["curve"][ours["best_draft_length"]][1]
        assert tied == close(expected["speedup"])
        return
    assert ours["tokens_per_round"] == close(expected["tokens_per_round"]) and ours["round_s"] == close(
        expected["round_s"]
    )
    assert {part: ours["parts"][part] for part in expected["parts"]} == {
        part: close(seconds) for part, seconds in expected["parts"].items()
    }
    assert ours["parts"]["drafter"] / ours["round_s"] == pytest.approx(
        expected["time_split"]["drafter"], rel=1e-9, abs=1e-15
    )


def test_the_landmarks_come_out_of_links() -> None:
    """The walk-through's tables, through the very code that turns a link into a prediction."""
    kinds = {"token by token": "autoregressive", "in blocks": "block"}
    points = list(walked())
    links = [
        f"#model={each.model}&hardware=B200&batch={each.batch}&context=4096&max_draft={MOST}&drafter={kinds[each.way]}"
        f"&{kinds[each.way]}.chance={WAYS[each.way][0]}&{kinds[each.way]}.fraction={COST}"
        for each in points
    ]
    results = run_js(FROM_LINK, {"data": data(), "links": links})
    assert len(results) == 36
    for ours, each in zip(results, points, strict=True):
        assert (ours["speedup"], ours["best_draft_length"]) == (close(each.predicted), each.best_draft_length), each


def test_of_equal_lengths_the_shortest_is_best() -> None:
    link = "#model=Qwen3-8B&hardware=B200&batch=1&context=1&block.chance=0&block.fraction=0"
    (ours,) = run_js(FROM_LINK, {"data": data(), "links": [link]})
    assert set(ours["curve"]) == {1.0} and ours["best_draft_length"] == 0


# Words


def test_flags_are_pythons_to_the_letter() -> None:
    rng = random.Random(2)
    servings = [
        Serving(
            model=rng.choice(("Qwen/Qwen3-8B", "a b", "it's")),
            method=rng.choice(tuple(METHODS)),
            drafter=rng.choice(("YOUR-DRAFTER", "my $drafter", "a'b")),
            num_drafted=rng.randrange(0, 17),
            batch=rng.randrange(1, 300),
            num_gpus=rng.choice((1, 8)),
            has_8bit_cache=rng.random() < 0.5,
            has_decoder=rng.random() < 0.8,
        )
        for _ in range(300)
    ]
    flags = run_js("(servings) => servings.map(serverFlags)", [asdict(serving) for serving in servings])
    assert flags == [server_flags(serving) for serving in servings]


CONFIG = next(entry["config"] for entry in catalogue.entries().values() if "config" in entry)
LINKS = [
    "",
    "#model=Qwen3-8B&hardware=H100&batch=7&drafter=autoregressive&autoregressive.chance=0.81"
    "&autoregressive.fraction=0.05&max_draft=9",
    "#hardware=RTX 4090&model=Qwen3.5-27B&weights=int4&kv=float8&per_layer=1&context=100000"
    "&block.cost=params&block.params=0.983&block.block=8",
    "#model=DeepSeek-V4-Pro&gpus=8&experts=float8&locality=0.255&block.acceptance=curve&block.curve=0.9,0.8,0.85",
    "#method=eagle3&drafter=autoregressive&autoregressive.acceptance=curve&autoregressive.curve=1&hardware=MI300X",
    "#block.acceptance=recorded&block.recorded=survival: .7, .5, .3&drafter_name=my drafter&batch=128",
    "#model=Qwen3.5-27B&overhead=rate&plain_rate=75&drafter=ideal&ideal.chance=1",
    "#overhead=ms&overhead_ms=6.9&drafter=yours&yours.recorded=10,5,20&yours.cost=params&yours.params=0.5&yours.block=1",
    "#block.acceptance=recorded&block.recorded="
    '{"results": [{"accepted_histogram": [50]}, {"accepted_histogram": [10, 5, 20]}]}',
    f"#model=pasted&config={json.dumps({**CONFIG, 'hidden_size': 1024})}&batch=3",
]


def test_the_command_gives_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    links = [link.replace("%", "%25").replace("+", "%2B") for link in LINKS]
    for ours in run_js(FROM_LINK, {"data": data(), "links": links}):
        if ours["used"]:
            Path("config.json").write_text(ours["used"])
        words = shlex.split(ours["command"])
        assert words[0] == "paceline"
        result = CliRunner().invoke(app, [*words[1:], "--json"], catch_exceptions=False)
        line = json.loads(result.stdout.splitlines()[-1])
        assert ours["curve"] == [close(speedup) for _, speedup in line["curve"]], ours["command"]
        assert ours["best_draft_length"] == line["best_draft_length"] and ours["tokens_per_s"] == close(
            line["tokens_per_s"]
        )
        assert ours["link"] == ours["again"]


def test_limits_are_as_many_as_pythons() -> None:
    main = """({ data, cases }) => cases.map((found) => [limitsOf(found, data),
      warningsOf({ ...found, memory: memoryNeed(found.shape, found.deployment, found.load) })])"""
    rng = random.Random(3)
    cases, expected = [], []
    for _ in range(300):
        shape, machine = rng.choice(PAIRS)
        deployment, load = (
            drawn_deployment(rng, shape, machine),
            Load(rng.choice((1, 5000)), rng.choice((4096, 10**6)), 12),
        )
        acceptance = rng.choice(
            (acceptances.constant(0.5), acceptances.from_survival([0.7, 0.5]), acceptances.from_histogram([3, 2] * 9))
        )
        need = memory_need(shape, deployment, load.batch, load.context)
        warned = (limits.memory_warning(need, load, deployment), limits.context_warning(shape, load))
        own_limits = limits.roofline_limits(shape, deployment) + limits.acceptance_limits(acceptance, load)
        expected.append((own_limits, sum(each is not None for each in warned)))
        words = {"conditional": acceptance.conditional, "kind": acceptance.kind, "numRounds": acceptance.num_rounds}
        cases.append(
            {
                "shape": asdict(shape),
                "deployment": told_deployment(deployment, 0.0),
                "drafter": asdict(FractionDrafter(0.1)),
                "acceptance": words,
                "load": asdict(load),
            }
        )
    for (own_limits, warned), (sentences, num_warnings) in zip(
        run_js(main, {"data": data(), "cases": cases}), expected, strict=True
    ):
        assert [
            sentence.replace("(an expert locality of", "(--expert-locality") for sentence in own_limits
        ] == sentences
        assert len(warned) == num_warnings


HOSTILE = [
    "#batch=0&block.chance=1.1&context=1e99&max_draft=-3&block.fraction=NaN&block.params=Infinity&gpus=1.5",
    "#model=constructor&hardware=__proto__&drafter=toString&weights=hasOwnProperty&block.cost=",
    "#__proto__=x&constructor=y&unknown=1&batch=<script>alert(1)</script>",
    "#block.curve=0.5,2&block.curve=,&per_layer=true&drafter_name=" + "x" * 500,
    "#%E0%A4%A&===&&&#&batch=%00",
]


def test_hostile_links_change_nothing() -> None:
    main = """({ data, links }) => { const fields = fieldsOf(data);
      return [JSON.stringify(standards(fields)), ...links.map((link) => JSON.stringify(fromHash(fields, link)))]; }"""
    standard, *results = run_js(main, {"data": data(), "links": HOSTILE})
    assert [each == standard for each in results] == [True] * len(HOSTILE)


NONSENSE = [
    "{",
    '{"results": [{"drafter": "none"}]}',
    '{"step": 5, "loss": 2.0}',
    "",
    "a,b",
    "1;x",
    '{"results": 5}',
    "survival: .5, .7",
    "histogram: 5",
    "0,0,0",
    "-1, 2",
    "[1e999, 2]",
]


def test_nonsense_recordings_are_refused() -> None:
    main = """({ data, pasted }) => pasted.map((recorded) => {
      const fields = fieldsOf(data), state = { ...standards(fields), drafter: "yours", "yours.recorded": recorded };
      const { yours, block } = resolve(state, fields, data).drafters;
      return { isInput: yours.error instanceof InputError, message: yours.error?.message, others: !block.error };
    })"""
    for pasted, result in zip(NONSENSE, run_js(main, {"data": data(), "pasted": NONSENSE}), strict=True):
        assert result["isInput"] and len(result["message"]) > 20 and result["others"], pasted
