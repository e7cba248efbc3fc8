"""Two columns of text that fill at predicted rates, as `paceline compare` draws them of recorded times: no model runs.

    costs = CostsConfig(model="Qwen3.5-122B-A10B", hardware="B200", precision="fp8", plain_rate=250.0, block=16)
    timing = predicted(costs, ChartConfig(acceptance="0.89"))
    write_whole(Path("columns.svg"), svg(timing))
    draw_png(timing, Path("columns.png"))

Times are those of one sequence of the batch: plainly a token a round, with drafts as many as the acceptance curve says, in
bursts. How many stand in a round is not drawn but spread evenly (`kept_drafts`), so that a short text has the predicted rate.
The calculator's third tab does the same, number for number (`simulate/page/watch.js`). Prefill is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.bench.pages.timing import TimedAnswer, TimedToken, Timing, runs
from paceline.errors import ConfigError, needing
from paceline.simulate.answer import Setup, set_up
from paceline.simulate.calculator import passage
from paceline.simulate.config import ChartConfig, CostsConfig
from paceline.simulate.speedup import Load, parse_acceptance, predict

GOLDEN = 0.6180339887498949
"""Its multiples, less their whole parts, are spread evenly over 0 to 1 however many there are."""
COLORS = {"ink": "#1b1e22", "soft": "#59606a", "kept": "#0a6b57"}
LINE, CELL = 0.19, 0.075
"""Inches of a line and of a letter in the PNG."""


def kept_drafts(survival: Sequence[float], number: int) -> int:
    """Drafts that stand in round `number`, counted from 1; `survival[i]`: share of rounds whose first i + 1 drafts stand."""
    share = (number * GOLDEN) % 1.0
    return sum(each > share for each in survival)


def token_times(survival: Sequence[float], first_s: float, round_s: float, count: int) -> list[tuple[float, int, bool]]:
    """(seconds, round, whether drafted) of `count` tokens: a first one after `first_s`, then rounds of `round_s`."""
    found = [(first_s, 0, False)]
    number = 0
    while len(found) < count:
        number += 1
        kept = kept_drafts(survival, number)
        found += [(first_s + number * round_s, number, place < kept) for place in range(kept + 1)]
    return found[:count]


def predicted(costs: CostsConfig, config: ChartConfig) -> Timing:
    """The passage at both rates. Raises ConfigError for costs without seconds or an acceptance that cannot be read."""
    load = Load(config.batch, config.context, config.max_draft)
    setup, acceptance = set_up(costs, [load]), parse_acceptance(config.acceptance)
    found, pieces = predict(setup.costs, acceptance, load), passage()
    survival = acceptance.survival(found.best_draft_length)
    sides = []
    for drafter, shares, round_s in (("none", [], found.plain_round_s), ("predicted", survival, found.round_s)):
        times = token_times(shares, found.plain_round_s, round_s, len(pieces))
        tokens = tuple(TimedToken(text, *time) for text, time in zip(pieces, times, strict=True))
        sides.append(
            TimedAnswer(_drafts(found.best_draft_length, costs.block) if shares else drafter, tokens, lossless=not shares)
        )
    plain, rate = 1.0 / found.plain_round_s, found.tokens_per_round / found.round_s
    each = "" if config.batch == 1 else f" for each of {config.batch} sequences"
    verdict = f"Predicted: {found.speedup:.2f}x, {plain:,.0f} to {rate:,.0f} tokens/s{each}"
    return Timing(
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


def _machine(setup: Setup) -> str:
    if setup.deployment is None:
        return setup.title
    number = setup.deployment.num_gpus
    overhead = f", {1e3 * setup.overhead.seconds:.1f} ms overhead" if setup.overhead else ""
    return (f"{number} x " if number > 1 else "") + setup.deployment.machine.name + overhead


def _drafts(length: int, block: int | None) -> str:
    return f"of {length} drafts" + (f" in blocks of {block}" if block and block > 1 else "")


def draw_png(timing: Timing, png: Path) -> None:
    """How the columns stand when both have ended, with what each took. Raises ConfigError when matplotlib is missing."""
    with needing(ConfigError, "drawing needs matplotlib: pip install 'paceline[plots]'"):
        import matplotlib
        from matplotlib.figure import Figure
    sides = [list(runs(side)) for side in (timing.off, timing.on)]
    num_lines = max(run.line for side in sides for run in side) + 1
    wide, high = 2 * 60 * CELL, (num_lines + 5) * LINE
    with matplotlib.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(wide, high))

        def put(x: float, line: float, text: str, size: float = 8, color: str = "ink", **more: Any) -> None:
            figure.text(x / wide, 1 - (line + 1) * LINE / high, text, size=size, color=COLORS[color], **more)

        put(0.2, 0.3, timing.verdict, 12, weight="bold")
        put(0.2, 1.5, f"{timing.model}, drafter {timing.on.drafter}, {timing.dtype}, {timing.machine}", color="soft")
        for column, (name, side) in enumerate((("Speculation off", timing.off), ("Speculation on", timing.on))):
            left = 0.2 + column * wide / 2
            put(
                left,
                3,
                f"{name}: {len(side.tokens)} tokens, {side.total_s:.2f} s, {side.tokens_per_s:.0f} tokens/s",
                weight="bold",
            )
            for run in sides[column]:  # letter by letter: whatever font there is, each stands in its cell
                for place, letter in enumerate(run.text):
                    kept = "kept" if run.is_drafted else "ink"
                    put(left + (run.cell + place) * CELL, run.line + 4.3, letter, 8.5, kept, family="monospace")
        png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, format="png", dpi=160, metadata={"Software": None})
