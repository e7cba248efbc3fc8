"""Library calls of `bench decode` (on prompts or with mocked acceptance), `bench steps` and `bench lossy`: load, measure,
write reports.

    line = bench_decode(EngineConfig(), BenchConfig(batches=(1, 8)), limit=4)

Each returns the command's JSON output; "run" is the run folder.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.bench.config import BUILTIN_PROMPTS, BenchConfig, LossyConfig, MockConfig, StepsConfig
from paceline.bench.decode import Bench, Result, as_line, sources_table
from paceline.bench.lossy import LossyBench
from paceline.bench.lossy import as_line as lossy_line
from paceline.bench.lossy import draw as draw_lossy
from paceline.bench.lossy import table as lossy_table
from paceline.bench.pages.run_page import page, read_run, table, verdict_on
from paceline.bench.passes import described
from paceline.bench.steps import MockBench, StepBench
from paceline.config import EngineConfig
from paceline.data.prompts import read_prompts
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.hardware import Machine, this_machine
from paceline.hub import resolve
from paceline.model.backends import form_of
from paceline.model.checkpoint import config_json
from paceline.report.pages import render
from paceline.report.tables import SILENT, Progress
from paceline.runs.folder import RunFolder
from paceline.simulate.costs.catalogue import shape_of

DISTURBED = 0.15
"""Spread of repeated times above which other programs were running."""


def bench_decode(
    engine: EngineConfig,
    config: BenchConfig,
    prompts: str | None = None,
    limit: int | None = None,
    out: Path | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Measure prompts x drafters x temperatures x batch sizes on one loaded model."""
    prompt_list = read_prompts(prompts or BUILTIN_PROMPTS, limit)
    settings = {"llm": engine, "bench": config, "prompts": prompts or "built-in", "limit": limit}
    run = RunFolder.create("bench-decode", settings, out)
    llm, machine = loaded(replace(engine, max_batch=max(config.batches)), progress)
    bench = Bench(llm, prompt_list, config, notice=progress.say)
    with progress.bar("decoding", bench.num_answers) as advance:
        bench.run(
            on_answer=lambda setting: advance(str(setting)),
            on_pass=lambda setting, done: run.log(**asdict(setting), tokens_per_s=done.tokens_per_s, wall_s=done.wall_s),
        )
    line = as_line(bench, machine)
    if notice := write_run(run, bench, machine, line):
        progress.say(notice)
    progress.table(table(line["results"]))
    progress.say(verdict_on(line["results"], line["looping"]))
    progress.say(f"report, figures and raw runs: {run.path}")
    return {**line, "run": run.path}


def bench_mock(
    engine: EngineConfig, config: MockConfig, out: Path | None = None, progress: Progress = SILENT
) -> dict[str, Any]:
    """Measure each mocked acceptance length in turn, next to the roofline's prediction."""
    run = RunFolder.create("bench-decode", {"llm": engine, "mock": config}, out)
    engine = replace(engine, max_batch=max(config.batches), max_len=engine.max_len or config.needed_len)
    llm, machine = loaded(engine, progress)
    bench = MockBench(llm, config, shape_of(config_json(resolve(engine.model)), engine.model), machine)
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
    engine: EngineConfig, config: StepsConfig, out: Path | None = None, progress: Progress = SILENT
) -> dict[str, Any]:
    """Measure the seconds of verification, drafting and the host at every size, in turns."""
    run = RunFolder.create("bench-steps", {"llm": engine, "steps": config, "drafter": engine.drafter}, out)
    sized = replace(engine, max_batch=max(config.batches), max_len=engine.max_len or config.needed_len)
    llm, machine = loaded(sized, progress)
    bench = StepBench(llm, config, engine.drafter)
    with progress.bar("measuring", (config.repeat + 1) * len(config.batches)) as advance:
        bench.run(advance)
    steps = bench.as_json(machine, config_json(resolve(engine.model)))
    file = run.write_json("steps.json", steps)
    verify, draft = ({(batch, width): 1e3 * spent for batch, width, spent in steps[name]} for name in ("verify", "draft"))
    batches, widths = (sorted(set(column)) for column in zip(*verify, strict=True))
    report = render("steps.md", steps=steps, verify=verify, draft=draft, batches=batches, widths=widths)
    run.write("report.md", report)
    progress.say(report)
    if steps["spread"] > DISTURBED:
        apart = f"the same size took times {steps['spread']:.0%} apart"
        progress.say(f"{apart}: other programs were at work, measure again on a quiet machine")
    progress.say(f"step times: {file}")
    return {**{key: value for key, value in steps.items() if key != "config"}, "run": run.path}


def bench_lossy(
    engine: EngineConfig, config: LossyConfig, out: Path | None = None, progress: Progress = SILENT
) -> dict[str, Any]:
    """Measure plain decoding, lossless speculation and each lossy setting in turn, on each task."""
    run = RunFolder.create("bench-lossy", {"llm": engine, "lossy": config}, out)
    llm = LLM.of(replace(engine, drafter="none", max_batch=1), allow_lossy=True)
    machine = this_machine(llm.config.device)
    progress.loaded(llm)
    progress.say(ceiling_line(llm, machine))
    bench = LossyBench(llm, engine.drafter, config)
    with progress.bar("decoding", config.repeat * len(bench.rules) * len(bench.tasks)) as advance:
        bench.run(advance)
    line = {**lossy_line(bench), **described(llm), "machine": machine}
    results = bench.results()
    run.write("report.md", render("lossy.md", verdict=line["verdict"], made=lossy_table(results), config=config))
    run.write_json("texts.json", bench.texts())
    run.results(line)
    progress.table(lossy_table(results))
    progress.say(line["verdict"])
    try:
        run.write("pareto.svg", draw_lossy(results))
    except ConfigError as error:
        progress.say(f"no pareto.svg: {error}")
    progress.say(f"report and figures: {run.path}")
    return {**line, "run": run.path}


def ceiling_line(llm: LLM, machine: Machine) -> str:
    """Return a sentence with the upper bound of plain decoding's speed, from memory bandwidth."""
    return render("ceiling.txt", llm=llm, machine=machine, weight_format=form_of(llm.target).weight_format).rstrip()


def loaded(engine: EngineConfig, progress: Progress) -> tuple[LLM, Machine]:
    """Load the model without a drafter, report it and the machine's ceiling, and return both."""
    llm = LLM.of(replace(engine, drafter="none"))
    machine = this_machine(llm.config.device)
    progress.loaded(llm)
    progress.say(ceiling_line(llm, machine))
    return llm, machine


def raw_runs(bench: Bench) -> list[dict[str, Any]]:
    """Return every pass with each answer's counts and times, without texts."""
    return [
        {
            **asdict(setting),
            "repetition": number,
            **{name: getattr(run, name) for name in ("wall_s", "prefill_s", "draft_s", "verify_s", "num_passes")},
            "answers": [
                {
                    "request": request.name,
                    "num_prompt_tokens": len(request.token_ids),
                    "num_output_tokens": len(answer.token_ids),
                    "seconds": answer.seconds,
                    "num_rounds": len(answer.rounds),
                    "num_accepted": sum(one.num_accepted for one in answer.rounds),
                }
                for request, answer in zip(bench.requests, run.answers, strict=True)
            ],
        }
        for setting, passes in bench.passes.items()
        for number, run in enumerate(passes)
    ]


def write_run(run: RunFolder, bench: Bench, machine: Machine, line: dict[str, Any]) -> str | None:
    """Write report.md, results.json, texts.json and report.html. Returns a notice if report.html could not be written."""
    results: list[Result] = line["results"]
    report = render(
        "decode.md",
        bench=bench,
        llm=bench.llm,
        form=form_of(bench.llm.target),
        machine=machine,
        verdict=verdict_on(results, line["looping"]),
        ceiling=ceiling_line(bench.llm, machine),
        results=results,
        figures=table(results),
        sources=sources_table([(result.setting, result) for result in results]),
        differences=[(result.setting, difference) for result in results for difference in result.differences],
        samples=line["texts"],
    )
    run.write("report.md", report)
    run.results({**line, "runs": raw_runs(bench)})
    texts = [
        {**asdict(setting), "request": request.name, "text": answer.text}
        for setting, passes in bench.passes.items()
        for request, answer in zip(bench.requests, passes[0].answers, strict=True)
    ]
    run.write_json("texts.json", texts)
    try:
        run.write("report.html", page(read_run(run.path)))
    except ConfigError as error:
        return f"no report.html: {error}"
    return None
