"""A live chart of the acceptance length while a drafter is trained, for experiments/own.py.

    train(config, progress=ChartProgress(config.out, before))

The values are in the training's metrics.jsonl: held-out prompts that the engine served with the weights of that step.
In a terminal the chart is drawn again after each step; elsewhere each measurement is one line in plain ASCII.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from paceline import LLM
from paceline.commands.shared import TerminalProgress, introduce
from paceline.report.tables import Advance, block
from paceline.runs.folder import RunFolder, append_lines
from paceline.train.plan.stored_plan import stored_plan

HEIGHT, WIDTH = 9, 60
"""Size of the chart, in characters, without its axes."""
LEVELS, ASCII = " ▁▂▃▄▅▆▇█", " #"
"""Characters of a chart's cell, from empty to full."""
LEAST_TOP = 4.0
"""Smallest acceptance length at the upper edge of the chart."""


class Point(NamedTuple):
    """An acceptance length that was measured during a training."""

    seconds: float
    """Seconds of training steps before the measurement."""
    step: int
    length: float


def points_of(run: RunFolder) -> list[Point]:
    """Return the acceptance lengths that a training run has logged, including those before an interruption."""
    served = [line for line in run.metrics() if "served" in line]
    return [Point(line["seconds"], line["step"], line["served"]["tokens_per_round"]) for line in served]


def chart(points: Sequence[Point], end_s: float, levels: str = LEVELS) -> str:
    """Draw the acceptance length against the seconds of training, as filled columns up to the newest point.

    `points`: at least one, in order. `end_s`: seconds at the right edge. `levels`: characters of a cell, from empty to
    full. The lower edge is 1, plain decoding.
    """
    top = max(LEAST_TOP, *(math.ceil(point.length) for point in points))
    columns = []
    for column in range(WIDTH):
        begin_s, column_end_s = end_s * column / WIDTH, end_s * (column + 1) / WIDTH
        newest = next((each for each in reversed(points) if each.seconds < column_end_s), points[-1])
        columns.append(HEIGHT * (newest.length - 1.0) / (top - 1.0) if begin_s <= points[-1].seconds else 0.0)
    rows = []
    for row in reversed(range(HEIGHT)):
        shares = (min(1.0, max(0.0, height - row)) for height in columns)
        cells = "".join(levels[round(share * (len(levels) - 1))] for share in shares).rstrip()
        rows.append(f"{f'{top:.1f}' if row == HEIGHT - 1 else '':>5} |{cells}")
    middle, right = f"{end_s / 2:.0f} s", f"{end_s:.0f} s"
    labels = f"0 s{middle:>{WIDTH // 2 - 2}}{right:>{WIDTH - WIDTH // 2 - 1}}"
    return "\n".join([*rows, f"{'1.0':>5} +{'-' * WIDTH}", f"{'':6} {labels}"])


def caption(points: Sequence[Point]) -> str:
    """Describe the newest point, compared with the first one, which was measured before training."""
    first, newest = points[0], points[-1]
    return (
        f"acceptance length {newest.length:.2f} after {newest.seconds:.0f} s ({newest.step} steps); "
        f"{first.length:.2f} before training"
    )


class ChartProgress(TerminalProgress):
    """Shows the chart during the training steps, and progress bars for all other stages. Messages go to log.jsonl, in
    the parent folder of the run; notes and warnings are also printed."""

    def __init__(self, run: Path, before: float) -> None:
        """`run`: folder of the training. `before`: acceptance length before training."""
        self._run, self._began = RunFolder(run), time.monotonic()
        self._points = [Point(0.0, 0, before)]
        self._num_printed = 0
        self._console = Console(stderr=True)

    def say(self, text: str) -> None:
        line = {"seconds": round(time.monotonic() - self._began, 2), "message": text}
        append_lines(self._run.path.parent / "log.jsonl", [line])
        if text.startswith(("note:", "warning:")):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def loaded(self, llm: LLM) -> None:
        self.say(introduce(llm))

    @contextlib.contextmanager
    def bar(self, what: str, total: int) -> Iterator[Advance]:
        self.say(f"{what} begins")
        if what != "training":
            with super().bar(what, total) as advance:
                yield advance
        elif self._console.is_terminal:
            with Live(console=self._console, auto_refresh=False) as live:
                yield lambda text, share=None: self._draw(live, text)
        else:
            self._print_points()
            yield lambda text, share=None: self._print_points()

    def _read_points(self) -> None:
        self._points[1:] = points_of(self._run)

    def _end_s(self) -> float:
        """Return the planned seconds of training steps; without a plan, those of the newest point."""
        minutes = (stored_plan(self._run.path) or {}).get("values", {}).get("loop.max_minutes")
        return 60.0 * minutes if minutes else max(1.0, self._points[-1].seconds)

    def _draw(self, live: Live, text: str) -> None:
        self._read_points()
        drawn = chart(self._points, self._end_s(), LEVELS if block() == LEVELS[-1] else ASCII)
        live.update(Text(f"{drawn}\n{caption(self._points)}\n{text}", no_wrap=True, overflow="crop"), refresh=True)

    def _print_points(self) -> None:
        self._read_points()
        for point in self._points[self._num_printed :]:
            mark = "#" * round(8 * (point.length - 1.0))
            line = f"{point.seconds:6.0f} s  step {point.step:<5} acceptance length {point.length:.2f}  {mark}"
            print(line.rstrip(), file=sys.stderr, flush=True)
        self._num_printed = len(self._points)
