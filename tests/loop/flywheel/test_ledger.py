"""The ledger's lines and table, and what the gates of a turn say of scores, without a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from eval_doubles import scores

from paceline.commands.turn import turn
from paceline.errors import ConfigError
from paceline.loop.evals.compare import compare
from paceline.loop.flywheel import ledger
from paceline.loop.flywheel.measure import lost, slower

KEPT: dict[str, Any] = {
    "turn": 1,
    "what": "student",
    "state": "kept",
    "model": "s",
    "score": 0.9,
    "interval": [0.8, 1.0],
}


def test_a_line_that_is_written_again_counts_once_and_refusals_stay(tmp_path: Path) -> None:
    for line in (
        KEPT,
        {**KEPT, "score": 0.95},
        {**KEPT, "state": "refused", "why": "a"},
        {**KEPT, "state": "refused", "why": "b"},
    ):
        ledger.append(tmp_path, line)
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"turn": 9')  # a kill
    assert [(line["state"], line.get("why"), line["score"]) for line in ledger.read(tmp_path)] == [
        ("kept", None, 0.95), ("refused", "a", 0.9), ("refused", "b", 0.9),
    ]  # fmt: skip
    ledger.append(tmp_path, {**KEPT, "turn": 2})
    assert [line["turn"] for line in ledger.read(tmp_path)] == [1, 1, 1, 2]


@pytest.mark.parametrize("odd", ["5", "{}", "{no", '{"turn": "1", "what": "a", "state": "kept"}', "[" * 100_000])
def test_a_line_that_is_damaged_is_one_line(tmp_path: Path, odd: str) -> None:
    ledger.append(tmp_path, KEPT)
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write(odd + "\n")
    with pytest.raises(ConfigError, match=r"ledger.jsonl is damaged .*delete the line"):
        ledger.read(tmp_path)


def test_the_table_shows_what_there_is() -> None:
    lines = [KEPT, {"turn": 1, "what": "turn", "state": "kept", "model": "s", "core_s": 1800, "price": 0.5}]
    table = ledger.table(lines)
    cells = [dict(zip([column.name for column in table.columns], row, strict=True)) for row in table.texts()]
    assert (
        cells[0]["evals"] == "0.900 [0.800, 1.000]" and cells[0]["core-hours"] == "-" and "first evals" not in cells[0]
    )
    assert cells[1]["core-hours"] == "0.50" and cells[1]["cost"] == "0.5" and cells[1]["evals"] == "-"
    assert table.notes == ["turn 1, student: s"]
    refused = ledger.table([{**KEPT, "state": "refused", "why": "only 45.8% of the fields"}])
    assert refused.notes[1] == "turn 1, student, refused: only 45.8% of the fields"
    assert "first evals" in [column.name for column in ledger.table([{**KEPT, "first_score": 1.0}]).columns]


def test_a_loss_is_refused_unless_it_is_ruled_out() -> None:
    before = scores([1.0] * 80, "teacher")
    good, bad = scores([1.0] * 79 + [0.0]), scores([1.0] * 60 + [0.0] * 20)
    assert lost(compare(before, good), 0.1) is None
    why = lost(compare(before, bad), 0.1)
    assert why is not None and "compared with teacher is not ruled out: -0.250 [" in why
    some = compare(before, scores([1.0] * 72 + [0.0] * 8))
    assert some.difference > -0.12 and lost(some, 0.12) is not None, "its mean is within, its interval is not"
    assert lost(some, 0.3) is None and lost(compare(before, good), 0.0) is not None


def test_a_drafter_is_not_served_when_it_changes_an_answer_or_brings_no_speed() -> None:
    alone = scores([1.0] * 4, texts=["a", "b", "c", "d"])
    same, other = (scores([1.0] * 4, texts=texts) for texts in (["a", "b", "c", "d"], ["a", "b", "c", "x"]))
    quick, slow = replace(same, wall_s=0.5), replace(same, wall_s=2.0)
    assert slower(alone, quick, compare(alone, quick), 1.0, True) is None
    assert "4.0 tokens/s with it, 8.0 without" in str(slower(alone, slow, compare(alone, slow), 1.0, True))
    assert slower(alone, slow, compare(alone, slow), 0.5, True) is None
    reason = slower(alone, replace(other, wall_s=0.5), compare(alone, other), 1.0, True)
    assert reason == "1 of 4 answers differ from those without it"
    assert slower(alone, replace(other, wall_s=0.5), compare(alone, other), 1.0, False) is None, (
        "sampled texts need not agree"
    )


def test_the_command_shows_the_ledger_or_what_makes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "flywheel.yaml"
    file.write_text(f"model: m\nrecord: traces\nout: {tmp_path / 'wheel'}\n")
    turn(config=file, show_ledger=True)
    assert "has no ledger yet" in capsys.readouterr().err
    ledger.append(tmp_path / "wheel", KEPT)
    turn(config=file, show_ledger=True)
    assert "0.900" in capsys.readouterr().out
    turn(config=file, show_ledger=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["ledger"][0]["score"] == 0.9
    with pytest.raises(ConfigError, match="exclude each other"):
        turn(config=file, show_ledger=True, dry_run=True)


@pytest.mark.parametrize("passed", [True, False])
def test_the_exit_status_says_whether_it_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    from paceline.loop.flywheel.run import TurnResult

    file = tmp_path / "flywheel.yaml"
    file.write_text("model: m\nrecord: traces\n")
    result = TurnResult(1, passed, "" if passed else "why", "m", "none", "", 1.0, None)
    monkeypatch.setattr("paceline.loop.flywheel.run.turn", lambda config, progress: result)
    if passed:
        turn(config=file)
        return
    with pytest.raises(typer.Exit) as ended:
        turn(config=file)
    assert ended.value.exit_code == 3
