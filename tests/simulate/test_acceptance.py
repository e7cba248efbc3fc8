"""Chances by place, from one number, curves, histograms, rounds and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.simulate.speedup import (
    Acceptance,
    constant,
    from_histogram,
    from_rounds,
    from_survival,
    parse_acceptance,
    shifted,
    tokens_per_round,
)

DFLASH = (0.772, 0.565, 0.42, 0.323, 0.256, 0.208, 0.17, 0.141, 0.12, 0.103, 0.089, 0.078, 0.068, 0.059, 0.051)
"""Survival measured for Qwen3.6-35B-A3B at temperature 0.6."""


@pytest.mark.slow
@given(chance=st.floats(0, 0.999), length=st.integers(0, 40))
def test_one_chance_has_the_closed_form(chance: float, length: int) -> None:
    assert tokens_per_round(constant(chance), length) == pytest.approx(
        (1 - chance ** (length + 1)) / (1 - chance), rel=1e-12
    )


def test_certain_drafts_all_stand() -> None:
    assert tokens_per_round(constant(1.0), 7) == 8.0
    assert tokens_per_round(constant(0.0), 7) == 1.0


def test_a_survival_curve_comes_back() -> None:
    acceptance = from_survival(DFLASH)
    assert acceptance.survival(15) == pytest.approx(list(DFLASH))
    assert tokens_per_round(acceptance, 15) == pytest.approx(1 + sum(DFLASH))
    assert acceptance.at(2) == pytest.approx(0.565 / 0.772)
    assert acceptance.at(14) > acceptance.at(2), "conditional acceptance rises with depth"


def test_deeper_places_have_the_last_chance() -> None:
    acceptance = Acceptance((0.8, 0.5))
    assert [acceptance.at(place) for place in (1, 2, 3, 9)] == [0.8, 0.5, 0.5, 0.5]


def test_a_histogram_is_a_survival_curve() -> None:
    acceptance = from_histogram([20, 30, 10, 40])
    assert acceptance.survival(3) == pytest.approx([0.8, 0.5, 0.4])
    assert acceptance.num_rounds == 100
    assert from_histogram([5, 5, 0, 0]).survival(2) == pytest.approx([0.5, 0.5 * 0.5]), "the tail was never seen"


def test_rounds_count_only_where_they_drafted() -> None:
    """Three rounds of one draft, all kept, say nothing of the second place."""
    acceptance = from_rounds([(1, 1)] * 3 + [(2, 2), (2, 1), (2, 0), (0, 0)])
    assert acceptance.conditional == pytest.approx((5 / 6, 1 / 2))


def test_points_are_added_and_kept_within_reason() -> None:
    assert shifted(Acceptance((0.95, 0.5, 0.0)), 0.1).conditional == pytest.approx((1.0, 0.6, 0.1))
    assert shifted(constant(0.05), -0.1).conditional == (0.0,)


@pytest.mark.parametrize(
    ("text", "kind", "first_two"),
    [
        ("0.75", "constant", [0.75, 0.75]),
        ("0.8,0.5", "conditional", [0.8, 0.5]),
        ("survival:0.8,0.4", "survival", [0.8, 0.5]),
        ("histogram:2,4,4", "histogram", [0.8, 0.5]),
    ],
)
def test_written_acceptance(text: str, kind: str, first_two: list[float]) -> None:
    acceptance = parse_acceptance(text)
    assert acceptance.kind == kind
    assert [acceptance.at(1), acceptance.at(2)] == pytest.approx(first_two)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("1.2", "between 0 and 1"),
        ("-0.1", "between 0 and 1"),
        ("nan", "between 0 and 1"),
        ("", "empty"),
        ("often", "no file"),
        ("survival:0.5,0.6", "must fall"),
        ("survival:1.5", "must fall"),
        ("histogram:5", "at least two"),
        ("histogram:0,0", "at least two"),
        ("0.8,,x", "no curve"),
    ],
)
def test_nonsense_is_refused(text: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        parse_acceptance(text)


def bench_run(folder: Path) -> Path:
    results = [
        {"drafter": "none", "accepted_histogram": [50], "tokens_per_round": 1.0},
        {"drafter": "ngram", "drafter_name": "ngram", "accepted_histogram": [9, 1], "tokens_per_round": 1.1},
        {"drafter": "default", "drafter_name": "dflash", "accepted_histogram": [2, 4, 4], "tokens_per_round": 2.2},
    ]
    (folder / "results.json").write_text(json.dumps({"results": results}))
    return folder


def test_a_bench_run_gives_its_best_drafter_or_the_named_one(tmp_path: Path) -> None:
    run = bench_run(tmp_path)
    assert parse_acceptance(str(run)).survival(2) == pytest.approx([0.8, 0.4])
    assert parse_acceptance(str(run / "results.json")).num_rounds == 10
    assert parse_acceptance(f"{run}:ngram").survival(1) == pytest.approx([0.1])
    with pytest.raises(ConfigError, match="it holds ngram, default"):
        parse_acceptance(f"{run}:eagle")


def test_traces_in_json_lines_and_parquet(tmp_path: Path) -> None:
    rows = [{"drafted": [3, 3], "accepted": [3, 1]}, {"drafted": [3], "accepted": [0]}]
    lines = tmp_path / "trace.jsonl"
    lines.write_text("\n".join(json.dumps(row) for row in rows))
    expected = (2 / 3, 1 / 2, 1.0)
    assert parse_acceptance(str(lines)).conditional == pytest.approx(expected)
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "trace.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), file)
    assert parse_acceptance(str(file)).conditional == pytest.approx(expected)


def test_folders_of_traces_and_of_an_evaluation(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    for number, accepted in enumerate(([2, 0], [1, 1])):
        rows = [{"drafted": [2, 2], "accepted": accepted}]
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"traces-{number}.parquet")
    assert parse_acceptance(str(tmp_path)) == from_rounds([(2, 2), (2, 0), (2, 1), (2, 1)])
    (tmp_path / "evaluation.json").write_text('{"results": [{"drafter": "d", "accepted_histogram": [5, 15]}]}')
    assert parse_acceptance(str(tmp_path)) == from_histogram([5, 15]), "a run's figures come first"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty/results.json .*give a run of bench decode"):
        parse_acceptance(str(tmp_path / "empty"))


def test_files_without_rounds_say_what_to_give(tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    with pytest.raises(ConfigError, match="bench decode"):
        parse_acceptance(str(empty))
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match="neither JSON"):
        parse_acceptance(str(broken))
    broken.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot read .*recursion"):
        parse_acceptance(str(broken))
    parquet = tmp_path / "broken.parquet"
    parquet.write_bytes(b"no")
    with pytest.raises(ConfigError, match="no trace"):
        parse_acceptance(str(parquet))
