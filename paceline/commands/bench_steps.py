"""`paceline bench steps`: load once, state the ceiling, measure every size in turns, write the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.config import StepsConfig
from paceline.bench.report import ceiling_line
from paceline.bench.steps import StepBench, config_of
from paceline.commands.terminal import introduce, print_json, progress, say
from paceline.engine.llm import LLM
from paceline.hardware import this_machine
from paceline.runlog import RunFolder

DISTURBED = 0.15


@dataclass(frozen=True, slots=True)
class StepsAsk:
    """A `bench steps` command, its options read."""

    settings: dict[str, Any]
    """Keyword arguments of LLM."""
    config: StepsConfig
    drafter: str = "default"
    out: Path | None = None
    as_json: bool = False


def bench_steps(ask: StepsAsk) -> None:
    """Measure and report."""
    run = RunFolder.create("bench-steps", {"llm": ask.settings, "steps": ask.config, "drafter": ask.drafter}, ask.out)
    rows = max(ask.config.batches)
    llm = LLM(drafter="none", max_batch=rows, **{"max_len": ask.config.needed_len, **ask.settings})
    machine = this_machine(llm.config.device)
    say(introduce(llm))
    say(ceiling_line(llm, machine))
    bench = StepBench(llm, ask.config, ask.drafter)
    with progress("measuring", (ask.config.repeat + 1) * len(ask.config.batches)) as advance:
        bench.run(advance)
    steps = bench.as_json(machine, config_of(llm.config.model))
    file = run.write_json("steps.json", steps)
    report = report_of(steps)
    run.report(report)
    say(report)
    if steps["spread"] > DISTURBED:
        say(
            f"the same size took times {steps['spread']:.0%} apart: other programs were at work, "
            "measure again on a quiet machine"
        )
    say(f"step times: {file}")
    if ask.as_json:
        print_json({**{key: value for key, value in steps.items() if key != "config"}, "run": run.path})


def report_of(steps: dict[str, Any]) -> str:
    """A table of milliseconds, a line for each width."""
    batches = sorted({batch for batch, _, _ in steps["verify"]})
    verify = {(batch, width): spent for batch, width, spent in steps["verify"]}
    draft = {(batch, width): spent for batch, width, spent in steps["draft"]}
    lines = [
        f"# Step times of {steps['model']}, {steps['weight_format']} weights, drafter {steps['drafter']}",
        f"Milliseconds over a context of {steps['context']} tokens: target pass, then drafting. Acceptance is mocked.\n",
        "| positions | " + " | ".join(f"batch {batch}: verify | draft" for batch in batches) + " |",
        "|---" * (1 + 2 * len(batches)) + "|",
    ]
    for width in sorted({width for _, width, _ in steps["verify"]}):
        cells = [f"{_ms(verify.get((batch, width)))} | {_ms(draft.get((batch, width - 1)))}" for batch in batches]
        lines.append(f"| {width} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, f"\nHost, a round: {_ms(steps['host_s'])} ms (median of all sizes)", ""])


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"
