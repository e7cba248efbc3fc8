"""The tables of `paceline simulate`, on stdout, or on stderr where stdout belongs to a JSON line."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.simulate.acceptance import Acceptance, tokens_per_round
from paceline.simulate.speedup import Prediction

BAR_WIDTH = 32
WIDE = 140
LEAST_SHARE = 0.005
"""Parts of the time below this are left out."""


def print_sweep(title: str, predictions: list[Prediction], to_stderr: bool) -> None:
    """A line for each batch."""
    columns = ("batch", "best draft", "speed-up", "tokens/round", "tokens/s", "plain tokens/s", "where a round's time goes")
    table = Table(*columns, box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for each in predictions:
        table.add_row(
            str(each.batch),
            str(each.best_draft_length),
            f"{each.speedup:.2f}x",
            f"{each.tokens_per_round:.2f}",
            _rate(each.tokens_per_s),
            _rate(each.plain_tokens_per_s),
            ", ".join(f"{part} {share:.0%}" for part, share in each.time_split.items() if share >= LEAST_SHARE),
        )
    _console(to_stderr).print(table)


def print_prediction(prediction: Prediction, acceptance: Acceptance, to_stderr: bool) -> None:
    """The curve as bars, and what more acceptance would buy."""
    highest = max(value for _, value in prediction.curve)
    table = Table("draft", "tokens/round", "speed-up", "", box=box.SIMPLE_HEAD)
    for length, value in prediction.curve:
        bar = "█" * max(round(BAR_WIDTH * value / highest), 0)
        mark = "  best" if length == prediction.best_draft_length else ""
        table.add_row(str(length), f"{tokens_per_round(acceptance, length):.2f}", f"{value:.2f}x", bar + mark)
    console = _console(to_stderr)
    console.print(table)
    for change in prediction.sensitivity:
        console.print(
            f"acceptance {100 * change.points:+3.0f} points: {change.speedup:.2f}x ({change.gain:+.1%}), "
            f"best draft {change.best_draft_length}"
        )


def _rate(tokens_per_s: float | None) -> str:
    return "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}"


def _console(to_stderr: bool) -> Console:
    console = Console(stderr=to_stderr, highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    return console
