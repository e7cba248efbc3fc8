"""Recorded token times as an animated SVG for a README: two columns that fill as the tokens came, over and over.

Plain CSS animation, no script, nothing loaded: it moves inside an <img>. Where motion is unwelcome it stands still, complete.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from paceline.bench.timing import TimedAnswer, Timing
from paceline.errors import ConfigError
from paceline.tables import printable

WIDTH, MARGIN, GAP = 880, 24, 32
COLUMN = (WIDTH - 2 * MARGIN - GAP) / 2
CELL, LINE, FONT = 7.2, 19, 12
"""Of a monospaced letter, in pixels; every piece of text is stretched to whole cells, whatever font there is."""
CELLS = int(COLUMN / CELL)
TOP, CHART = 118, 34
MOST_LINES = 26
MOST_TICKS = 90
"""Steps of the clock at most; none shorter than 0.1 s of the replay."""
HOLD_S = 3.0
"""The end stands still for so long before it begins again."""
FLASH_S = 0.25
STYLE = """
svg { --paper: #fcfcfb; --ink: #1b1e22; --soft: #59606a; --line: #dcdfe2; --edge: #878e98; --accent: #0a6b57; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #141618; --ink: #e8eaec; --soft: #a3abb5; --line: #2f3438; --edge: #757d87; --accent: #62d2b6; }
}
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft); white-space: pre; }
.mono { font: FONTpx ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: var(--ink); }
.head { font-size: 20px; font-weight: 650; fill: var(--ink); }
.name, .figure { font-weight: 650; fill: var(--ink); }
.figure { font-variant-numeric: tabular-nums; }
.kept { fill: var(--accent); }
text.kept { text-decoration: underline; }
rect.own { fill: var(--edge); }
.r { animation: LOOPs step-end infinite; stroke-width: .7px; }
.r rect { stroke: none; }
.clock { transform: translateY(ENDpx); animation: clock LOOPs infinite; }
@media (prefers-reduced-motion: reduce) { * { animation: none !important; } }
"""


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
    end_s = max(side.total_s for side in sides)
    loop_s = end_s / speed + HOLD_S
    laid_out = [list(runs(side)) for side in sides]
    num_lines = min(max((run.line for side in laid_out for run in side), default=0) + 1, MOST_LINES)
    height = TOP + CHART + 18 + num_lines * LINE + 44
    tick_s = max(0.1 * speed, end_s / MOST_TICKS)
    num_ticks = int(end_s / tick_s) + 1
    style = STYLE.replace("FONT", str(FONT)).replace("LOOP", f"{loop_s:.2f}").replace("END", str(-num_ticks * LINE))
    frames = [_clock_frames(num_ticks, end_s / speed / loop_s)]
    body = []
    for number, (side, own) in enumerate(zip(sides, laid_out, strict=True)):
        frames += _frames(side, "ab"[number], speed, loop_s)
        left = MARGIN + number * (COLUMN + GAP)
        body.append(
            _column(side, [run for run in own if run.line < MOST_LINES], "ab"[number], left, end_s, max(map(_tallest, sides)))
        )
        if max((run.line for run in own), default=0) >= MOST_LINES:
            body.append(_text(left, TOP + CHART + 18 + num_lines * LINE, "and so on", "soft"))
    pace = "" if speed == 1 else f", shown at {speed:g}x speed"
    about = f"{timing.model}, drafter {timing.on.drafter}, {timing.dtype}, {timing.machine or timing.device}{pace}"
    said = f"The same prompt with speculation off and on: {timing.verdict}. {about}."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'role="img" aria-label="{_escaped(said)}" xml:space="preserve">',
            f"<style>{style}{''.join(frames)}</style>",
            f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="12" fill="var(--paper)" stroke="var(--line)"/>',
            _text(MARGIN, 40, timing.verdict, "head"),
            _text(MARGIN, 62, about, "soft"),
            *_clock(sides, tick_s, num_ticks),
            *body,
            _legend(height - 18),
            "</svg>\n",
        ]
    )


def check_speed(speed: float | None) -> None:
    """Raises ConfigError."""
    if speed is not None and not 0.05 <= speed <= 20:
        raise ConfigError(f"--svg-speed must be between 0.05 and 20, not {speed:g}")


def runs(side: TimedAnswer) -> Iterator[Run]:
    """The text in lines of CELLS cells, broken between words where it can be."""
    letters = [(letter, token.round, token.is_drafted) for token in side.tokens for letter in _letters(token.text)]
    line = at = 0
    while at < len(letters):
        end = _line_end(letters, at)
        cell = 0
        for (number, is_drafted), group in groupby(letters[at:end], key=lambda letter: letter[1:]):
            text = "".join(letter for letter, _, _ in group)
            width = sum(map(_cells, text))
            shown = text.strip()
            if shown:
                lead = sum(map(_cells, text[: len(text) - len(text.lstrip())]))
                yield Run(line, cell + lead, shown, sum(map(_cells, shown)), number, is_drafted)
            cell += width
        at = end + (end < len(letters) and letters[end][0] == "\n")
        line += 1


def _letters(text: str) -> str:
    return printable(text.replace("\r", "").replace("\t", "    "))


def _line_end(letters: list[tuple[str, int, bool]], begin: int) -> int:
    """Index after the last letter of the line that begins here."""
    width, space = 0, None
    for at in range(begin, len(letters)):
        letter = letters[at][0]
        if letter == "\n":
            return at
        width += _cells(letter)
        if width > CELLS and letter != " ":
            return space if space is not None else at
        if letter == " ":
            space = at + 1
    return len(letters)


def _cells(letter: str) -> int:
    return 0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _column(side: TimedAnswer, shown: list[Run], prefix: str, left: float, end_s: float, tallest: int) -> str:
    """Name, a bar for each round, and the text; everything of a round in one group, which appears at its time."""
    parts = [_text(left, TOP - 10, "Speculation off" if prefix == "a" else "Speculation on", "name")]
    base, unit = TOP + CHART, CHART / tallest
    parts.append(f'<rect x="{left}" y="{base}" width="{COLUMN}" height="1" class="own"/>')
    for number, group in groupby(side.tokens, key=lambda token: token.round):
        tokens = list(group)
        kept = sum(token.is_drafted for token in tokens)
        own = len(tokens) - kept
        x = left + (COLUMN - 3) * tokens[0].at_s / end_s
        bars = (
            f'<rect x="{x:.1f}" y="{base - unit * own:.1f}" width="2.4" height="{unit * own:.1f}" class="own"/>' if own else ""
        )
        if kept:
            bars += (
                f'<rect x="{x:.1f}" y="{base - unit * (own + kept):.1f}" width="2.4" height="{unit * kept:.1f}" class="kept"/>'
            )
        texts = "".join(_piece(run, left) for run in shown if run.round == number)
        parts.append(f'<g class="r {prefix}{number}">{bars}{texts}</g>')
    return "\n".join(parts)


def _piece(run: Run, left: float) -> str:
    place = f'x="{left + run.cell * CELL:.1f}" y="{TOP + CHART + 26 + run.line * LINE}" textLength="{run.width * CELL:.1f}"'
    return f'<text {place} class="mono{" kept" * run.is_drafted}">{_escaped(run.text)}</text>'


def _frames(side: TimedAnswer, prefix: str, speed: float, loop_s: float) -> list[str]:
    """A round is not there, lights up, stays."""
    made = []
    for number, group in groupby(side.tokens, key=lambda token: token.round):
        begin = 100 * next(group).at_s / speed / loop_s
        name = f"{prefix}{number}"
        made.append(
            f"@keyframes {name}{{0%{{opacity:0}}{begin:.2f}%{{opacity:1;stroke:var(--accent)}}"
            f"{begin + 100 * FLASH_S / loop_s:.2f}%,to{{opacity:1;stroke:none}}}}.{name}{{animation-name:{name}}}\n"
        )
    return made


def _clock_frames(num_ticks: int, share: float) -> str:
    end = f"transform:translateY({-num_ticks * LINE}px)"
    return (
        f"@keyframes clock{{0%{{transform:none;animation-timing-function:steps({num_ticks})}}{100 * share:.2f}%,to{{{end}}}}}\n"
    )


def _clock(sides: tuple[TimedAnswer, ...], tick_s: float, num_ticks: int) -> list[str]:
    """What each side has made at every tick, one below the other behind a window that is one line high."""
    lines = []
    for tick in range(num_ticks + 1):
        now_s = tick * tick_s
        for number, side in enumerate(sides):
            count = sum(token.at_s <= now_s for token in side.tokens) if tick < num_ticks else len(side.tokens)
            spent = min(now_s, side.total_s) if tick < num_ticks else side.total_s
            right = MARGIN + number * (COLUMN + GAP) + COLUMN
            said = f"{count} tokens, {spent:.2f} s, {count / spent if spent else 0:.0f} tokens/s"
            lines.append(f'<text x="{right}" y="{TOP - 10 + tick * LINE}" text-anchor="end" class="figure">{said}</text>')
    window = f'<clipPath id="window"><rect x="0" y="{TOP - 10 - LINE + 5}" width="{WIDTH}" height="{LINE}"/></clipPath>'
    return [window, '<g clip-path="url(#window)"><g class="clock">', *lines, "</g></g>"]


def _legend(y: float) -> str:
    return (
        f'<text x="{MARGIN}" y="{y}"><tspan class="kept" text-decoration="underline">drafted and kept</tspan>'
        "<tspan>     the target's own     bars: tokens of each round, when they came</tspan></text>"
    )


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{_escaped(text)}</text>'


def _tallest(side: TimedAnswer) -> int:
    return max(len(list(group)) for _, group in groupby(side.tokens, key=lambda token: token.round))


def _escaped(text: str) -> str:
    return html.escape(printable(text))
