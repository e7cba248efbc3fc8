"""Reports from the Jinja templates in `templates/`: text, Markdown, HTML pages and the animated picture of `paceline compare`;
and the figures in them, SVG elements that are drawn when matplotlib is installed.

Whatever a model or a user wrote is escaped in HTML and SVG, and control characters, which no page can hold, are replaced.
"""

from __future__ import annotations

import functools
import hashlib
import html
import io
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from paceline.errors import ConfigError, needing
from paceline.report.statistics import Spread
from paceline.report.style import look
from paceline.report.tables import block, printable
from paceline.runs.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Plot = tuple[str, str]
"""Title and SVG element; the element is "" when there is nothing to draw."""
COLORS = ("#3b82c4", "#d55e00", "#0a9a72", "#b05fa5", "#a87b00", "#7f7f7f")
"""Told apart by colour-blind eyes, and at least 3:1 on a white page as on a dark one."""
INK = "#010203"
"""Stands for the page's text colour while matplotlib draws."""
WIDTH_INCHES = 4.4
"""302 points: on a phone's 390 pixels the text keeps its size."""
FEW_POINTS = 30
LONGEST_LABEL = 20
INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "legend.labelcolor")
STYLE: Any = {"svg.hashsalt": "paceline", "svg.fonttype": "none", "text.parse_math": False, "font.size": 9}
STYLE |= dict.fromkeys(INKED, INK)


def render(template: str, **values: Any) -> str:
    """The text of `templates/<template>.j2`."""
    return _environment().get_template(template + ".j2").render(values)


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=lambda name: name is not None and name.endswith((".html.j2", ".svg.j2")),
        finalize=lambda value: value if hasattr(value, "__html__") else printable(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["number"] = number
    made.globals["block"] = block
    made.globals["look"] = lambda: Markup(look())
    made.filters["cell"] = lambda text: text.replace("|", "\\|").replace("\n", " ")
    return made


def number(value: Any, digits: int = 2) -> str:
    """With commas; a dash for what is none."""
    return "-" if not isinstance(value, int | float) else f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def write_load_report(run: RunFolder, draw: Callable[[], list[Plot]], **values: Any) -> str | None:
    """report.md and report.html of a server under load; returns a notice when the page had to be left out.

    `draw` makes its plots; `values`: title, verdict, about, note, figures, listed and settings, as `load.html.j2` shows them.
    """
    run.write("report.md", render("load.md", **values))
    try:
        drawn = draw()
    except ConfigError as error:
        return f"no report.html: {error}"
    run.write("report.html", render("load.html", drawn=drawn, **values))
    return None


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot. `is_faint` draws it thin and dashed."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    is_faint: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on the x axis where something happened."""

    x: float
    label: str


def curves(
    title: str,
    series: list[Series],
    *,
    xlabel: str,
    ylabel: str,
    ylim: tuple[float, float | None] | None = None,
    marks: Sequence[Mark] = (),
) -> Plot:
    """Lines over a common axis; a series without a point is left out. `marks` are dotted lines with their labels."""
    shown = [each for each in series if len(each.x)]

    def fill(axes: Axes) -> None:
        from matplotlib.ticker import EngFormatter, MaxNLocator

        for each in shown:
            marker = "o" if len(each.x) <= FEW_POINTS else ""  # each for itself: a line of one point would not be seen
            style: dict[str, Any] = {"linestyle": "--", "linewidth": 1.0} if each.is_faint else {"linewidth": 1.6}
            color = COLORS[each.color % len(COLORS)]
            axes.plot(each.x, each.y, label=short(each.label), color=color, marker=marker, markersize=3, **style)
        axes.set(xlabel=xlabel, ylabel=ylabel, ylim=ylim)
        for mark in marks:
            axes.axvline(mark.x, color=INK, linewidth=1, linestyle=":")
            axes.text(mark.x, 0.98, f" {mark.label}", rotation=90, va="top", fontsize=7, transform=axes.get_xaxis_transform())
        places = [float(place) for each in shown for place in each.x]
        if max(places, default=0) >= 1000 or all(place.is_integer() for place in places):
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))

    return _plot(title, fill, len(shown))


@dataclass(frozen=True, slots=True)
class LoadPlot:
    """A quantity of a server over its load."""

    title: str
    ylabel: str
    """Of times their unit: s or ms."""
    take: Callable[[Any], Spread | float | None]
    """From a record; of a `Spread` of seconds the median is drawn, and p99 faint."""

    def values(self, record: Any) -> dict[str, float | None]:
        """What is added to the contender's name -> the value there."""
        found = self.take(record)
        if not isinstance(found, Spread):
            return {"": found}
        scale = 1e3 if self.ylabel == "ms" else 1.0
        return {name: None if value is None else scale * value for name, value in ((" p50", found.p50), (" p99", found.p99))}


LOAD_PLOTS = (
    LoadPlot("Output", "tokens/s", lambda each: each.tokens_per_s),
    LoadPlot("Time to the first token", "ms", lambda each: each.first_token),
    LoadPlot("Time between tokens", "ms", lambda each: each.inter_token),
)


def load_plots(plots: Sequence[LoadPlot], found: Sequence[tuple[float | None, int | None, str, Any]]) -> list[Plot]:
    """A line for each contender; `found`: records, each after its rate or its number in flight, and its contender's name."""
    made = []
    flying = [(float(flight), name, record) for _, flight, name, record in found if flight]
    coming = [(rate, name, record) for rate, _, name, record in found if rate]
    for xlabel, own in (("requests in flight", flying), ("requests per second", coming)):
        own.sort(key=lambda each: each[0])
        contenders = list(dict.fromkeys(name for _, name, _ in own))
        for plot in plots:
            lines: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
            for x, name, record in own:
                for kind, y in plot.values(record).items():
                    if y is not None:
                        lines[name, kind].append((x, y))
            series = [
                Series(name + kind, [x for x, _ in points], [y for _, y in points], contenders.index(name), kind == " p99")
                for (name, kind), points in lines.items()
            ]
            title = f"{plot.title}, by {xlabel}"
            made.append(curves(title, series, xlabel=xlabel, ylabel=plot.ylabel, ylim=(0, None)))
    return made


def bars(
    title: str,
    groups: Sequence[tuple[str, Sequence[float]]],
    *,
    xlabel: str,
    ylabel: str,
    first: int = 0,
    ylim: tuple[float, float] | None = None,
) -> Plot:
    """Bars side by side, one colour a group; their places count from `first`. Bars of a place stand around its tick."""
    shown = [(label, values) for label, values in groups if len(values)]

    def fill(axes: Axes) -> None:
        width = 0.8 / len(shown)
        for index, (label, values) in enumerate(shown):
            places = [first + place + width * _offset(shown, index, place) for place in range(len(values))]
            axes.bar(places, values, width, label=short(label), color=COLORS[index % len(COLORS)])
        axes.set_xticks(range(first, first + max(len(values) for _, values in shown)))
        axes.set(xlabel=xlabel, ylabel=ylabel, ylim=ylim)

    return _plot(title, fill, len(shown))


def _offset(groups: Sequence[tuple[str, Sequence[float]]], index: int, place: int) -> float:
    """Where the bar of group `index` stands at a place, in bar widths from the tick; groups without a bar take no room."""
    drawn = [each for each, (_, values) in enumerate(groups) if place < len(values) and values[place]]
    return drawn.index(index) - (len(drawn) - 1) / 2 if index in drawn else 0.0


def ranges(
    title: str, rows: Sequence[tuple[str, float, Sequence[float | None], int]], xlabel: str, mark: float | None = None
) -> Plot:
    """One below the other, of each row its label, value, interval and colour: a bar with whiskers. A dotted line at `mark`."""

    def fill(axes: Axes) -> None:
        for place, (_, value, (low, high), color) in enumerate(rows):
            error = None if low is None or high is None else [[max(value - low, 0)], [max(high - value, 0)]]
            axes.barh(place, value, color=COLORS[color % len(COLORS)], xerr=error, capsize=3, ecolor=INK)
        axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
        if mark is not None:
            axes.axvline(mark, color=INK, linewidth=1, linestyle=":")
        axes.invert_yaxis()
        axes.set(xlabel=xlabel)

    return _plot(title, fill, min(len(rows), 1), height=1.0 + 0.26 * len(rows))


def stacked(title: str, rows: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], xlabel: str) -> Plot:
    """One bar a row, made of parts that follow one another; `names` of the parts, in their order. A part that is nowhere more
    than nothing is left out, and so is what is less than nothing."""
    shown = [place for place in range(len(names)) if any(values[place] > 0 for _, values in rows)]

    def fill(axes: Axes) -> None:
        for place in shown:
            widths = [max(values[place], 0.0) for _, values in rows]
            lefts = [sum(max(value, 0.0) for value in values[:place]) for _, values in rows]
            again = place >= len(COLORS)  # told apart by stripes where colours run out
            axes.barh(
                range(len(rows)),
                widths,
                left=lefts,
                label=short(names[place]),
                color=COLORS[place % len(COLORS)],
                hatch="///" if again else "",
                edgecolor=INK,
                linewidth=0.4,
            )
        axes.set_yticks(range(len(rows)), [label for label, _ in rows])
        axes.invert_yaxis()
        axes.set(xlabel=xlabel)

    return _plot(title, fill, len(shown) if rows else 0, height=1.6 + 0.26 * len(rows))


def short(label: str) -> str:
    """The end of a long name, such as a path's, tells most."""
    return label if len(label) <= LONGEST_LABEL else "…" + label[1 - LONGEST_LABEL :]


def _plot(title: str, fill: Callable[[Axes], None], num_series: int, height: float = 3.0) -> Plot:
    """In the page's text colour, the same bytes for the same input. Raises ConfigError when matplotlib is missing."""
    if not num_series:
        return title, ""
    with needing(ConfigError, "drawing the report needs matplotlib: pip install paceline[plots]"):
        import matplotlib
        from matplotlib.figure import Figure
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
        axes = figure.subplots()
        fill(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.15, color=INK)
        axes.set_axisbelow(True)
        if num_series > 1:
            figure.legend(loc="outside lower center", ncols=2, frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return title, _inline(out.getvalue(), title)


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
