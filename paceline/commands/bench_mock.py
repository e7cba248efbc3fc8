"""`paceline bench decode --mock-tokens-per-round`: each acceptance in turns, beside the roofline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.config import MockConfig
from paceline.bench.mock import MockBench
from paceline.bench.report import ceiling_line
from paceline.bench.steps import config_of
from paceline.commands.terminal import introduce, print_json, progress, say
from paceline.engine.llm import LLM
from paceline.hardware import this_machine
from paceline.runlog import RunFolder
from paceline.simulate import catalogue
from paceline.simulate.hf_config import shape_of
from paceline.simulate.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class MockAsk:
    """The command, its options read."""

    settings: dict[str, Any]
    """Keyword arguments of LLM."""
    config: MockConfig
    out: Path | None = None
    as_json: bool = False


def bench_mock(ask: MockAsk) -> None:
    """Measure and report."""
    run = RunFolder.create("bench-decode", {"llm": ask.settings, "mock": ask.config}, ask.out)
    llm = LLM(drafter="none", max_batch=max(ask.config.batches), **{"max_len": ask.config.needed_len, **ask.settings})
    machine = this_machine(llm.config.device)
    say(introduce(llm))
    say(ceiling_line(llm, machine))
    bench = MockBench(llm, ask.config, _shape(llm.config.model), machine)
    with progress("decoding", (ask.config.repeat + 1) * len(ask.config.settings)) as advance:
        bench.run(advance)
    line = bench.as_line()
    report = report_of(line)
    run.write_json("results.json", line)
    run.report(report)
    say(report)
    say(f"report and figures: {run.path}")
    if ask.as_json:
        print_json({**line, "run": run.path})


def _shape(model: str) -> ModelShape:
    config = config_of(model)
    return shape_of(config, model) if config else catalogue.find(model)


def report_of(line: dict[str, Any]) -> str:
    """For people."""
    rows = [
        f"| {one['batch']} | {one['tokens_per_round']:g} | {one['num_drafted']} | {one['step_ms']:.2f} | "
        f"{one['tokens_per_s']:.1f} | {one['speedup']:.2f}x | {one['roofline_step_ms']:.2f} | {one['roofline_speedup']:.2f}x |"
        for one in line["results"]
    ]
    head = ("batch", "tokens per round", "drafted", "step, ms", "tokens/s", "speed-up", "roofline's step, ms", "its speed-up")
    return "\n".join(
        [
            f"# Mocked acceptance: {line['model']}, {line['weights']} weights, drafter {line['drafter']}\n",
            f"Real rounds over {line['prompt_tokens']} tokens of prompt and {line['max_tokens']} of answer; what they keep is "
            "set, so the text means nothing: NOT lossless.",
            "The roofline moves bytes and multiplies at the machine's full rates, nothing else.\n",
            "| " + " | ".join(head) + " |",
            "|---" * len(head) + "|",
            *rows,
            "",
        ]
    )
