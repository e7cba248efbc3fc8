"""Expected acceptance lengths against what trainings brought: published ones, and runs of one's own."""

from __future__ import annotations

import json
import math
import os
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from paceline.errors import ConfigError
from paceline.simulate.config import AdviceConfig, CostsConfig
from paceline.train.plan import trainings
from paceline.train.plan.advise import advise
from paceline.train.plan.current_traffic import Seen
from paceline.train.plan.trainings import LEVEL, TRAININGS, Training, find_run, growth, own_run, published, student

WORKLOADS = sorted({(row.target, row.workload) for row in TRAININGS})
SHOWN = [
    ("smollm2-135m", "support tickets"),
    ("smollm2-135m", "GSM8K"),
    ("smollm2-135m", "tool calls"),
    ("smollm2-135m", "letters"),
    ("smollm2-135m", "extraction"),
    ("qwen2.5-coder-0.5b", "MBPP"),
]


def of_workload(workload: tuple[str, str]) -> list[Training]:
    return [row for row in TRAININGS if (row.target, row.workload) == workload]


def forget(monkeypatch: pytest.MonkeyPatch, workload: tuple[str, str]) -> list[Training]:
    """The workload's trainings, taken out of those that predictions are made of."""
    rows = of_workload(workload)
    monkeypatch.setattr(trainings, "TRAININGS", tuple(row for row in TRAININGS if row not in rows))
    return rows


@pytest.mark.parametrize("workload", SHOWN, ids="/".join)
def test_what_trainings_brought_lies_inside_the_advice(
    monkeypatch: pytest.MonkeyPatch, workload: tuple[str, str]
) -> None:
    """`advise` for a built-in model and as many answers, told nothing of this workload, not even its kind."""
    for row in forget(monkeypatch, workload):
        config = AdviceConfig(answers=row.answers, run="none")
        advice = advise(CostsConfig(model=row.target, hardware="H100"), config, Seen())
        step = next(step for step in advice.steps if step.answers == row.answers)
        low, high = step.tokens_per_round_interval
        assert low <= row.tokens_per_round <= high, (row.answers, row.tokens_per_round, low, high)
        assert step.gain_interval[0] < step.gain < step.gain_interval[1]


@pytest.mark.parametrize("kind", [None, "known"])
def test_nine_of_ten_workloads_lie_inside_the_interval(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    """Each predicted from the others; a workload counts by the share of its trainings that lie inside."""
    shares = []
    for workload in WORKLOADS:
        rows = forget(monkeypatch, workload)
        expected = [(row, published(row.answers, kind and row.traffic)) for row in rows]
        inside = [one.low <= row.tokens_per_round <= one.high for row, one in expected]
        shares.append(sum(inside) / len(inside))
    assert sum(shares) / len(shares) >= LEVEL - 1 / len(WORKLOADS), dict(zip(WORKLOADS, shares, strict=True))


def test_a_known_kind_of_traffic_narrows_the_interval() -> None:
    unknown, mixed, application = (published(1_000, kind) for kind in (None, "mixed", "application"))
    assert mixed.tokens_per_round < unknown.tokens_per_round < application.tokens_per_round
    for known in (mixed, application):
        assert (known.high - 1) / (known.low - 1) < (unknown.high - 1) / (unknown.low - 1)


def test_fewer_answers_than_were_measured_bring_less_and_more_are_called_beyond() -> None:
    answers = min(row.answers for row in TRAININGS if row.traffic == "mixed")
    few, fewest = published(answers / 10, "mixed"), published(answers, "mixed")
    assert few.tokens_per_round - 1 == pytest.approx((fewest.tokens_per_round - 1) / 10)
    assert published(1e6).is_beyond and not published(1e5).is_beyond
    assert published(1e6).tokens_per_round == published(889_000).tokens_per_round


@pytest.mark.parametrize("freedom", [3, 5, 8, 30])
def test_students_quantiles(freedom: int) -> None:
    assert student(freedom) == pytest.approx(stats.t.ppf(0.95, freedom), rel=0.02)


def run_of(folder: Path, target: str = "smollm2-135m", answers: int | None = None, **heldout: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"target": target, "expected": {"answers": None}}))
    (folder / trainings.TRAINED).write_text(json.dumps({"prompts": answers}))
    (folder / "heldout.json").write_text(json.dumps({"num_prompts": 16, **heldout}))
    return folder


def test_held_out_prompts_of_a_training_foretell_later_ones(tmp_path: Path) -> None:
    """The pairs of advice.json, each measured in the engine: the interval of the first holds the second."""
    content = json.loads(Path(trainings.__file__).with_name("advice.json").read_text())
    for number, row in enumerate(content["heldout"]):
        evidence = own_run(run_of(tmp_path / str(number), tokens_per_round=row["heldout"], answers=500), "smollm2-135m")
        assert evidence and evidence.measured.low <= row["later"] <= evidence.measured.high, row


def test_a_first_training_foretells_larger_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From each workload's smallest training, and the growth of the other workloads, its largest."""
    number = 0
    for workload, group in groupby(sorted(TRAININGS, key=trainings._workload), trainings._workload):
        first, *more = sorted(group, key=lambda row: row.answers)
        if not more or more[-1].answers < 2 * first.answers:
            continue
        forget(monkeypatch, workload)
        run = run_of(tmp_path / str(number), tokens_per_round=first.tokens_per_round, answers=first.answers)
        evidence = own_run(run, "smollm2-135m")
        assert evidence is not None and evidence.at(first.answers) == evidence.measured
        expected = evidence.at(more[-1].answers)
        assert expected.low <= more[-1].tokens_per_round <= expected.high, workload
        assert expected.is_beyond and not evidence.at(first.answers // 2).is_beyond
        number += 1
    assert number >= 4 and 0 <= growth()[0] < growth()[1] < growth()[2] < 1


def test_an_evaluation_of_a_runs_drafter_comes_before_its_held_out_prompts(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", tokens_per_round=4.0, answers=800)
    rows = [
        {"drafter": "none", "batch": 1, "temperature": 0.0, "tokens_per_round": 1.0},
        {"drafter": "d", "batch": 1, "temperature": 0.0, "tokens_per_round": 3.0},
        {"drafter": "d", "batch": 8, "temperature": 0.0, "tokens_per_round": 2.0},
        {"drafter": "d", "batch": 1, "temperature": 1.0, "tokens_per_round": 1.5},
    ]
    for row in rows:
        row |= {"prompts": "tickets", "tokens_per_round_interval": [2.5, 3.5]}
    (run / "evaluation.json").write_text(json.dumps({"results": rows}))
    evidence = own_run(run, "smollm2-135m")
    assert evidence is not None and evidence.answers == 800 and evidence.what == "paceline evaluate, tickets"
    assert (evidence.measured.low, evidence.measured.tokens_per_round, evidence.measured.high) == (2.5, 3.0, 3.5)


def test_the_newest_run_of_the_target_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_run(None, "smollm2-135m") is None
    run_of(Path("runs/other"), "Qwen3-8B", tokens_per_round=3.0, answers=9)
    run_of(Path("runs/unmeasured"))
    run = run_of(Path("runs/mine"), tokens_per_round=3.0, answers=900)
    evidence = find_run(None, "smollm2-135m")
    assert evidence is not None and evidence.folder == run and find_run("none", "smollm2-135m") is None
    with pytest.raises(ConfigError, match="--run runs/unmeasured has no acceptance length .* paceline evaluate"):
        find_run("runs/unmeasured", "smollm2-135m")
    (run / "heldout.json").write_text('{"tokens_per_round": "three"}')
    with pytest.raises(ConfigError, match="runs/mine is damaged .*: choose another --run"):
        find_run("runs/mine", "smollm2-135m")


def test_a_target_may_be_spelled_by_name_or_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_of(Path("runs/mine"), "Qwen/Qwen3-8B", tokens_per_round=3.0, answers=900)
    for target in ("Qwen/Qwen3-8B", "Qwen3-8B", "qwen3-8b"):
        for given in (None, "runs/mine"):
            evidence = find_run(given, target)
            assert evidence is not None and evidence.folder == run
    assert find_run(None, "somebody/Qwen3-8B") is None
    with pytest.raises(ConfigError, match=r"runs/mine is a training of another target \(Qwen/Qwen3-8B\): give one of"):
        find_run("runs/mine", "Qwen3-14B")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plan.json", "{"),
        ("heldout.json", '{"tokens_per_round": "three"}'),
        ("evaluation.json", '{"results": [1]}'),
        ("plan.json", '{"target": "smollm2-135m", "expected": [1]}'),
    ],
)
def test_a_damaged_run_is_left_out_of_the_search_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_of(Path("runs/mine"), tokens_per_round=3.0, answers=900)
    os.utime(run / "plan.json", (1, 1))
    damaged = run_of(Path("runs/damaged"), tokens_per_round=3.0)
    (damaged / name).write_text(text)
    evidence = find_run(None, "smollm2-135m")
    assert evidence is not None and evidence.folder == run
    assert "left out of the search for a training of smollm2-135m: runs/damaged" in caplog.text
    with pytest.raises(ConfigError, match="choose another --run"):
        find_run("runs/damaged", "smollm2-135m")


def test_published_trainings_are_whole_rows() -> None:
    assert len(WORKLOADS) >= 10 and {row.traffic for row in TRAININGS} == {"mixed", "application"}
    assert all(row.source and row.answers > 0 and math.isfinite(row.gain) for row in TRAININGS)
