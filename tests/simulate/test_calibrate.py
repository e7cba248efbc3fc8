"""Planted overheads come back from synthetic step times; held-out sizes are predicted; files are checked."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulate_steps import DEPLOYMENT, MACHINE, PLANTED, SHAPE, steps_file

from paceline.errors import ConfigError
from paceline.simulate.answer import set_up
from paceline.simulate.config import AdviceConfig, CostsConfig
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.calibrate import (
    Fitted,
    calibrate,
    fit,
    fitted,
    held_out_sizes,
    machine_of,
    nnls,
    precisions_of,
    reached,
    steps_of,
)
from paceline.simulate.costs.roofline import Deployment, distinct_experts
from paceline.simulate.costs.rounds import Calibration, DraftFit, PassFit, read_calibration
from paceline.simulate.costs.shapes import Precisions
from paceline.simulate.speedup import Load
from paceline.train.plan.advise import advise
from paceline.train.plan.current_traffic import Seen


@pytest.mark.slow
def test_planted_overheads_come_back() -> None:
    """Two contexts tell rows from cached tokens; widths on both sides of the ridge tell reading from computing."""
    files = [steps_file(context=100), steps_file(context=2000)]
    calibration = fit(steps_of(files), SHAPE, DEPLOYMENT)
    for name in ("reading", "computing", "cached_token_s"):
        assert getattr(calibration.verify, name) == pytest.approx(getattr(PLANTED.verify, name), rel=0.01), name
    assert calibration.verify.fixed_s == pytest.approx(4e-4, rel=0.02)
    assert calibration.verify.token_s == pytest.approx(3e-5, rel=0.02)
    assert calibration.draft is not None
    for name in ("fixed_s", "position_s", "floor", "row_s"):
        assert getattr(calibration.draft, name) == pytest.approx(getattr(PLANTED.draft, name), rel=0.01), name
    assert calibration.draft.is_block and calibration.draft.max_draft == 16
    assert calibration.host_s == 3e-4


@pytest.mark.slow
def test_a_drafter_that_goes_token_by_token_is_told_apart() -> None:
    planted = replace(PLANTED, draft=DraftFit(fixed_s=5e-4, position_s=2e-4, floor=3.0, row_s=1e-5, is_block=False))
    draft = fit(steps_of([steps_file(planted)]), SHAPE, DEPLOYMENT).draft
    assert draft is not None and not draft.is_block
    assert draft.position_s == pytest.approx(2e-4, rel=0.01)


@pytest.mark.slow
def test_held_out_sizes_are_predicted() -> None:
    steps = steps_of([steps_file()])
    result = fitted(steps, SHAPE, DEPLOYMENT)
    assert {(point.batch, point.positions) for point in result.held_out} == held_out_sizes(steps)
    assert len(result.held_out) >= 20
    assert result.worst_error < 1e-3
    noisy = fitted(steps_of([steps_file(noise=0.05)]), SHAPE, DEPLOYMENT)
    assert 0.005 < noisy.mean_error < 0.05, "the errors are those of sizes that were not fitted"


@pytest.mark.slow
def test_held_out_sizes_are_not_fitted() -> None:
    """Times doubled at just those sizes change no prediction: each comes out half as fast as predicted."""
    held = held_out_sizes(steps_of([steps_file()]))
    file = steps_file(replace(PLANTED, host_s=0.0))
    file["verify"] = [[batch, width, spent * (1 + ((batch, width) in held))] for batch, width, spent in file["verify"]]
    file["draft"] = [
        [batch, width, spent * (1 + ((batch, width + 1) in held))] for batch, width, spent in file["draft"]
    ]
    result = fitted(steps_of([file]), SHAPE, DEPLOYMENT)
    assert all(point.error == pytest.approx(1.0, abs=2e-3) for point in result.held_out)


@pytest.mark.slow
def test_a_machine_unlike_the_model_shows_in_the_error() -> None:
    """Times that double at every second width cannot be a roofline's."""
    file = steps_file()
    file["verify"] = [[batch, width, seconds * (1 + width % 2)] for batch, width, seconds in file["verify"]]
    assert fitted(steps_of([file]), SHAPE, DEPLOYMENT).worst_error > 0.15


@pytest.mark.slow
def test_whole_rounds_count_where_they_were_measured() -> None:
    file = steps_file()
    costs = PLANTED.costs(SHAPE, DEPLOYMENT)
    file["rounds"] = [
        [batch, width, 1.1 * (seconds + costs.draft_s(batch, width - 1, 0) + costs.host_s)]
        for batch, width, seconds in file["verify"]
    ]
    result = fitted(steps_of([file]), SHAPE, DEPLOYMENT)
    assert all(point.error == pytest.approx(0.1, abs=0.005) for point in result.held_out)


def test_shares_that_were_reached() -> None:
    costs = Calibration(PassFit(reading=2.0, computing=4.0), None, 0.0).costs(SHAPE, DEPLOYMENT)
    bandwidth, arithmetic = reached(costs, 10)
    assert bandwidth == pytest.approx(0.5, rel=1e-6)
    assert arithmetic == pytest.approx(0.25, rel=0.01)


def test_too_few_times_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 6 sizes"):
        steps_of([{"verify": [[1, 1, 0.01], [1, 2, 0.02]]}])


@pytest.mark.parametrize(
    "wrong", [{"host_s": "often"}, {"host_s": -1.0}, {"context": "long"}, {"draft": [[1, 1, "quick"]]}]
)
def test_steps_that_are_no_times_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="of the table must be numbers|is not \\[batch"):
        steps_of([steps_file() | wrong])


def test_what_was_measured_is_read_back() -> None:
    file = steps_file(dtype="bfloat16", weight_format="Q4_1+Q8_0")
    assert machine_of(file) == MACHINE
    assert machine_of({"machine": "box"}) is None
    assert machine_of(file | {"machine": file["machine"] | {"memory_bytes": 1e10}}) == MACHINE
    precisions = precisions_of(file, Precisions(kv="float8"))
    assert (precisions.weights, precisions.attention, precisions.kv) == ("q4_1", "bfloat16", "bfloat16")
    assert precisions_of({}, Precisions(weights="float8", kv="float8")).kv == "float8"


MACHINE_SPOILT = [("bytes_per_s", value) for value in (0, None, "x", math.nan)]
MACHINE_SPOILT += [("flops_per_s", value) for value in (3, {"bfloat16": 0.0})]


@pytest.mark.parametrize(("name", "value"), MACHINE_SPOILT)
def test_a_machine_of_the_steps_without_speeds_is_refused_where_it_counts(
    name: str, value: Any, tmp_path: Path
) -> None:
    steps, file = steps_file(), tmp_path / "steps.json"
    file.write_text(json.dumps(steps | {"machine": steps["machine"] | {name: value}}))
    with pytest.raises(ConfigError, match="the machine of the step times cannot be read .*bench steps again"):
        calibrate(CostsConfig(), [file])
    assert calibrate(CostsConfig(hardware="H100"), [file]).calibration.machine == catalogue.machines()["H100"]


@pytest.mark.slow
def test_calibrations_survive_their_file(tmp_path: Path) -> None:
    calibration = fit(steps_of([steps_file()]), SHAPE, DEPLOYMENT)
    (tmp_path / "calibration.json").write_text(json.dumps(calibration.as_json()))
    assert read_calibration(tmp_path) == calibration
    assert read_calibration(tmp_path / "calibration.json").machine == MACHINE


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"kind": "photo"}, "is no calibration"),
        ({"host_s": "often"}, "host_s is"),
        ({"host_s": float("nan")}, "host_s is"),
        ({"verify": {"reading": 1.0}}, "computing is"),
        ({"draft": {"fixed_s": -1.0}}, "fixed_s is"),
        ({"machine": {"colour": "red"}}, "make the calibration again"),
        ({"precisions": {"weights": "nope"}}, "precision 'nope' is not known.*make the calibration again"),
        ({"precisions": {"kv": ["fp8"]}}, "precision .'fp8'. is not known"),
        *(
            ({"machine": asdict(MACHINE) | {name: value}}, "machine has a speed|bytes_per_s is")
            for name, value in (*MACHINE_SPOILT, ("cached_bytes_per_s", {"4": "fast"}))
        ),
    ],
)
def test_files_that_are_no_calibrations(tmp_path: Path, change: dict[str, Any], remedy: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({**PLANTED.as_json(), **change}))
    with pytest.raises(ConfigError, match=remedy):
        read_calibration(file)


@pytest.mark.slow
def test_least_squares_without_negative_terms() -> None:
    """Against SciPy on problems where plain least squares would turn negative."""
    optimize = pytest.importorskip("scipy.optimize")
    draw = np.random.default_rng(0)
    for _ in range(50):
        columns = draw.normal(size=(12, 1)) + draw.normal(size=(12, 8))
        target = columns @ draw.normal(size=8)
        columns *= 10.0 ** draw.integers(-6, 6, size=8)
        solution = nnls(columns, target)
        assert (solution >= 0).all()
        assert np.linalg.norm(columns @ solution - target) == pytest.approx(
            optimize.nnls(columns, target)[1], rel=1e-6, abs=1e-9
        )
    assert list(nnls(np.zeros((3, 2)), np.ones(3))) == [0.0, 0.0]


MOE = catalogue.find("Qwen3-30B-A3B")


def moe_steps(locality: float) -> dict[str, Any]:
    """Times of a mixture of experts whose positions share so many of them, and the counted experts."""
    deployment = replace(DEPLOYMENT, precisions=MOE.precisions, expert_locality=locality)
    costs, sizes = (
        PLANTED.costs(MOE, deployment),
        [(batch, width) for batch in (1, 2, 4, 8, 16) for width in range(1, 9)],
    )
    assert MOE.experts
    routed, chosen = MOE.experts.num_routed, MOE.experts.per_token
    return steps_file() | {
        "verify": [[batch, width, costs.verify_s(batch, width, 256)] for batch, width in sizes],
        "experts": [[batch, width, distinct_experts(routed, chosen, batch, width, locality)] for batch, width in sizes],
        "draft": [],
    }


def calibrated_moe(tmp_path: Path, steps: dict[str, Any], **options: Any) -> Fitted:
    (tmp_path / "steps.json").write_text(json.dumps(steps))
    return calibrate(CostsConfig(model="Qwen3-30B-A3B", **options), [tmp_path])


@pytest.mark.slow
def test_experts_that_were_counted_tell_the_locality_of_what_was_measured(tmp_path: Path) -> None:
    result = calibrated_moe(tmp_path, moe_steps(0.5))
    assert result.calibration.expert_locality == pytest.approx(0.5)
    assert result.worst_error < 2e-3
    uncounted = calibrated_moe(tmp_path, moe_steps(0.5) | {"experts": []})
    assert uncounted.calibration.expert_locality == 0 and uncounted.worst_error > 0.05, (
        "uniform experts do not fit these times"
    )
    assert calibrated_moe(tmp_path, moe_steps(0.5), expert_locality=0.25).calibration.expert_locality == 0.25


@pytest.mark.slow
def test_a_calibration_predicts_with_the_locality_that_was_counted_unless_another_is_asked_for(tmp_path: Path) -> None:
    result = calibrated_moe(tmp_path, moe_steps(0.5))
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(result.as_json()))
    assert read_calibration(file) == result.calibration

    def deployment(**options: Any) -> Deployment | None:
        return set_up(CostsConfig(model="Qwen3-30B-A3B", calibration=file, **options), [Load()]).deployment

    counted, uniform = deployment(), deployment(expert_locality=0.0)
    assert counted and uniform
    assert (counted.expert_locality, uniform.expert_locality) == (pytest.approx(0.5), 0.0)


def test_experts_that_are_no_counts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="experts"):
        calibrated_moe(tmp_path, moe_steps(0.5) | {"experts": [[1, 2, "many"]]})


@pytest.mark.slow
def test_advice_plans_the_training_on_the_machine_of_the_calibration(tmp_path: Path) -> None:
    """It was planned on this computer, which measured itself first."""
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(replace(PLANTED, machine=MACHINE).as_json()))
    costs = CostsConfig(calibration=file)
    assert advise(costs, AdviceConfig(run="none"), Seen()).machine == "box, 2 threads"
    assert advise(replace(costs, hardware="H100"), AdviceConfig(run="none"), Seen()).machine == "H100"
