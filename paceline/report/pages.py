"""Renders reports from the Jinja templates in `templates/` (text, Markdown, HTML, SVG) and draws plots as SVG with
matplotlib.

All values are escaped in HTML and SVG, and control characters are replaced, since model output and user input are
untrusted.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import html
import io
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, needing
from paceline.report.statistics import Spread
from paceline.report.tables import Table, block, printable
from paceline.runs.folder import RunFolder

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Plot = tuple[str, str]
"""Title and SVG element of a plot; the element is "" if there are no data."""
COLORS = ("#3b82c4", "#d55e00", "#0a9a72", "#b05fa5", "#a87b00", "#7f7f7f")
"""Colours of a plot's lines: distinguishable with colour blindness, contrast of at least 3:1 on white and dark
pages."""
LOOK = Path(__file__).with_name("style.css")
"""Style sheet of all HTML pages."""
INK = "#010203"
"""Placeholder colour in matplotlib's output; it is replaced by the page's text colour."""
WIDTH_INCHES = 4.4
"""Width of a plot in inches (302 points), so that text is not scaled down on a phone of 390 pixels."""
FEW_POINTS = 30
LONGEST_LABEL = 20
_COLORED = "text.color axes.edgecolor axes.labelcolor xtick.color ytick.color legend.labelcolor grid.color"
INKED = tuple(_COLORED.split())
STYLE: Any = {"svg.hashsalt": "paceline", "svg.fonttype": "none", "text.parse_math": False, "font.size": 9}


def look() -> str:
    """Return the text of the CSS style sheet that all HTML pages use."""
    return LOOK.read_text(encoding="utf-8")


def render(template: str, **values: Any) -> str:
    """Return the text of the Jinja template `templates/<template>.j2`, filled with `values`."""
    return _environment().get_template(template + ".j2").render(values)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=lambda name: name is not None and name.endswith((".html.j2", ".svg.j2")),
        finalize=lambda value: value if hasattr(value, "__html__") else printable(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = number
    environment.globals["block"] = block
    environment.globals["look"] = lambda: Markup(look())
    environment.filters["cell"] = lambda text: text.replace("|", "\\|").replace("\n", " ")
    return environment


def number(value: Any, digits: int = 2) -> str:
    """Format a number with thousands separators, floats with `digits` decimals. Other values become a dash."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.{digits}f}" if isinstance(value, float) else "-"


Block = str | Table | list[str]
"""Part of a report: a paragraph (or a Markdown heading), a table, or a list of sentences."""


def markdown(title: str, *blocks: Block) -> str:
    """Return a report in Markdown, with `title` as its heading. Each block is a paragraph, a table or a list of
    sentences. An empty list becomes the text "None."."""
    texts = [f"# {title}"]
    for part in blocks:
        if isinstance(part, list):
            texts.append("\n".join(f"- {sentence}" for sentence in part) or "None.")
        else:
            texts.append(part if isinstance(part, str) else part.markdown())
    return printable("\n\n".join(texts)) + "\n"


def write_report(
    run: RunFolder,
    draw: Callable[[], list[Plot]],
    title: str,
    verdict: str,
    sections: dict[str, list[Block]],
    **values: Any,
) -> str | None:
    """Write report.md and report.html into the run folder. Returns a notice if the plots could not be drawn, else None.
    - `draw`: function that returns the plots.
    - `verdict`: text below the title.
    - `sections`: heading -> blocks, as for `markdown`.
    - `values`: inputs of report.html alone: `tone` (colour of the verdict), `explained` (topics, such as "load", whose
      terms the page explains), `settings` ((name, value) pairs), and optionally `texts` ((summary, text) pairs, such as
      answers)."""
    drawn, notice = [], None
    blocks = [part for heading, parts in sections.items() if parts for part in (f"## {heading}", *parts)]
    run.write("report.md", markdown(title, verdict, *blocks))
    try:
        drawn = draw()
    except ConfigError as error:
        notice = f"no plots in report.html: {error}"
    page = render("report.html", drawn=drawn, title=title, verdict=verdict, sections=sections, **values)
    run.write("report.html", page)
    return notice


def write_load_report(
    run: RunFolder,
    draw: Callable[[], list[Plot]],
    *,
    about: str,
    note: str,
    figures: Table,
    listed: dict[str, list[str]],
    **values: Any,
) -> str | None:
    """Write report.md and report.html about a server under load, measured or simulated. `about`: first paragraph.
    `figures`: table of measured values. `note`: paragraph that explains its columns. `listed`: further sections, as
    heading -> sentences. `draw`, `values` (title, verdict, tone, settings) and the returned notice: as for
    `write_report`."""
    sections: dict[str, list[Block]] = {"Under load": [about] if about else [], "Figures": [note, figures]}
    sections |= {heading: [sentences] for heading, sentences in listed.items()}
    return write_report(run, draw, sections=sections, explained=["load"], **values)


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot. `color`: index in COLORS. `is_faint`: True draws a thin, dashed line."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    is_faint: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled vertical line in a plot, such as the time of an event."""

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
    """Plot lines over a common x axis; a series without data is left out. `marks` become dotted vertical lines."""
    shown = [line for line in series if len(line.x)]

    def fill(axes: Axes) -> None:
        from matplotlib.ticker import EngFormatter, MaxNLocator

        for line in shown:
            marker = "o" if len(line.x) <= FEW_POINTS else ""  # without one, a line of one point would be invisible
            style: dict[str, Any] = {"linestyle": "--", "linewidth": 1.0} if line.is_faint else {"linewidth": 1.6}
            color = COLORS[line.color % len(COLORS)]
            axes.plot(line.x, line.y, label=short(line.label), color=color, marker=marker, markersize=3, **style)
        axes.set(xlabel=xlabel, ylabel=ylabel, ylim=ylim)
        for mark in marks:
            axes.axvline(mark.x, color=INK, linewidth=1, linestyle=":")
            axes.text(
                mark.x, 0.98, f" {mark.label}", rotation=90, va="top", fontsize=7, transform=axes.get_xaxis_transform()
            )
        places = [float(place) for line in shown for place in line.x]
        if max(places, default=0) >= 1000 or all(place.is_integer() for place in places):
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))

    return _plot(title, fill, len(shown))


@dataclass(frozen=True, slots=True)
class LoadPlot:
    """Defines a plot of one quantity of a server, such as latency (y axis), over the server's load (x axis)."""

    title: str
    ylabel: str
    """Label of the y axis; for a `Spread` (percentiles of seconds) it is the unit: s or ms."""
    take: Callable[[Any], Spread | float | None]
    """Returns the quantity of a record. A `Spread` of seconds is plotted as its median, with p99 as a faint line."""

    def values(self, record: Any) -> dict[str, float | None]:
        """Return the y values of one measurement, in the axis's unit. The keys are appended to the labels of the plot's
        lines. A `Spread` (percentiles) has two values: " p50" -> median and " p99" -> 99th percentile. Any other
        quantity has one, with the key "". `record`: the measurement, an object that `take` reads."""
        quantity = self.take(record)
        if not isinstance(quantity, Spread):
            return {"": quantity}
        scale = 1e3 if self.ylabel == "ms" else 1.0
        shown = {" p50": quantity.p50, " p99": quantity.p99}
        return {name: None if value is None else scale * value for name, value in shown.items()}


LOAD_PLOTS = (
    LoadPlot("Output", "tokens/s", lambda record: record.tokens_per_s),
    LoadPlot("Time to the first token", "ms", lambda record: record.first_token),
    LoadPlot("Time between tokens", "ms", lambda record: record.inter_token),
)


def load_plots(plots: Sequence[LoadPlot], records: Sequence[tuple[float | None, int | None, str, Any]]) -> list[Plot]:
    """Return two plots of each quantity: over requests in flight and over requests per second. `records`: one tuple for
    each measurement: (requests per second or None, requests in flight or None, name of the server or setting, object
    that `LoadPlot.take` reads). The measurements with one name form a line. A plot leaves out measurements without its
    x value."""
    drawn = []
    by_flight = [(float(in_flight), name, record) for _, in_flight, name, record in records if in_flight]
    by_rate = [(rate, name, record) for rate, _, name, record in records if rate]
    for xlabel, points in (("requests in flight", by_flight), ("requests per second", by_rate)):
        points.sort(key=lambda point: point[0])
        contenders = list(dict.fromkeys(name for _, name, _ in points))
        for plot in plots:
            lines: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
            for x, name, record in points:
                for kind, y in plot.values(record).items():
                    if y is not None:
                        lines[name, kind].append((x, y))
            series = [
                Series(name + kind, [x for x, _ in xy], [y for _, y in xy], contenders.index(name), kind == " p99")
                for (name, kind), xy in lines.items()
            ]
            title = f"{plot.title}, by {xlabel}"
            drawn.append(curves(title, series, xlabel=xlabel, ylabel=plot.ylabel, ylim=(0, None)))
    return drawn


def bars(
    title: str,
    groups: Sequence[tuple[str, Sequence[float]]],
    *,
    xlabel: str,
    ylabel: str,
    first: int = 0,
    ylim: tuple[float, float] | None = None,
) -> Plot:
    """Plot several series of bars next to each other. `groups`: (label, values) of each series. Value i of every series
    is at x = `first` + i."""
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
    """Return the offset of a bar from its tick, in bar widths; groups without a bar at this tick take no space."""
    present = [other for other, (_, values) in enumerate(groups) if place < len(values) and values[place]]
    return present.index(index) - (len(present) - 1) / 2 if index in present else 0.0


def ranges(
    title: str, rows: Sequence[tuple[str, float, Sequence[float | None], int]], xlabel: str, mark: float | None = None
) -> Plot:
    """Plot horizontal bars with error bars, one per row: (label, value, (low, high) of its interval, index in COLORS).
    `mark`: x value of a dotted vertical line."""

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
    """Plot one stacked bar per row (label, values). `names`: labels of the parts. Negative values count as 0; a part
    that is 0 in all rows is left out."""
    shown = [place for place in range(len(names)) if any(values[place] > 0 for _, values in rows)]

    def fill(axes: Axes) -> None:
        for place in shown:
            widths = [max(values[place], 0.0) for _, values in rows]
            lefts = [sum(max(value, 0.0) for value in values[:place]) for _, values in rows]
            again = place >= len(COLORS)  # hatched if all colours are used
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
    """Return a label, cut to "…" and its last 19 characters if it is longer than 20: a path's end is the most
    specific."""
    return label if len(label) <= LONGEST_LABEL else "…" + label[1 - LONGEST_LABEL :]


@contextlib.contextmanager
def new_figure(width: float, height: float, ink: str = "black") -> Iterator[Figure]:
    """Context manager that yields an empty matplotlib figure; fill and save it inside the block. `width`, `height`:
    inches. `ink`: colour of text and axes. Equal input gives equal SVG bytes. Raises ConfigError without matplotlib."""
    with needing(ConfigError, "drawing needs matplotlib: pip install 'paceline[plots]'"):
        import matplotlib
        from matplotlib.figure import Figure
    with matplotlib.rc_context(STYLE | dict.fromkeys(INKED, ink)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield Figure(figsize=(width, height), layout="constrained")


def svg_of(figure: Figure, *, transparent: bool = False) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=transparent, metadata={"Date": None})
    return out.getvalue()


def write_png(figure: Figure, path: Path, dpi: int) -> None:
    """Write the figure as a PNG file; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=dpi, metadata={"Software": None})


def plain_axes(axes: Axes) -> None:
    """Remove the upper and right border of the axes, and add a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.15)
    axes.set_axisbelow(True)


def _plot(title: str, fill: Callable[[Axes], None], num_series: int, height: float = 3.0) -> Plot:
    """Draw a plot in the page's text colour."""
    if not num_series:
        return title, ""
    with new_figure(WIDTH_INCHES, height, INK) as figure:
        axes = figure.subplots()
        fill(axes)
        plain_axes(axes)
        if num_series > 1:
            figure.legend(loc="outside lower center", ncols=2, frameon=False)
        return title, _inline(svg_of(figure, transparent=True), title)


def _inline(document: str, title: str) -> str:
    """Return the <svg> element alone, with ids unique to this plot."""
    element = document[document.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r"<!--.*?-->", "", element, flags=re.DOTALL)
    prefix = "p" + hashlib.sha256(f"{title}{element}".encode()).hexdigest()[:8] + "-"
    element = re.sub(r'\b(id="|href="#|url\(#)', lambda match: match.group(1) + prefix, element)
    element = re.sub(r' (width|height)="[\d.]+pt"', "", element, count=2)
    element = element.replace(INK, "currentColor")
    return element.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1).strip()
