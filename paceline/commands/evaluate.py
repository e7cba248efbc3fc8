"""`paceline evaluate`: one drafter on several prompt sets, shown as it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench import evaluate as library
from paceline.bench.config import BenchConfig
from paceline.bench.evaluation_file import EVALUATION
from paceline.commands.terminal import TerminalProgress, print_json, say


@dataclass(frozen=True, slots=True)
class EvaluateAsk:
    """An `evaluate` command, its options read; as the parameters of `bench.evaluate.evaluate`."""

    drafter: str
    settings: dict[str, Any]
    config: BenchConfig
    prompts: tuple[str, ...] = ()
    limit: int | None = None
    out: Path | None = None
    as_json: bool = False


def evaluate(ask: EvaluateAsk) -> dict[str, Any]:
    """Evaluate and return what evaluation.json holds, with the run folder as "run"."""
    done = library.evaluate(
        ask.drafter, ask.prompts, ask.config, settings=ask.settings, limit=ask.limit, out=ask.out, progress=TerminalProgress()
    )
    line = {**done.as_line(), "run": str(done.run)}
    say(f"figures and texts: {done.run / EVALUATION} (paceline report {done.run} draws them)")
    if ask.as_json:
        print_json(line)
    return line
