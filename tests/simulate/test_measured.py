"""Interpolation that never falls, and files that are no tables."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulate_steps import MACHINE, PLANTED

from paceline.errors import ConfigError
from paceline.simulate.answer import predict_all, simulate_server
from paceline.simulate.config import CostsConfig, PredictConfig, ServingConfig
from paceline.simulate.costs.rounds import TimeTable, read_table

GRID = [[1, 1, 10.0], [1, 5, 14.0], [1, 9, 22.0], [4, 1, 12.0], [4, 5, 40.0], [4, 9, 60.0]]


def test_straight_lines_between_and_beyond() -> None:
    table = TimeTable.of(GRID)
    assert [table.seconds(batch, width) for batch, width, _ in GRID] == [seconds for _, _, seconds in GRID]
    assert table.seconds(1, 3) == pytest.approx(12.0)
    assert table.seconds(2.5, 5) == pytest.approx(27.0)
    assert table.seconds(1, 13) == pytest.approx(30.0), "as steep as between the last two"
    assert table.seconds(8, 4) == pytest.approx(table.seconds(4, 8)), "more rows count as wider passes"
    assert table.seconds(0.5, 0) == pytest.approx(10.0), "nothing is below the first"
    assert table.span == (1, 4, 1, 9)


times = st.lists(
    st.tuples(st.integers(1, 8), st.integers(1, 17), st.floats(1e-4, 1.0)),
    min_size=1,
    max_size=30,
    unique_by=lambda p: p[:2],
)


@pytest.mark.slow
@given(points=times, batch=st.floats(0.5, 16), width=st.floats(0.5, 40), more=st.floats(0, 8))
def test_more_work_never_takes_less(
    points: list[tuple[int, int, float]], batch: float, width: float, more: float
) -> None:
    table = TimeTable.of(points)
    here = table.seconds(batch, width)
    assert here > 0
    assert table.seconds(batch, width + more) >= here * (1 - 1e-9)
    assert table.seconds(batch + more, width) >= here * (1 - 1e-9)


def test_a_slow_small_pass_was_a_disturbance() -> None:
    assert TimeTable.of([[1, 1, 5.0], [1, 2, 3.0]]).seconds(1, 1) == 3.0


def test_repeated_points_count_at_their_fastest() -> None:
    assert TimeTable.of([[1, 1, 5.0], [1, 1, 3.0]]).seconds(1, 1) == 3.0


def test_tables_from_files(tmp_path: Path) -> None:
    steps = {"verify": GRID, "host_s": 0.5, "context": 256, "model": "m", "machine": {"name": "box"}}
    (tmp_path / "steps.json").write_text(json.dumps(steps))
    table = read_table(tmp_path)
    assert (table.host_s, table.context, table.title, table.draft) == (0.5, 256, "m on box", None)
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(GRID))
    assert read_table(bare).verify == table.verify


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("{", "not JSON"),
        ("{}", "no step times"),
        ('{"verify": []}', "no verify times"),
        ('{"verify": [[1, 1]]}', "not \\[batch"),
        ('{"verify": [[1, 1, -1]]}', "above 0"),
        ('{"verify": [[0, 1, 1]]}', "above 0"),
        ('{"verify": [[1, 1, NaN]]}', "above 0"),
        ('{"verify": [[1, 1, 1]], "draft": [["a", 1, 1]]}', "draft time"),
        ('{"verify": [[1, 1, 1]], "host_s": -1}', "host_s"),
    ],
)
def test_files_that_are_no_tables(tmp_path: Path, text: str, remedy: str) -> None:
    file = tmp_path / "steps.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=remedy):
        read_table(file)


def test_no_more_drafts_than_a_drafter_was_measured_with_or_than_its_block(tmp_path: Path) -> None:
    """A table without a drafter is continued beyond its widest pass, as the drafter may do more."""
    file = tmp_path / "steps.json"

    def longest(**more: Any) -> tuple[int, str]:
        answer = predict_all(CostsConfig(**more), PredictConfig(acceptance="0.999", method="dflash"))
        best = answer.predictions[0].best_draft_length
        assert len(answer.predictions[0].curve) == best + 1
        return best, answer.flags["paceline"].partition("--num-drafted ")[2].split()[0]

    file.write_text(json.dumps({"verify": [[1, 1, 10.0], [1, 9, 10.1]]}))
    assert longest(table=file) == (16, "16") and longest(table=file, block=8) == (8, "8")
    file.write_text(json.dumps({"verify": [[1, 1, 10.0], [1, 9, 10.1]], "draft": [[1, 1, 0.1], [1, 7, 0.1]]}))
    assert longest(table=file) == (7, "7")
    kept = PLANTED.as_json() | {"machine": asdict(MACHINE), "model": "smollm2-135m"}
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(kept | {"draft": kept["draft"] | {"max_draft": 7}}))
    assert longest(calibration=file) == (7, "7")
    del kept["draft"]["max_draft"]  # as calibrations were written before
    file.write_text(json.dumps(kept))
    assert longest(calibration=file)[0] > 7
    h100 = {"model": "Qwen3-8B", "hardware": "H100"}
    assert longest(**h100, block=7) == (7, "7") and longest(**h100, drafter_params=1e9, block=7) == (7, "7")
    served = simulate_server(CostsConfig(**h100, block=7), ServingConfig(requests=1, concurrency=(1,), policy=("off",)))
    assert len(served.survival) == 7


def test_a_missing_file_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bench steps"):
        read_table(tmp_path / "steps.json")
