"""Draws the animated picture of `make own`: a drafter learns a workload, then drafts for a ticket that it never saw.

    make own
    python experiments/own_picture.py runs/own docs/own.svg

The curve is the run's own: acceptance length of held-out tickets over the seconds of training, drawn in LEARNING_S
seconds. Below it the model answers the first unseen ticket again: without drafts, with the drafter that training
started from, and with the trained one. Tokens appear at their recorded times after the first one, `--speed` times real
time; green text was drafted and accepted. The picture is CSS without script, so that it moves within an <img>; with
reduced motion it is static and complete.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from own import MAX_TOKENS, messages_of
from own_chart import Point, points_of

from paceline import LLM, SamplingParams
from paceline.bench.pages.timing import Run, TimedAnswer, record, runs
from paceline.data.prompts import read_prompts
from paceline.errors import PacelineError
from paceline.runs.folder import RunFolder
from paceline.simulate.files import read_json

LEARNING_S, HOLD_S = 5.0, 4.0
"""Seconds of the picture for the training, and for the finished answers."""
CELLS = 36
"""Characters in a line of a column."""


@dataclass(frozen=True, slots=True)
class Side:
    """One column: an answer with its times."""

    title: str
    answer: TimedAnswer
    runs: list[Run]
    rounds: list[tuple[int, float]]
    """Number of each round, and the second after the first token at which its tokens came."""

    @property
    def num_lines(self) -> int:
        return max(run.line for run in self.runs) + 1

    @property
    def total_s(self) -> float:
        return self.rounds[-1][1]

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first one: prefill is the same for all."""
        return (len(self.answer.tokens) - 1) / self.total_s


def side(title: str, answer: TimedAnswer) -> Side:
    first_s = answer.tokens[0].at_s
    rounds = [
        (number, next(group).at_s - first_s) for number, group in groupby(answer.tokens, lambda token: token.round)
    ]
    return Side(title, answer, list(runs(answer, CELLS)), rounds)


def picture(curve: list[Point], train_s: float, sides: list[Side], title: str, about: str, speed: float) -> str:
    """Return the SVG. `curve`: measured acceptance lengths, the first one before training; `train_s`: seconds at the
    right edge of the curve; `speed`: 1 is real time."""
    folder = FileSystemLoader(Path(__file__).parent)
    page = Environment(autoescape=True, loader=folder, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    seconds = max(each.total_s for each in sides) / speed
    return page.get_template("own_picture.svg.j2").render(
        curve=curve,
        train_s=train_s,
        sides=sides,
        title=title,
        about=about,
        speed=speed,
        learning_s=LEARNING_S,
        loop_s=LEARNING_S + seconds + HOLD_S,
        cells=CELLS,
    )


def answered(model: str, drafter: str, ticket: list[dict[str, Any]]) -> tuple[TimedAnswer, TimedAnswer]:
    """Return the ticket's answers without and with a drafter that drafts in full in every round."""
    llm = LLM(model, drafter=drafter, speculate="full", max_batch=1)
    timing = record(llm, llm.encode_chat(ticket), SamplingParams(max_tokens=MAX_TOKENS), prompt="", repeat=5)
    if timing.first_difference is not None:
        raise PacelineError(f"{drafter} changed the text at token {timing.first_difference}: please report it")
    return timing.off, timing.on


def draw(folder: Path, speed: float) -> str:
    """Return the picture of a finished run of `make own`."""
    results = read_json(folder / "results.json", "own_picture.py wants the run folder of make own")
    model, minutes = results["model"], results["minutes"]
    (ticket,) = messages_of(read_prompts(folder / "tickets" / "unseen.jsonl")[:1])
    _, generic = answered(model, results["init"], ticket)
    plain, own = answered(model, str(folder / "train" / "drafter"), ticket)
    lengths = [each["tokens_per_round"] for each in results["results"]]
    return picture(
        [Point(0.0, 0, results["before"]), *points_of(RunFolder(folder / "train"))],
        60.0 * minutes,
        [side("no drafter", plain), side("generic drafter", generic), side("your drafter", own)],
        f"{minutes:g} minutes of training on your own traffic: acceptance length {lengths[1]:.1f} → {lengths[2]:.1f}",
        f"{model}, support tickets, {results['processor']['name']}, {results['processor']['num_cores']} cores; "
        f"after the first token, at {speed:g} times real time; the same text",
        speed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run of experiments/own.py")
    parser.add_argument("out", type=Path, help="the SVG file")
    parser.add_argument("--speed", type=float, default=0.08, help="playback speed of the answers; 1 is real time")
    args = parser.parse_args()
    args.out.write_text(draw(args.run, args.speed), encoding="utf-8")
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    try:
        main()
    except PacelineError as error:
        sys.exit(f"error: {error}")
