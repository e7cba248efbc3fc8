"""Recorded token times to look at: the page that replays them, and an animated SVG for a README.

The page is `templates/timing.html.j2` with the times put in; it needs no server and no network, what a model or a user wrote
travels as JSON and reaches it as text only, and its content security policy names the script's hash and lets nothing be loaded.
The SVG is two columns that fill as the tokens came, over and over: plain CSS animation, no script, so that it moves inside an
<img>. Where motion is unwelcome it stands still, complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from paceline.bench.pages import render
from paceline.bench.timing import TimedAnswer, Timing
from paceline.errors import ConfigError
from paceline.runlog import plain
from paceline.simulate.calculator import embedded, hash_of
from paceline.tables import printable

CELLS = 55
"""Monospaced letters that fit into a column of the template."""
MOST_LINES = 26
MOST_TICKS = 90
"""Steps of the clock at most; none shorter than 0.1 s of the replay."""
HOLD_S = 3.0
"""The end stands still for so long before it begins again."""


def page(timing: Timing) -> str:
    data = embedded(plain(timing) | {"verdict": timing.verdict, "speed": timing.usual_speed})
    return render("timing.html", title=f"{timing.model}: {timing.verdict}", data=Markup(data), hash_of=hash_of)


@dataclass(frozen=True, slots=True)
class Run:
    """A piece of one line that came in one round, drafted or not."""

    line: int
    cell: int
    text: str
    width: int
    """Cells."""
    round: int
    is_drafted: bool


def svg(timing: Timing, speed: float | None = None) -> str:
    """The whole picture, `speed` times as fast as it was; None: so that the eye can follow. Raises ConfigError."""
    check_speed(speed)
    speed = speed or timing.usual_speed
    sides = (timing.off, timing.on)
    laid_out = [list(runs(side)) for side in sides]
    rounds = [list(group) for side in sides for _, group in groupby(side.tokens, key=lambda token: token.round)]
    end_s = max(side.total_s for side in sides)
    tick_s = max(0.1 * speed, end_s / MOST_TICKS)
    num_ticks = int(end_s / tick_s) + 1
    pace = "" if speed == 1 else f", shown at {speed:g}x speed"
    return render(
        "timing.svg",
        sides=sides,
        runs=laid_out,
        tallest=max(map(len, rounds)),
        most_lines=MOST_LINES,
        num_lines=[max((run.line for run in own), default=0) + 1 for own in laid_out],
        end_s=end_s,
        speed=speed,
        loop_s=end_s / speed + HOLD_S,
        ticks=[[_said(side, tick * tick_s if tick < num_ticks else end_s) for side in sides] for tick in range(num_ticks + 1)],
        verdict=timing.verdict,
        about=f"{timing.model}, drafter {timing.on.drafter}, {timing.dtype}, {timing.machine or timing.device}{pace}",
    )


def _said(side: TimedAnswer, now_s: float) -> str:
    count, spent_s = sum(token.at_s <= now_s for token in side.tokens), min(now_s, side.total_s)
    return f"{count} tokens, {spent_s:.2f} s, {count / spent_s if spent_s else 0:.0f} tokens/s"


def check_speed(speed: float | None) -> None:
    """Raises ConfigError."""
    if speed is not None and not 0.05 <= speed <= 20:
        raise ConfigError(f"--svg-speed must be between 0.05 and 20, not {speed:g}")


def runs(side: TimedAnswer) -> Iterator[Run]:
    """The text in lines of CELLS cells, broken between words where it can be."""
    text = Text(overflow="fold")
    for (number, is_drafted), group in groupby(side.tokens, key=lambda token: (token.round, token.is_drafted)):
        letters = "".join(token.text for token in group).replace("\r", "").replace("\t", "    ")
        text.append(printable(letters), Style(meta={"round": number, "is_drafted": is_drafted}))
    for number, line in enumerate(text.wrap(Console(), CELLS)):
        for begin, end, style in line.spans:
            before, shown = line.plain[:begin], line.plain[begin:end]
            if shown.strip() and isinstance(style, Style):
                cell = cell_len(before + shown) - cell_len(shown.lstrip())
                yield Run(number, cell, shown.strip(), cell_len(shown.strip()), **style.meta)
