"""Library calls of `bench decode` (on prompts or with mocked acceptance), `bench steps` and `bench lossy`. Each loads
the model, measures, and writes reports.

    line = bench_decode(EngineConfig(), BenchConfig(batches=(1, 8)), limit=4)

Each returns the command's JSON output; "run" is the run folder.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.bench.config import BUILTIN_PROMPTS, BenchConfig, LossyConfig, MockConfig, StepsConfig
from paceline.bench.decode import Bench, Result, as_line
from paceline.bench.drafting import sources_table
from paceline.bench.lossy import LossyBench
from paceline.bench.lossy import as_line as lossy_line
from paceline.bench.lossy import draw as draw_lossy
from paceline.bench.lossy import table as lossy_table
from paceline.bench.pages.run_page import DECODING_NOTE, page, read_run, table, verdict_on
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
from paceline.report.pages import markdown
from paceline.report.tables import SILENT, Column, Progress, Table
from paceline.runs.folder import RunFolder, check_own
from paceline.simulate.costs.model_config import shape_of

DISTURBED = 0.15
"""Relative spread of repeated times above which a notice warns that other programs were running."""


def bench_decode(
    engine: EngineConfig,
    config: BenchConfig,
    prompts: str | None = None,
    limit: int | None = None,
    out: Path | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Measure decoding speed on one loaded model for every combination of drafter, temperature and batch size.
    `prompts`: file or data set id [default: the built-in set]. `limit`: use only the first prompts. Writes a report
    into the run folder and returns the figures; "run" is the folder's path."""
    check_drafts(engine, config.num_drafted)
    prompt_list = read_prompts(prompts or BUILTIN_PROMPTS, limit)
    settings = {"llm": engine, "bench": config, "prompts": prompts or "built-in", "limit": limit}
    check_own(out, "bench-decode")
    llm, machine = loaded(replace(engine, max_batch=max(config.batches)), progress)
    bench = Bench(llm, prompt_list, config, notice=progress.say)
    run = RunFolder.create("bench-decode", settings, out)
    with progress.bar("decoding", bench.num_answers) as advance:
        bench.run(
            on_answer=lambda setting: advance(str(setting)),
            on_pass=lambda setting, done: run.log(
                **asdict(setting), tokens_per_s=done.tokens_per_s, wall_s=done.wall_s
            ),
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
    """Measure decoding speed with mocked acceptance: a set number of drafts is accepted, whatever their tokens. Each
    speed is compared with the roofline model's prediction. Writes a report into the run folder and returns the figures;
    "run" is the folder's path."""
    check_own(out, "bench-decode")
    settings = {"llm": engine, "mock": config}
    engine = replace(engine, max_batch=max(config.batches), max_len=engine.max_len or config.needed_len)
    llm, machine = loaded(engine, progress)
    bench = MockBench(llm, config, shape_of(config_json(resolve(engine.model)), engine.model), machine)
    run = RunFolder.create("bench-decode", settings, out)
    with progress.bar("decoding", (config.repeat + 1) * len(config.settings)) as advance:
        bench.run(advance)
    line = bench.as_line()
    run.results(line)
    trees = f" Trees are accepted by the marginals `{config.marginals}`, which give their tokens per round."
    report = markdown(
        f"Mocked acceptance: {line['model']}, {line['weights']} weights, drafter {line['drafter']}",
        f"Real rounds over {config.prompt_tokens} tokens of prompt and {config.max_tokens} of answer, with mocked "
        f"acceptance, so the text means nothing: NOT lossless.{trees if config.trees else ''}",
        "The roofline moves bytes and multiplies at the machine's full rates, nothing else.",
        mock_table(line["results"]),
    )
    run.write("report.md", report)
    progress.say(report)
    progress.say(f"report and figures: {run.path}")
    return {**line, "run": run.path}


def bench_steps(
    engine: EngineConfig, config: StepsConfig, out: Path | None = None, progress: Progress = SILENT
) -> dict[str, Any]:
    """Measure the seconds of a round's verification, drafting and remaining work (host), for each batch size and number
    of verified positions per row. Writes steps.json and a report into the run folder, and returns the figures; "run" is
    the folder's path."""
    check_own(out, "bench-steps")
    sized = replace(engine, max_batch=max(config.batches), max_len=engine.max_len or config.needed_len)
    llm, machine = loaded(sized, progress)
    bench = StepBench(llm, config, engine.drafter)
    run = RunFolder.create("bench-steps", {"llm": engine, "steps": config, "drafter": engine.drafter}, out)
    with progress.bar("measuring", (config.repeat + 1) * len(config.batches)) as advance:
        bench.run(advance)
    steps = bench.as_json(machine, config_json(resolve(engine.model)))
    file = run.write_json("steps.json", steps)
    verify, draft = (
        {(batch, width): 1e3 * spent for batch, width, spent in steps[name]} for name in ("verify", "draft")
    )
    batches, widths = (sorted(set(column)) for column in zip(*verify, strict=True))
    columns = [Column("positions", lambda width: width)]
    for batch in batches:
        columns += [
            Column(f"batch {batch}: verify", lambda width, batch=batch: verify.get((batch, width)), "{:,.2f}", "right"),
            Column("draft", lambda width, batch=batch: draft.get((batch, width - 1)), "{:,.2f}", "right"),
        ]
    report = markdown(
        f"Step times of {steps['model']}, {steps['weight_format']} weights, drafter {steps['drafter']}",
        f"Milliseconds over a context of {config.context} tokens: target pass, then drafting. Acceptance is mocked.",
        Table(columns, widths),
        f"Host, a round: {1000 * steps['host_s']:.2f} ms (median of all sizes)",
    )
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
    """Measure plain decoding, lossless speculation and each lossy rule, alternately, on each task. Writes a report into
    the run folder and returns the figures; "run" is the folder's path."""
    check_drafts(engine)
    check_own(out, "bench-lossy")
    llm, machine = loaded(replace(engine, max_batch=1), progress, allow_lossy=True)
    bench = LossyBench(llm, engine.drafter, config)
    run = RunFolder.create("bench-lossy", {"llm": engine, "lossy": config}, out)
    with progress.bar("decoding", config.repeat * len(bench.rules) * len(bench.tasks)) as advance:
        bench.run(advance)
    line = {**lossy_line(bench), **described(llm), "machine": machine}
    results = bench.results()
    report = markdown(
        "Lossy rules: what they bring, what they cost",
        line["verdict"],
        lossy_table(results),
        "![score and total variation over tokens/s](pareto.svg)",
        f"Settings took turns over the same requests, one at a time, temperature {config.temperature:g}, "
        f"{config.max_tokens} tokens at most, {config.repeat} repetitions. What each rule says: "
        "docs/explanation/lossless.md.",
    )
    run.write("report.md", report)
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


def mock_table(rows: list[dict[str, Any]]) -> Table:
    columns = (
        Column("batch", lambda row: row["batch"]),
        Column("tokens per round", lambda row: row["tokens_per_round"], "{:.3g}", "right"),
        Column("drafted", lambda row: f"{'tree of ' if row['is_tree'] else ''}{row['num_drafted']}", align="right"),
        Column("step, ms", lambda row: row["step_ms"], "{:,.2f}", "right"),
        Column("tokens/s", lambda row: row["tokens_per_s"], "{:,.1f}", "right"),
        Column(
            "speed-up",
            lambda row: "busy: repeat" if row["speedup"] is None else f"{row['speedup']:.2f}x",
            align="right",
        ),
        Column("roofline's step, ms", lambda row: row["roofline_step_ms"], "{:,.2f}", "right"),
        Column("its speed-up", lambda row: row["roofline_speedup"], "{:,.2f}x", "right"),
    )
    return Table(columns, rows)


def stages_table(results: list[Result], machine: Machine) -> Table:
    def reading(result: Result) -> str | None:
        rate = result.bytes_per_s
        return f"{rate / 1e9:,.1f} ({100 * rate / machine.bytes_per_s:.0f}%)" if rate else None

    stages = ("prefill", "draft", "verify", "host", "wall")
    columns = [Column("setting", lambda result: result.setting)]
    columns += [Column(name, lambda result, name=name: result.seconds[name], "{:,.2f}", "right") for name in stages]
    return Table([*columns, Column("GB/s of weights while verifying", reading)], results)


def ceiling_line(llm: LLM, machine: Machine) -> str:
    """Return a sentence that states the upper limit of plain decoding's tokens per second, which follows from memory
    bandwidth and the size of the weights."""
    num_bytes = llm.target.weight_bytes
    rate = machine.read_bytes_per_s(num_bytes)
    cached = f" from memory, {rate / 1e9:.1f} GB/s of this much with its caches" if rate > machine.bytes_per_s else ""
    return (
        f"ceiling: {machine.name} reads {machine.bytes_per_s / 1e9:.1f} GB/s{cached}, a pass reads "
        f"{num_bytes / 1e6:.0f} MB of {form_of(llm.target).weight_format} weights: plain decoding of one request "
        f"cannot exceed {machine.ceiling_tokens_per_s(num_bytes):.1f} tokens/s"
    )


def check_drafts(engine: EngineConfig, num_drafted: int | None = None) -> None:
    """Raise ConfigError if the engine would draft nothing (`speculate` is off), or if both `num_drafted` and the
    engine's `speculate` set the number of drafts."""
    if engine.speculation.is_off:
        raise ConfigError("speculate off drafts nothing, so there is nothing to measure: leave it out")
    if num_drafted is not None:
        replace(engine, num_drafted=num_drafted)


def loaded(engine: EngineConfig, progress: Progress, **more: Any) -> tuple[LLM, Machine]:
    """Load the model without a drafter, and measure this machine's memory bandwidth and arithmetic throughput. Reports
    the upper limit of plain decoding's speed to `progress`. `more`: further arguments of `LLM.of`."""
    llm = LLM.of(replace(engine, drafter="none"), **more)
    machine = this_machine(llm.config.device)
    progress.loaded(llm)
    progress.say(ceiling_line(llm, machine))
    return llm, machine


def raw_runs(bench: Bench) -> list[dict[str, Any]]:
    """Return the raw measurements: one dict per pass over the requests. It has these keys:

    - "drafter", "batch", "temperature": the setting;
    - "repetition": number of the repetition, from 0;
    - "wall_s", "prefill_s", "draft_s", "verify_s": seconds of the pass and of its stages;
    - "num_passes": number of the target's passes for decoding;
    - "answers": a dict for each answer, with its numbers of tokens, rounds and accepted drafts, and its seconds."""
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
    """Write report.md, results.json, texts.json and report.html into the run folder. `line`: the figures, as returned
    by `bench.decode.as_line`. Returns a message if report.html could not be written (matplotlib is missing), else
    None."""
    results: list[Result] = line["results"]
    llm, config = bench.llm, bench.config
    report = markdown(
        f"Decoding speed: {llm.config.model}, {llm.config.dtype} ({form_of(llm.target)}), {machine.name}",
        verdict_on(results, line["looping"]),
        f"{ceiling_line(llm, machine)}.",
        f"{len(bench.requests)} requests, up to {config.max_tokens} tokens each, medians of {config.repeat} "
        f"repetitions; {bench.num_skipped} turns left out for length. {DECODING_NOTE}",
        table(results),
        "## Rounds by source of drafts",
        sources_table([(result.setting, result) for result in results]),
        "## Survival",
        "Share of rounds whose first i drafts were all accepted.",
        [
            f"{result.setting}: {', '.join(f'{share:.2f}' for share in result.survival)}"
            for result in results
            if result.survival
        ],
        "## Time by stage (seconds)",
        stages_table(results, machine),
        "## Differences from plain greedy decoding",
        [
            f"{result.setting}, request {difference.request}: first at token {difference.index}, where the two best "
            f"logits were {difference.top2_gap:.4f} apart"
            for result in results
            for difference in result.differences
        ],
        "## Samples",
        *(
            f"**{text['request']}**, temperature {text['temperature']:g}\n\n```text\n{text['text'][:400]}\n```"
            for text in line["texts"]
        ),
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
