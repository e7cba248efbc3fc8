"""`bench decode`, on prompts or with mocked acceptance, and `bench steps` as library calls: load, measure, write the files.

    line = bench_decode(EngineConfig(), BenchConfig(batches=(1, 8)), limit=4)

Each returns what its command prints as JSON; "run" is the run folder.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.bench.config import BUILTIN_PROMPTS, BenchConfig, MockConfig, StepsConfig
from paceline.bench.decode import Bench, as_line
from paceline.bench.mock import MockBench
from paceline.bench.pages import render
from paceline.bench.report import ceiling_line, table, write_run
from paceline.bench.steps import StepBench, config_of
from paceline.config import EngineConfig
from paceline.engine.llm import LLM
from paceline.hardware import Machine, this_machine
from paceline.progress import Progress
from paceline.prompts import read_prompts
from paceline.runlog import RunFolder
from paceline.simulate import catalogue
from paceline.simulate.hf_config import shape_of
from paceline.tables import Column, Table

DISTURBED = 0.15
"""Times of one size that are so far apart were taken while other programs were at work."""


def bench_decode(
    engine: EngineConfig,
    config: BenchConfig,
    prompts: str | None = None,
    limit: int | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Prompts x drafters x temperatures x batch sizes on one loaded model."""
    progress = progress or Progress()
    asked = read_prompts(prompts or BUILTIN_PROMPTS, limit)
    described = {"llm": engine, "bench": config, "prompts": prompts or "built-in", "limit": limit}
    run = RunFolder.create("bench-decode", described, out)
    llm, machine = _loaded(replace(engine, max_batch=max(config.batches)), progress)
    bench = Bench(llm, asked, config, notice=progress.say)
    with progress.bar("decoding", bench.num_answers) as advance:
        bench.run(
            on_answer=lambda setting: advance(str(setting)),
            on_pass=lambda setting, done: run.log(**asdict(setting), tokens_per_s=done.tokens_per_s, wall_s=done.wall_s),
        )
    line = as_line(bench, machine)
    if notice := write_run(run, bench, machine, line):
        progress.say(notice)
    progress.table(table(line["results"]))
    progress.say(f"report, figures and raw runs: {run.path}")
    return {**line, "run": run.path}


def bench_mock(
    engine: EngineConfig, config: MockConfig, out: Path | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Each mocked acceptance in turns, beside the roofline."""
    progress = progress or Progress()
    run = RunFolder.create("bench-decode", {"llm": engine, "mock": config}, out)
    engine = replace(engine, max_batch=max(config.batches), max_len=engine.max_len or config.needed_len)
    llm, machine = _loaded(engine, progress)
    known = config_of(engine.model)
    shape = shape_of(known, engine.model) if known else catalogue.find(engine.model)
    bench = MockBench(llm, config, shape, machine)
    with progress.bar("decoding", (config.repeat + 1) * len(config.settings)) as advance:
        bench.run(advance)
    line = bench.as_line()
    run.results(line)
    report = mock_report(line)
    run.report(report)
    progress.say(report)
    progress.say(f"report and figures: {run.path}")
    return {**line, "run": run.path}


def bench_steps(
    engine: EngineConfig, config: StepsConfig, out: Path | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Seconds of verifying, drafting and the host at every size, in turns."""
    progress = progress or Progress()
    run = RunFolder.create("bench-steps", {"llm": engine, "steps": config, "drafter": engine.drafter}, out)
    rows, drafter = max(config.batches), engine.drafter
    engine = replace(engine, drafter="none", max_batch=rows, max_len=engine.max_len or config.needed_len)
    llm, machine = _loaded(engine, progress)
    bench = StepBench(llm, config, drafter)
    with progress.bar("measuring", (config.repeat + 1) * len(config.batches)) as advance:
        bench.run(advance)
    steps = bench.as_json(machine, config_of(engine.model))
    file = run.write_json("steps.json", steps)
    report = steps_report(steps)
    run.report(report)
    progress.say(report)
    if steps["spread"] > DISTURBED:
        apart = f"the same size took times {steps['spread']:.0%} apart"
        progress.say(f"{apart}: other programs were at work, measure again on a quiet machine")
    progress.say(f"step times: {file}")
    return {**{key: value for key, value in steps.items() if key != "config"}, "run": run.path}


def _loaded(engine: EngineConfig, progress: Progress) -> tuple[LLM, Machine]:
    """The model without a drafter, and the machine's ceiling, which is told before anything is measured."""
    llm = LLM.of(replace(engine, drafter="none"))
    machine = this_machine(llm.config.device)
    progress.loaded(llm)
    progress.say(ceiling_line(llm, machine))
    return llm, machine


def mock_report(line: dict[str, Any]) -> str:
    """report.md of mocked acceptance."""
    columns = [
        Column("batch", lambda each: each["batch"]),
        Column("tokens per round", lambda each: each["tokens_per_round"], "{:g}", "right"),
        Column("drafted", lambda each: each["num_drafted"], align="right"),
        Column("step, ms", lambda each: each["step_ms"], "{:.2f}", "right"),
        Column("tokens/s", lambda each: each["tokens_per_s"], "{:.1f}", "right"),
        Column("speed-up", lambda each: each["speedup"], "{:.2f}x", "right"),
        Column("roofline's step, ms", lambda each: each["roofline_step_ms"], "{:.2f}", "right"),
        Column("its speed-up", lambda each: each["roofline_speedup"], "{:.2f}x", "right"),
    ]
    return render("mock.md", line=line, figures=Table(columns, line["results"]))


def steps_report(steps: dict[str, Any]) -> str:
    """report.md of step times: milliseconds, a line for each width."""
    verify = {(batch, width): 1e3 * spent for batch, width, spent in steps["verify"]}
    draft = {(batch, width): 1e3 * spent for batch, width, spent in steps["draft"]}
    columns = [Column("positions", lambda width: width)]
    for batch in sorted({batch for batch, _ in verify}):
        columns += [
            Column(f"batch {batch}: verify", lambda width, batch=batch: verify.get((batch, width)), "{:.2f}", "right"),
            Column("draft", lambda width, batch=batch: draft.get((batch, width - 1)), "{:.2f}", "right"),
        ]
    return render("steps.md", steps=steps, figures=Table(columns, sorted({width for _, width in verify})))
