"""Charts speed-up over tokens per round: rounds without costs, the roofline's prediction, and measurements.

    chart = chart_of(costs_config, ChartConfig(results=(Path("runs/mock"), Path("runs/bench-decode-1"))))
    chart.slopes                     # {"toy": 1.0, "roofline": 0.71, "mocked": 0.66, "drafters": 0.52}
    draw(chart, svg=Path("speedup.svg"), png=Path("speedup.png"))

The toy model is the dashed line y = x: drafting and verification cost nothing. The second curve is the roofline's (or
that of calibrated or measured steps). It drafts one token fewer than a round yields, the minimum for this acceptance;
runs with mocked acceptance do the same. Real drafters draft more tokens than are accepted, so they are below the curve.
A slope is the least-squares slope through (1, 1): 1 for the toy model, 0 for no gain.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError
from paceline.report.pages import COLORS, WIDTH_INCHES, new_figure, plain_axes, svg_of, write_png
from paceline.report.statistics import is_possible
from paceline.runs.folder import write_whole
from paceline.simulate.answer import set_up
from paceline.simulate.config import ChartConfig, CostsConfig
from paceline.simulate.files import is_amount, read_objects
from paceline.simulate.speedup import Load

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEWEST, MOST = 8, 64
"""Smallest and largest value at which the axis of tokens per round may end."""
TITLE_CHARACTERS = 95
"""Characters per line of the chart's title."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True, slots=True)
class Point:
    """One measured setting: its tokens per round and its speed-up."""

    label: str
    tokens_per_round: float
    speedup: float
    is_mocked: bool
    """True if acceptance was mocked (the number of accepted drafts was set), so that texts are not lossless."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Data of a chart of speed-up over tokens per round: a predicted curve, measured points, and the slope of each
    series (speed-up gained by one more token per round)."""

    title: str
    kind: str
    """Source of the curve, which is its label: roofline, calibrated or measured steps."""
    curve: list[tuple[float, float]]
    """(tokens per round, speed-up), starting at (1, 1)."""
    points: list[Point]
    slopes: dict[str, float] = field(default_factory=dict)
    """Name of a series -> its slope through (1, 1), for series with a point above one token per round."""
    warnings: list[str] = field(default_factory=list)
    """Sentences that warn of a load that does not fit or cannot be predicted well."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def text(self) -> str:
        listed = ", ".join(f"{name} {slope:.2f}" for name, slope in self.slopes.items())
        return f"{self.title}: speed-up for one more token a round (slope through 1, 1): {listed}"


def chart_of(costs: CostsConfig, config: ChartConfig) -> Chart:
    """Return the data of the chart: a curve predicted from `costs`, and points measured in the runs in
    `config.results`. Raises PacelineError for unreadable costs, or a run without a result at `config.batch`."""
    batch, context = config.batch, config.context
    setup = set_up(costs, [Load(batch, context)])
    points = [point for run in config.results for point in read_points(run, batch)]
    most = min(max([FEWEST, *(math.ceil(point.tokens_per_round) for point in points)]), MOST)
    plain_s = setup.costs.round_s(batch, 0, context)
    curve = [
        (float(tokens), tokens * plain_s / setup.costs.round_s(batch, tokens - 1, context))
        for tokens in range(1, most + 1)
    ]
    kind = "measured steps" if setup.kind == "measured" else setup.kind
    series = {
        "toy": [(2.0, 2.0)],
        kind: curve,
        "mocked": [(point.tokens_per_round, point.speedup) for point in points if point.is_mocked],
        "drafters": [(point.tokens_per_round, point.speedup) for point in points if not point.is_mocked],
    }
    slopes = {name: value for name, pairs in series.items() if (value := slope(pairs)) is not None}
    return Chart(
        f"{setup.title}, batch {batch}, {context} tokens of context", kind, curve, points, slopes, setup.warnings
    )


def slope(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the speed-up gained by one more token per round. `pairs`: (tokens per round, speed-up). This is the slope
    of the least-squares line through (1, 1), the point of plain decoding: sum (x - 1)(y - 1) / sum (x - 1)^2. None if
    all x are 1."""
    whole = sum((x - 1) ** 2 for x, _ in pairs)
    return sum((x - 1) * (y - 1) for x, y in pairs) / whole if whole > 0 else None


def read_points(run: Path, batch: int) -> list[Point]:
    """Return one point (acceptance length, speed-up) for each drafter that a bench decode run measured at batch size
    `batch`. Speed-ups above the acceptance length, which are impossible, are left out. Raises ConfigError if no point
    is left."""
    file = run / "results.json" if run.is_dir() else run
    objects = read_objects(file, "--results takes the folder of a run of paceline bench decode, or its results.json")
    results = objects[0].get("results") if len(objects) == 1 else None
    points = []
    for row in results if isinstance(results, list) else ():
        if not isinstance(row, dict) or row.get("batch") != batch or row.get("drafter") == "none":
            continue
        x, y = row.get("tokens_per_round", 0.0), row.get("speedup")
        if y is None or not (is_amount(x) and is_amount(y)) or x < 1 or not is_possible(y, x):
            continue
        is_mocked, model = "drafter" not in row, str(objects[0].get("model", ""))
        name = "mocked" if is_mocked else str(row["drafter"])
        heat = f", T={row['temperature']:g}" if row.get("temperature") else ""
        points.append(Point(f"{name}{heat}{f' ({model})' if model else ''}", float(x), float(y or 0.0), is_mocked))
    if not points:
        raise ConfigError(
            f"{file} has no drafter's speed-up at batch {batch}: give a run of paceline bench decode, or --batch"
        )
    return points


def draw(chart: Chart, svg: Path | None = None, png: Path | None = None) -> None:
    """Write the chart as SVG, PNG or both; equal charts give equal bytes. Raises ConfigError if matplotlib is
    missing."""
    with new_figure(1.4 * WIDTH_INCHES, WIDTH_INCHES) as figure:
        _fill(figure.subplots(), chart)
        if svg is not None:
            write_whole(svg, svg_of(figure))
        if png is not None:
            write_png(figure, png, 200)


def _fill(axes: Axes, chart: Chart) -> None:
    most = chart.curve[-1][0]
    axes.plot([1, most], [1, most], linestyle="--", linewidth=1, color="#7f7f7f", label="rounds for nothing (y = x)")
    own = chart.slopes.get(chart.kind, 0.0)
    axes.plot(*zip(*chart.curve, strict=True), color=COLORS[0], linewidth=1.6, label=f"{chart.kind} (slope {own:.2f})")
    labels = list(dict.fromkeys(point.label for point in chart.points))
    for number, label in enumerate(labels, start=1):
        same = sorted(
            (point for point in chart.points if point.label == label), key=lambda point: point.tokens_per_round
        )
        pairs = [(point.tokens_per_round, point.speedup) for point in same]
        fitted = slope(pairs)
        axes.plot(
            *zip(*pairs, strict=True),
            linestyle=":" if same[0].is_mocked and len(same) > 1 else "",
            marker=MARKERS[number % len(MARKERS)],
            markerfacecolor="none" if same[0].is_mocked else None,
            color=COLORS[number % len(COLORS)],
            label=label if fitted is None else f"{label} (slope {fitted:.2f})",
        )
    title = textwrap.fill(chart.title, TITLE_CHARACTERS)
    axes.set(
        xlabel="tokens a round", ylabel="speed-up over plain decoding", title=title, xlim=(1, None), ylim=(0, None)
    )
    axes.title.set_fontsize(8)
    plain_axes(axes)
    axes.legend(frameon=False, fontsize=8)
