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
from paceline.bench.report import loaded, table, write_run
from paceline.bench.steps import StepBench, config_of
from paceline.config import EngineConfig
from paceline.progress import Progress
from paceline.prompts import read_prompts
from paceline.runlog import RunFolder
from paceline.simulate import catalogue
from paceline.simulate.hf_config import shape_of

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
    llm, machine = loaded(replace(engine, max_batch=max(config.batches)), progress)
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
    llm, machine = loaded(engine, progress)
    known = config_of(engine.model)
    shape = shape_of(known, engine.model) if known else catalogue.find(engine.model)
    bench = MockBench(llm, config, shape, machine)
    with progress.bar("decoding", (config.repeat + 1) * len(config.settings)) as advance:
        bench.run(advance)
    line = bench.as_line()
    run.results(line)
    report = render("mock.md", line=line)
    run.write("report.md", report)
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
    llm, machine = loaded(engine, progress)
    bench = StepBench(llm, config, drafter)
    with progress.bar("measuring", (config.repeat + 1) * len(config.batches)) as advance:
        bench.run(advance)
    steps = bench.as_json(machine, config_of(engine.model))
    file = run.write_json("steps.json", steps)
    report = steps_report(steps)
    run.write("report.md", report)
    progress.say(report)
    if steps["spread"] > DISTURBED:
        apart = f"the same size took times {steps['spread']:.0%} apart"
        progress.say(f"{apart}: other programs were at work, measure again on a quiet machine")
    progress.say(f"step times: {file}")
    return {**{key: value for key, value in steps.items() if key != "config"}, "run": run.path}


def steps_report(steps: dict[str, Any]) -> str:
    """report.md of step times: milliseconds, a line for each width."""
    verify, draft = ({(batch, width): 1e3 * spent for batch, width, spent in steps[name]} for name in ("verify", "draft"))
    batches, widths = (sorted(set(each)) for each in zip(*verify, strict=True))
    return render("steps.md", steps=steps, verify=verify, draft=draft, batches=batches, widths=widths)
