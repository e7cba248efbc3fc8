"""Curves to ratios, for `train_vs_peers.py`: figures at equal times, times to equal figures, and the table of them."""

from __future__ import annotations

import itertools
from typing import Any

from paceline.tables import Column, Table

OURS = "paceline"
Point = tuple[float, float]
"""Seconds of training, and the figure then."""


def best_so_far(points: list[Point]) -> list[Point]:
    """A curve that never falls: whoever trains may keep the best weights."""
    found: list[Point] = []
    for seconds, figure in points:
        found.append((seconds, max(figure, found[-1][1] if found else figure)))
    return found


def figure_at(points: list[Point], seconds: float) -> float | None:
    """Between two looks on a straight line; None behind the last one."""
    if not points or seconds > points[-1][0] + 1e-9:
        return None
    for (before_s, before), (after_s, after) in itertools.pairwise(points):
        if before_s <= seconds <= after_s:
            return before + (after - before) * (seconds - before_s) / max(after_s - before_s, 1e-9)
    return points[0][1]


def seconds_to(points: list[Point], figure: float) -> float | None:
    """When a curve that never falls reaches a figure, on a straight line between two looks; None when it never does."""
    if not points or points[-1][1] < figure:
        return None
    if points[0][1] >= figure:
        return points[0][0]
    for (before_s, before), (after_s, after) in itertools.pairwise(points):
        if before < figure <= after:
            return before_s + (after_s - before_s) * (figure - before) / (after - before)
    raise AssertionError("a curve that never falls crosses every figure below its last one")


def compared(sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the sides' results say beside each other.

    `equal_time`: each side's best figure so far at shares of the time that all were trained. `equal_figure`: seconds of each
    until the figure that the slowest side ends with, of training alone and with answers and features before; and theirs over
    ours. `times_to`: seconds of training until figures in steps of a tenth.
    """
    curves = {name: best_so_far([(line["seconds"], line["eal"]) for line in side["curve"]]) for name, side in sides.items()}
    common_s = min(points[-1][0] for points in curves.values())
    equal_time = [
        {"seconds": share * common_s, **{name: figure_at(points, share * common_s) for name, points in curves.items()}}
        for share in (0.25, 0.5, 0.75, 1.0)
    ]
    slowest = min(curves, key=lambda name: curves[name][-1][1])
    figure = curves[slowest][-1][1]
    steps_s = {name: seconds_to(points, figure) for name, points in curves.items()}
    before_s = {name: side["answers"]["seconds"] + side["features"]["seconds"] for name, side in sides.items()}
    whole_s = {name: None if each is None else each + before_s[name] for name, each in steps_s.items()}
    found: dict[str, Any] = {"equal_time": equal_time}
    most = max(points[-1][1] for points in curves.values())
    figures = [1 + number / 10 for number in range(1, 70) if 1 + number / 10 <= most]
    found["times_to"] = [{"figure": each, **{name: seconds_to(curves[name], each) for name in sides}} for each in figures]
    found["equal_figure"] = {"figure": figure, "of": slowest, "steps_s": steps_s, "whole_s": whole_s}
    if OURS in sides:
        for kind, times in (("steps", steps_s), ("whole", whole_s)):
            ours = times[OURS]
            found["equal_figure"][f"{kind}_theirs_over_ours"] = {
                name: each / ours for name, each in times.items() if name != OURS and each is not None and ours
            }
    return found


def tables(sides: dict[str, dict[str, Any]], told: dict[str, Any]) -> list[Table]:
    """What each side took and reached, and the two comparisons."""
    records = [
        {
            "side": name,
            **side["curve"][-1],
            **{f"{stage}_s": side[stage]["seconds"] for stage in ("answers", "features")},
            "start_s": side["start_s"],
            "blocks_per_s": side["curve"][-1]["blocks"] / max(side["curve"][-1]["seconds"], 1e-9),
        }
        for name, side in sides.items()
    ]
    columns = [column("side"), *[column(f"{stage}_s", "{:.1f}") for stage in ("answers", "features")]]
    columns += [
        column("seconds", "{:.1f}", "steps_s"),
        column("start_s", "{:.1f}", "starts_s"),
        column("steps"),
        column("blocks"),
    ]
    columns += [column("blocks_per_s", "{:.1f}"), column("eal", "{:.3f}"), column("served", "{:.3f}")]
    notes = [
        f"{name}: answers by {side['answers']['by']}, features by {side['features']['by']}" for name, side in sides.items()
    ]
    stages = Table(columns, records, "Whole runs; starts are not in the other seconds", notes)
    at = [column("seconds", "{:.0f}", "training s"), *[column(name, "{:.3f}") for name in sides]]
    equal = told["equal_figure"]
    rows = [
        {
            "side": name,
            **{kind: equal[f"{kind}_s"][name] for kind in ("steps", "whole")},
            **{f"{kind}_over": equal.get(f"{kind}_theirs_over_ours", {}).get(name) for kind in ("steps", "whole")},
        }
        for name in sides
    ]
    columns = [column("side"), column("steps", "{:.1f}", "training s"), column("whole", "{:.1f}", "with answers, features")]
    columns += [column("steps_over", "{:.2f}", "over ours"), column("whole_over", "{:.2f}", "whole over ours")]
    head = f"Seconds until {equal['figure']:.3f} expected tokens a round, where {equal['of']} ended"
    to = [column("figure", "{:.1f}"), *[column(name, "{:.1f}") for name in sides]]
    reached = Table(to, told["times_to"], "Seconds of training until so many tokens a round are expected")
    return [stages, Table(at, told["equal_time"], "Expected tokens a round, best so far"), reached, Table(columns, rows, head)]


def column(key: str, form: str = "{}", name: str = "") -> Column:
    return Column(name or key, lambda record: record[key], form, align="left" if key == "side" else "right")
