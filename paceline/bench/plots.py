"""Figures, drawn when matplotlib is installed: PNG files of a benchmark, and SVG elements for the page of `bench/html.py`."""

from __future__ import annotations

import hashlib
import html
import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.decode import Result, name_of
from paceline.errors import CacheError, ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#3b82c4", "#d55e00", "#0a9a72", "#b05fa5", "#a87b00", "#7f7f7f")
"""Told apart by colour-blind eyes, and at least 3:1 on a white page as on a dark one."""
INK = "#010203"
"""Stands for the page's text colour while matplotlib draws."""
WIDTH_INCHES = 4.4
"""302 points: on a phone's 390 pixels the text keeps its size."""
FEW_POINTS = 30
LONGEST_LABEL = 20
STYLE: Any = {
    "svg.hashsalt": "paceline",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.labelcolor": INK,
}


def draw(folder: Path, results: list[Result]) -> str | None:
    """survival.png and tokens_per_s.png; returns a notice instead when matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return "no figures: pip install matplotlib to have them drawn"
    matplotlib.use("Agg")
    try:
        _survival(folder / "survival.png", results)
        _speed(folder / "tokens_per_s.png", results)
    except OSError as error:
        raise CacheError(f"cannot write the figures into {folder} ({error.strerror or error}): choose another --out") from error
    return None


def _survival(path: Path, results: list[Result]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for result in results:
        if result.survival:
            axes.plot(range(1, len(result.survival) + 1), result.survival, marker="o", label=name_of(result))
    axes.set(xlabel="i", ylabel="share of rounds whose first i drafts stood", ylim=(0, 1))
    if axes.lines:
        axes.legend()
    figure.savefig(path)


def _speed(path: Path, results: list[Result]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.5 + 0.4 * len(results)), layout="constrained")
    axes = figure.subplots()
    rates = [result.tokens_per_s for result in results]
    below = [result.tokens_per_s - result.tokens_per_s_range[0] for result in results]
    above = [result.tokens_per_s_range[1] - result.tokens_per_s for result in results]
    axes.barh([name_of(result) for result in results], rates, xerr=[below, above], capsize=3)
    axes.invert_yaxis()
    axes.set(xlabel="tokens per second (bars: median, whiskers: slowest and fastest repetition)")
    figure.savefig(path)


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot. `is_faint` draws it thin and dashed."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    is_faint: bool = False


def curves(
    title: str, series: list[Series], *, xlabel: str, ylabel: str, ylim: tuple[float, float | None] | None = None
) -> str:
    """Lines over a common axis, as an SVG element; "" when no series has a point."""
    shown = [each for each in series if len(each.x)]
    if not shown:
        return ""

    def fill(axes: Axes) -> None:
        from matplotlib.ticker import EngFormatter, MaxNLocator

        marker = "o" if max(len(each.x) for each in shown) <= FEW_POINTS else ""
        for each in shown:
            style: dict[str, Any] = {"linestyle": "--", "linewidth": 1.0} if each.is_faint else {"linewidth": 1.6}
            color = COLORS[each.color % len(COLORS)]
            axes.plot(each.x, each.y, label=_short(each.label), color=color, marker=marker, markersize=3, **style)
        axes.set(xlabel=xlabel, ylabel=ylabel, ylim=ylim)
        places = [float(place) for each in shown for place in each.x]
        if max(places) >= 1000 or all(place.is_integer() for place in places):
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))

    return _svg(title, fill, has_legend=len(shown) > 1)


def bars(
    title: str,
    groups: Sequence[tuple[str, Sequence[float]]],
    *,
    xlabel: str,
    ylabel: str,
    ticks: Sequence[str] | None = None,
    ylim: tuple[float, float] | None = None,
) -> str:
    """Bars side by side, one colour a group, as an SVG element; `ticks` name the places, else they count from 0."""
    shown = [(label, values) for label, values in groups if len(values)]
    if not shown:
        return ""

    def fill(axes: Axes) -> None:
        width = 0.8 / len(shown)
        for index, (label, values) in enumerate(shown):
            places = [place - 0.4 + width * (index + 0.5) for place in range(len(values))]
            axes.bar(places, values, width, label=_short(label), color=COLORS[index % len(COLORS)])
        longest = max(len(values) for _, values in shown)
        names = ticks or [str(place) for place in range(longest)]
        axes.set_xticks(range(len(names)), names)
        axes.set(xlabel=xlabel, ylabel=ylabel, ylim=ylim)

    return _svg(title, fill, has_legend=len(shown) > 1)


def speedup_bars(title: str, rows: list[tuple[str, Result]]) -> str:
    """A bar a setting with its interval, plain decoding as a line at 1, as an SVG element; "" without rows."""
    if not rows:
        return ""

    def fill(axes: Axes) -> None:
        sets = list(dict.fromkeys(name for name, _ in rows))
        for place, (name, result) in enumerate(rows):
            low, high = result.speedup_interval
            error = None if low is None or high is None else [[max(result.speedup - low, 0)], [max(high - result.speedup, 0)]]
            color = COLORS[sets.index(name) % len(COLORS)]
            axes.barh(place, result.speedup, color=color, xerr=error, capsize=3, ecolor=INK)
        axes.set_yticks(
            range(len(rows)), [f"{_short(name)}, b{result.batch}, T={result.temperature:g}" for name, result in rows]
        )
        axes.axvline(1, color=INK, linewidth=1, linestyle=":")
        axes.invert_yaxis()
        axes.set(xlabel="speed-up over plain decoding")

    return _svg(title, fill, height=1.0 + 0.26 * len(rows))


def _short(label: str) -> str:
    """The end of a long name, such as a path's, tells most."""
    return label if len(label) <= LONGEST_LABEL else "…" + label[1 - LONGEST_LABEL :]


def _svg(title: str, fill: Callable[[Axes], None], *, has_legend: bool = False, height: float = 3.0) -> str:
    """Draw on fresh axes: the same input gives the same bytes, and INK follows the page's own text colour.

    Raises ConfigError when matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing the report needs matplotlib: pip install paceline[plots]") from error
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
        axes = figure.subplots()
        fill(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.15, color=INK)
        axes.set_axisbelow(True)
        if has_legend:
            figure.legend(loc="outside lower center", ncols=2, frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return _inline(out.getvalue(), title)


def _inline(document: str, title: str) -> str:
    """The <svg> element alone, its ids made unique to this plot, so that several stand in one page."""
    element = document[document.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r"<!--.*?-->", "", element, flags=re.DOTALL)
    own = "p" + hashlib.sha256(f"{title}{element}".encode()).hexdigest()[:8] + "-"
    element = re.sub(r'\b(id="|href="#|url\(#)', lambda found: found.group(1) + own, element)
    element = re.sub(r' (width|height)="[\d.]+pt"', "", element, count=2)
    element = element.replace(INK, "currentColor")
    return element.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1).strip()
