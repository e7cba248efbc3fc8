"""Predicts token times for the pictures of `paceline compare`: two columns of text at predicted rates, without running
a model.

    costs = CostsConfig(model="Qwen3.5-122B-A10B", hardware="B200", precision="fp8", plain_rate=250.0, block=16)
    timing, warnings = predicted(costs, ChartConfig(acceptance="0.89"))
    write_whole(Path("columns.svg"), svg(timing))
    draw_png(timing, Path("columns.png"))

Times are those of one sequence of the batch, without prefill. Each round gives one token without drafts, or several
tokens by the acceptance curve. Accepted drafts are spread evenly over rounds instead of drawn at random
(`kept_drafts`), so that a short text also has the predicted rate. The calculator page computes the same numbers in its
third tab (`simulate/page/watch.js`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.bench.pages.timing import TimedAnswer, TimedToken, Timing, runs
from paceline.report.pages import new_figure, write_png
from paceline.simulate.answer import Setup, set_up
from paceline.simulate.calculator_page import passage
from paceline.simulate.config import ChartConfig, CostsConfig
from paceline.simulate.speedup import Load, parse_acceptance, predict

GOLDEN = 0.6180339887498949
"""Golden ratio minus 1. The fractional parts of its multiples are evenly distributed over 0 to 1."""
COLORS = {"ink": "#1b1e22", "soft": "#59606a", "kept": "#0a6b57"}
LINE, CELL = 0.19, 0.075
"""Size of text in the PNG, in inches: height of a line (LINE) and width of a character (CELL)."""


def kept_drafts(survival: Sequence[float], number: int) -> int:
    """Return how many drafts round `number` (from 1) of a simulated answer accepts. `survival[i]`: share of rounds
    whose first i + 1 drafts are accepted. Over many rounds the results have these shares. Nothing is drawn at random:
    equal arguments give an equal result."""
    threshold = (number * GOLDEN) % 1.0
    return sum(survived > threshold for survived in survival)


def token_times(survival: Sequence[float], first_s: float, round_s: float, count: int) -> list[tuple[float, int, bool]]:
    """Simulate when the `count` tokens of an answer are generated. Returns for each token (seconds since the start,
    number of its round, True for an accepted draft). The first token comes after `first_s` seconds in round 0; each
    later round takes `round_s` seconds. `survival[i]`: share of rounds whose first i + 1 drafts are accepted."""
    times = [(first_s, 0, False)]
    number = 0
    while len(times) < count:
        number += 1
        num_kept = kept_drafts(survival, number)
        times += [(first_s + number * round_s, number, place < num_kept) for place in range(num_kept + 1)]
    return times[:count]


def predicted(costs: CostsConfig, config: ChartConfig) -> tuple[Timing, list[str]]:
    """Predict when each token of a built-in sample text is generated, without drafts and with drafts; no model runs.
    Returns (these times, list of warnings, such as that the load does not fit into memory). `costs`: target, drafter
    and machine. `config`: batch size, context length, acceptance and longest draft. Raises PacelineError for invalid
    costs or acceptance."""
    load = Load(config.batch, config.context, config.max_draft)
    setup, acceptance = set_up(costs, [load]), parse_acceptance(config.acceptance)
    prediction, pieces = predict(setup.costs, acceptance, load), passage()
    survival = acceptance.survival(prediction.best_draft_length)
    sides = []
    for drafter, shares, round_s in (
        ("none", [], prediction.plain_round_s),
        ("predicted", survival, prediction.round_s),
    ):
        times = token_times(shares, prediction.plain_round_s, round_s, len(pieces))
        tokens = tuple(TimedToken(text, *time) for text, time in zip(pieces, times, strict=True))
        name = _drafts(prediction.best_draft_length, costs.block) if shares else drafter
        sides.append(TimedAnswer(name, tokens, lossless=not shares))
    plain, rate = 1.0 / prediction.plain_round_s, prediction.tokens_per_round / prediction.round_s
    per_sequence = "" if config.batch == 1 else f" for each of {config.batch} sequences"
    verdict = f"Predicted: {prediction.speedup:.2f}x, {plain:,.0f} to {rate:,.0f} tokens/s{per_sequence}"
    timing = Timing(
        prompt="",
        model=setup.shape.name if setup.shape else setup.title,
        device="simulated",
        dtype=setup.deployment.precisions.weights if setup.deployment else setup.kind,
        machine=_machine(setup),
        temperature=0.0,
        off=sides[0],
        on=sides[1],
        first_difference=None,
        predicted=f"{verdict}; no model ran",
    )
    return timing, setup.warnings


def _machine(setup: Setup) -> str:
    if setup.deployment is None:
        return setup.title
    number = setup.deployment.num_gpus
    overhead = f", {1e3 * setup.overhead.seconds:.1f} ms overhead" if setup.overhead else ""
    return (f"{number} x " if number > 1 else "") + setup.deployment.machine.name + overhead


def _drafts(length: int, block: int | None) -> str:
    return f"of {length} drafts" + (f" in blocks of {block}" if block and block > 1 else "")


def draw_png(timing: Timing, png: Path) -> None:
    """Write a PNG of two columns: the answer without and with speculation, each with its speed. Raises ConfigError if
    matplotlib is missing."""
    sides = [list(runs(side)) for side in (timing.off, timing.on)]
    num_lines = max(run.line for side in sides for run in side) + 1
    wide, high = 2 * 60 * CELL, (num_lines + 5) * LINE
    with new_figure(wide, high) as figure:

        def put(x: float, line: float, text: str, size: float = 8, color: str = "ink", **more: Any) -> None:
            figure.text(x / wide, 1 - (line + 1) * LINE / high, text, size=size, color=COLORS[color], **more)

        put(0.2, 0.3, timing.verdict, 12, weight="bold")
        put(0.2, 1.5, f"{timing.model}, drafter {timing.on.drafter}, {timing.dtype}, {timing.machine}", color="soft")
        for column, (name, side) in enumerate((("Speculation off", timing.off), ("Speculation on", timing.on))):
            left = 0.2 + column * wide / 2
            rate = f"{side.total_s:.2f} s, {side.tokens_per_s:.0f} tokens/s"
            put(left, 3, f"{name}: {len(side.tokens)} tokens, {rate}", weight="bold")
            for run in sides[column]:  # character by character, so that each is in its cell with any font
                for place, letter in enumerate(run.text):
                    color = "kept" if run.is_drafted else "ink"
                    put(left + (run.cell + place) * CELL, run.line + 4.3, letter, 8.5, color, family="monospace")
        write_png(figure, png, 160)
