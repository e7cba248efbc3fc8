"""The look of reports: verdicts coloured by what they say, charts without empty room, one style sheet for all
pages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from run_folders import evaluation, folder, step

from paceline.bench.pages.run_page import _depth, page, read_run
from paceline.loop.adapt.page import page as adapt_page
from paceline.loop.audit.report import TONES
from paceline.loop.evals.report import _tone as evals_tone
from paceline.report.pages import _offset, look, render
from paceline.report.statistics import LOAD_GAIN, tone_of
from paceline.serve.http.app import PAGES
from paceline.simulate.calculator_page import page as calculator

pytest_plugins = ("undrawn",)


@pytest.mark.parametrize(
    ("speedups", "tone"),
    [
        ([], ""),
        ([1.0], ""),
        ([1.09], ""),
        ([1.1], "good"),
        ([0.96], "cost"),
        ([2.0, 0.9], "cost"),
        ([2.0, 0.97], "good"),
    ],
)
def test_green_is_for_gains_and_amber_for_costs(speedups: list[float], tone: str) -> None:
    assert tone_of(speedups) == tone


def test_under_load_a_smaller_gain_counts() -> None:
    assert (tone_of([1.06]), tone_of([1.06], LOAD_GAIN)) == ("", "good")


@pytest.mark.usefixtures("undrawn")
def test_a_speed_up_that_may_be_chance_is_grey(tmp_path: Path) -> None:
    for interval, shown in (([0.9, 2.9], 'class="verdict"'), ([1.6, 2.05], 'class="verdict good"')):
        run = folder(tmp_path / "run", None, evaluation(speedup_interval=interval))
        assert shown in page(read_run(run))


@pytest.mark.usefixtures("undrawn")
def test_a_drafter_worse_than_the_shipped_one_is_amber(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [step(1)])
    for own, shown in ((1.06, 'class="verdict cost"'), (2.1, 'class="verdict"'), (2.9, 'class="verdict good"')):
        served = {"tokens_per_round": own, "num_prompts": 8, "num_rounds": 16, "accepted_histogram": [4, 6, 6]}
        shipped = {"default_drafter": {"tokens_per_round": 2.0}}
        (run / "heldout.json").write_text(json.dumps(served | shipped))
        assert shown in page(read_run(run)), own


@dataclass
class Verdict:
    verdict: str


@pytest.mark.usefixtures("undrawn")
def test_scores_audits_and_alarms_are_coloured_too() -> None:
    verdicts: Any = {name: cast(Any, Verdict(name)) for name in ("better", "worse", "no difference seen")}
    assert evals_tone([verdicts["better"]], []) == "good"
    assert evals_tone([verdicts["better"], verdicts["worse"]], []) == "cost"
    assert evals_tone([verdicts["no difference seen"]], []) == evals_tone([], []) == ""
    assert evals_tone([verdicts["better"]], ["too slow"]) == "bad"
    assert TONES == {"honest": "good", "faulty": "bad", "unsure": ""}
    line: dict[str, Any] = {"hour": 1, "mix": {}, "decision": {"action": "none", "why": "why", "declined": {}}}
    for state, shown in (
        ("held", 'class="verdict cost"'),
        ("calm", 'class="verdict"'),
        ("learning", 'class="verdict"'),
    ):
        seen = {"all": {"state": state, "tokens_per_round": 2.0, "expected": 2.1, "loss": 0.1}}
        assert shown in adapt_page([line | {"seen": seen}])


def test_charts_leave_no_room_for_nothing() -> None:
    assert _depth([0.6, 0.3, 0.1, 0, 0, 0]) == 4 and _depth([0.6, 0.3]) == 2 and _depth([]) == 0
    groups = [("a", [0.5, 0.2, 0.3]), ("b", [0.6, 0.4])]
    assert [_offset(groups, 0, place) for place in range(3)] == [-0.5, -0.5, 0.0]
    assert [_offset(groups, 1, place) for place in range(2)] == [0.5, 0.5]


@pytest.mark.usefixtures("undrawn")
def test_prompts_stand_before_their_answers(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", [step(1)])
    served = {"tokens_per_round": 2.1, "num_prompts": 2, "num_rounds": 9, "accepted_histogram": [4, 5]}
    (run / "heldout.json").write_text(
        json.dumps(served | {"texts": ["Blue.", "Red."], "prompts": ["The sky?", "<b>Fire?"]})
    )
    text = page(read_run(run))
    places = [text.index(each) for each in ("The sky?", "Blue.", "&lt;b&gt;Fire?", "Red.")]
    assert places == sorted(places)
    (run / "heldout.json").write_text(json.dumps(served | {"texts": ["Blue."]}))
    assert "Blue." in page(read_run(run)), "a run of an older version"


@pytest.mark.slow
def test_all_pages_have_one_look() -> None:
    sheet = look()
    assert sheet in calculator() and sheet in render("base.html", title="t", verdict="v", explained=["decoding"])
    assert PAGES["/page/look.css"].read_text() == sheet
    assert '@import url("look.css")' in PAGES["/page/chat.css"].read_text()
    docs = PAGES["/docs"].read_text()
    assert 'href="page/look.css"' in docs and '<a href="./">' in docs, "with a way back to the chat"
