"""One overhead for every round: given, or solved for from a plain rate."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import ConfigError
from paceline.hardware import Machine
from paceline.simulate.answer import drafter_of, predict_all, simulate_server
from paceline.simulate.config import CostsConfig, PredictConfig, ServingConfig
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.overhead import fitted, overhead_s, with_overhead
from paceline.simulate.costs.roofline import Deployment
from paceline.simulate.costs.rounds import FractionDrafter, RooflineCosts, TimeTable, ToyCosts, table_of
from paceline.simulate.costs.shapes import with_precisions
from paceline.simulate.server_logs import Sample, Seen
from paceline.simulate.speedup import Load

SHAPE = catalogue.find("Qwen3.5-27B")
COSTS = RooflineCosts(SHAPE, Deployment(catalogue.machines()["B200"], SHAPE.precisions), FractionDrafter(0.1))
CPU = Machine("a CPU", 3e10, {"bfloat16": 1e12, "float32": 3e11}, 2, 16e9)
ON = {"model": "Qwen3.5-27B", "hardware": "B200"}


@pytest.mark.parametrize(("batch", "rate"), [(1, 75.0), (8, 60.0), (32, 10.0)])
def test_plain_decoding_comes_out_at_the_rate_it_was_solved_from(batch: int, rate: float) -> None:
    load = Load(batch, 4096)
    slower = with_overhead(COSTS, overhead_s(COSTS, load, rate))
    assert 1 / slower.round_s(batch, 0, 4096) == pytest.approx(rate)
    assert slower.round_s(batch, 5, 4096) - COSTS.round_s(batch, 5, 4096) == pytest.approx(
        overhead_s(COSTS, load, rate)
    )


def test_a_rate_that_needs_no_overhead() -> None:
    assert overhead_s(COSTS, Load(1, 4096), 1 / COSTS.round_s(1, 0, 4096)) == pytest.approx(0.0, abs=1e-12)


def test_faster_than_the_roofline_is_refused_with_what_to_look_at() -> None:
    with pytest.raises(ConfigError, match=r"takes 6\.\d\d ms without any overhead .* --precision"):
        overhead_s(COSTS, Load(1, 4096), 400.0)
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="above 0"):
            overhead_s(COSTS, Load(1, 4096), rate)


def test_measured_times_take_one_too_and_the_toy_does_not() -> None:
    table = table_of({"verify": [[1, 1, 0.01], [1, 8, 0.02]], "host_s": 0.001})
    assert isinstance(table.verify, TimeTable)
    assert with_overhead(table, 0.002).round_s(1, 0, 1) == pytest.approx(0.013)
    with pytest.raises(ConfigError, match="--toy"):
        with_overhead(ToyCosts(), 0.001)


def test_the_answer_says_it_and_what_would_be_without() -> None:
    bare = predict_all(CostsConfig(**ON), PredictConfig(batch=(1, 8)))
    prediction = predict_all(CostsConfig(**ON, plain_rate=75.0), PredictConfig(batch=(1, 8)))
    overhead = prediction.as_json()["overhead"]
    assert prediction.predictions[0].plain_tokens_per_s == pytest.approx(75.0)
    assert overhead["speedup_without"] == bare.predictions[0].speedup < prediction.predictions[0].speedup
    assert [speedup for _, speedup in prediction.without] == [each.speedup for each in bare.predictions]
    assert any("Overhead" in sentence for sentence in prediction.setup.limits)
    assert bare.as_json()["overhead"] is None
    stated = predict_all(CostsConfig(**ON, overhead_ms=overhead["ms"]), PredictConfig())
    assert stated.predictions[0].speedup == pytest.approx(prediction.predictions[0].speedup)


def seen(rounds: dict[int, float]) -> Seen:
    """A server's log with three intervals for each number of requests, the last of which was disturbed."""
    samples = [
        Sample(running=requests, tokens_per_s=requests / (seconds * factor), tokens_per_round=1.0, context=4096.0)
        for requests, seconds in rounds.items()
        for factor in (1.0, 1.0, 1.5)
    ]
    return Seen("vLLM", samples, None)


def test_a_log_of_several_loads_has_a_part_for_each_position() -> None:
    """Planted: 5 ms a round and 0.4 ms a position; the disturbed intervals move nothing."""
    rounds = {requests: COSTS.round_s(requests, 0, 4096) + 0.005 + 0.0004 * requests for requests in (1, 4, 8)}
    overhead = fitted(COSTS, 4096, seen(rounds), "plain.log")
    assert (overhead.seconds, overhead.token_s) == (pytest.approx(0.005), pytest.approx(0.0004))
    costs = with_overhead(COSTS, overhead.seconds, overhead.token_s)
    assert costs.host_s == pytest.approx(0.005)
    assert costs.verify_s(1, 8, 4096) == pytest.approx(COSTS.verify_s(1, 8, 4096) + 8 * 0.0004)


@pytest.mark.parametrize("requests", [(4,), (6, 8)])
def test_a_log_of_one_load_has_a_constant(requests: tuple[int, ...]) -> None:
    rounds = {number: COSTS.round_s(number, 0, 4096) + 0.001 * number for number in requests}
    assert fitted(COSTS, 4096, seen(rounds), "plain.log").token_s == 0.0


def test_larger_rounds_that_cost_less_than_the_roofline_have_no_part_below_zero() -> None:
    rounds = {1: COSTS.round_s(1, 0, 4096) + 0.005, 8: COSTS.round_s(8, 0, 4096) + 0.003}
    overhead = fitted(COSTS, 4096, seen(rounds), "plain.log")
    assert overhead.token_s == 0.0 and 0.003 <= overhead.seconds <= 0.005


def test_the_drafter_of_a_float32_target_reads_four_bytes_a_parameter() -> None:
    """A server runs the drafter in the target's data type; a quantised target's drafter stays in bfloat16."""
    parts = {
        precision: drafter_of(CostsConfig(drafter_params=1e9, block=8), Deployment(CPU, precisions))
        for precision in ("float32", "bfloat16", "float8")
        for precisions in (with_precisions(SHAPE.precisions, precision),)
    }
    assert parts["bfloat16"].draft_s(7, 1) == parts["float8"].draft_s(7, 1) == pytest.approx(2e9 / 3e10)
    assert parts["float32"].draft_s(7, 1) == pytest.approx(4e9 / 3e10)


@pytest.mark.slow
def test_a_simulated_server_is_slower_with_it() -> None:
    load = ServingConfig(concurrency=(4,), requests=20, policy=("off",))
    bare = simulate_server(CostsConfig(**ON), load).loads[0]
    slow = simulate_server(CostsConfig(**ON, overhead_ms=7.0), load).loads[0]
    assert slow.inter_token.mean - bare.inter_token.mean == pytest.approx(7e-3, rel=0.2)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--overhead-ms", "1", "--plain-rate", "75"], "leave all but one out"),
        (["--overhead-ms", "1", "--server-log", "x.log"], "leave all but one out"),
        (["--server-log", "no-such.log"], "cannot read"),
        (["--overhead-ms", "-1"], "--overhead-ms must be"),
        (["--plain-rate", "0"], "--plain-rate must be"),
        (["--toy", "--plain-rate", "75"], "--toy has no seconds"),
        (["--plain-rate", "1000"], "--plain-rate 1000 tokens/s is a step of 1.00 ms"),
    ],
)
def test_impossible_overheads(words: list[str], remedy: str) -> None:
    on = [] if "--toy" in words else ["--model", "Qwen3.5-27B", "--hardware", "B200"]
    result = CliRunner().invoke(app, ["simulate", *on, *words])
    assert remedy in str(result.exception), result.output


def test_the_command_prints_it() -> None:
    words = ["simulate", "--model", "Qwen3.5-27B", "--hardware", "B200", "--plain-rate", "75", "--json"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert json.loads(result.stdout.splitlines()[-1])["overhead"]["ms"] == pytest.approx(6.88, abs=0.01)
    assert "the best without it" in result.stderr
