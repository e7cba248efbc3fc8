"""Library call of `bench latency`: starts a server per drafter, or uses running ones, and measures their latency.

    line = bench_latency(ArmsConfig(drafters=("none", "default")), LatencyConfig(), workloads=("voice",))

The results are in report.md and report.html of the run folder.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.bench.config import ArmsConfig, LatencyConfig
from paceline.bench.serving.latency import GROUPS, SEGMENTS, SHARES, TEXTS, LatencyBench, LatencyResult, Pair
from paceline.bench.serving.load import Contender
from paceline.bench.serving.servers import ANSWERS, key_of, look, refuse_failed, started
from paceline.bench.serving.workloads import WORKLOADS, Workload, named_workload, workload_of
from paceline.errors import ConfigError, reraised
from paceline.net.streaming import Client
from paceline.report.pages import Plot, stacked, write_report
from paceline.report.statistics import Tone, tone_of
from paceline.report.tables import SILENT, Column, Progress, Table, flat, spread_column, with_interval
from paceline.runs.folder import RunFolder

ENOUGH = 0.02
"""Maximum share of unattributed time at which the parts count as a full explanation."""
COLUMNS = (
    Column("workload", lambda result: result.workload),
    Column("arm", lambda result: result.arm),
    ANSWERS,
    spread_column("whole ms", lambda result: result.total, 1000, 0),
    spread_column("first token ms", lambda result: result.first_token, 1000, 0),
    *(spread_column(f"{name} ms", lambda result, name=name: result.groups[name], 1000, 1) for name in GROUPS),
    Column("unattributed", lambda result: result.unattributed, "{:.1%}", "right"),
    Column("largest", lambda result: result.largest),
    Column("tokens", lambda result: result.num_tokens, "{:.0f}", "right"),
    Column("tokens/round", lambda result: result.tokens_per_round, "{:.2f}", "right"),
    Column("lossless", lambda result: "yes" if result.lossless else "NO"),
)


PART_COLUMNS = (
    Column("workload", lambda line: line[0].workload),
    Column("arm", lambda line: line[0].arm),
    Column("part", lambda line: line[1].replace("_", " ")),
    Column("mean ms", lambda line: 1000 * line[2].mean, "{:.2f}", "right"),
    spread_column("p50 / p90 / p99 ms", lambda line: line[2], 1000, 2),
    Column("what it is", lambda line: TEXTS["meanings"][line[1]]),
)
"""Columns of the table of parts; each row is (result, part, spread of its seconds)."""
PAIR_COLUMNS = (
    Column("workload", lambda pair: pair.workload),
    Column("arm", lambda pair: pair.arm),
    Column("compared with", lambda pair: pair.against),
    Column("part", lambda pair: pair.part),
    Column("p50 ms", lambda pair: 1000 * pair.p50_s, "{:.1f}", "right"),
    Column("the other's", lambda pair: 1000 * pair.against_p50_s, "{:.1f}", "right"),
    Column("less", lambda pair: pair.cut, "{:.0%}", "right"),
    Column("difference ms", lambda pair: _difference(pair)),
)


def _difference(pair: Pair) -> str | None:
    low, high = pair.interval_s
    interval = (None, None) if low is None or high is None else (1000 * low, 1000 * high)
    return with_interval(1000 * pair.difference_s, interval, "{:+.1f}")


def bench_latency(
    arms: ArmsConfig,
    config: LatencyConfig,
    workloads: Sequence[str] = (),
    prompts: Sequence[str] = (),
    schema: Path | None = None,
    limit: int | None = None,
    out: Path | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Measure request latency and write the report. Returns the command's JSON output; "run" is the run folder.

    `workloads`: names of built-in workloads; `prompts`: files of prompts; without both, the workload "voice" is used.
    `limit`: use only the first requests of each workload or file. `schema`: JSON schema that the answers to the files'
    prompts follow.

    Raises ConfigError for an unknown workload, for a server that cannot be started or used, and if every request
    failed."""
    chosen = _read_workloads(workloads, prompts, schema, limit)
    key = key_of(arms.api_key_file)
    names = [workload.name for workload in chosen]
    settings = {"bench": asdict(config), "arms": asdict(arms), "workloads": names, "limit": limit}
    with contextlib.ExitStack() as stack:
        contenders = [_arm(name, url, key, arms.model if arms.urls else None, config) for name, url in arms.named_urls]
        run = RunFolder.create("bench-latency", settings, out)
        if arms.drafters:
            named = [(name, ("--drafter", drafter, *arms.words)) for name, drafter in arms.named_drafters]
            urls = stack.enter_context(started(named, run.path, progress))
            contenders = [
                _arm(name, url, key, None, config) for (name, _), url in zip(named, urls, strict=True)
            ] + contenders
        progress.say(", ".join(f"{contender.name} at {contender.client.url}" for contender in contenders))
        bench = LatencyBench(contenders, chosen, config)
        with progress.bar("latency", bench.num_answers) as advance:
            bench.run(on_answer=advance)
    for (workload, arm), answers in bench.measured.items():
        for number, answer in enumerate(answers):
            figures = {name: value for name, value in asdict(answer).items() if name != "text"}
            run.log(workload=workload, arm=arm, request=number, **figures)
    results, pairs = bench.results(), bench.pairs()
    line = {
        "results": [asdict(result) for result in results],
        "pairs": [asdict(pair) for pair in pairs],
        "seed": config.seed,
    }
    run.results(line)
    _report(run, results, pairs, chosen, settings, progress)
    refuse_failed(results)
    return {**line, "run": run.path}


def _read_workloads(
    names: Sequence[str], prompts: Sequence[str], schema: Path | None, limit: int | None
) -> list[Workload]:
    for name in names:
        if name not in WORKLOADS:
            known = f"choose from {', '.join(WORKLOADS)}, or give prompts of your own"
            raise ConfigError(f"there is no workload {name!r}: {known}")
    if schema is not None and not prompts:
        raise ConfigError("schema goes with prompts of a file: the workloads have their own")
    wanted = None
    if schema is not None:
        remedy = "give a file with a JSON schema"
        with reraised(ConfigError, f"cannot read the schema in {schema}", remedy, OSError, ValueError):
            wanted = json.loads(schema.read_text(encoding="utf-8"))
    of_files = [workload_of(file, limit, wanted) for file in prompts]
    chosen = [named_workload(name, limit) for name in names or (() if of_files else ("voice",))] + of_files
    used = [workload.name for workload in chosen]
    if len(set(used)) < len(used):
        raise ConfigError(f"two workloads have one name ({', '.join(used)}): rename a file, or name each once")
    return chosen


def _arm(name: str, url: str, key: str | None, model: str | None, config: LatencyConfig) -> Contender:
    known, is_ours = look(url, key, model)
    client = Client(url, key, config.timeout_s, keeps=not config.new_connections)
    timed = {"return_timings": True, "return_metrics": True} if is_ours else {}
    return Contender(name, client, {"model": known} | timed)


def verdict_on(results: list[LatencyResult], pairs: list[Pair]) -> str:
    """Return the verdict as text: how closely the parts of the time (queue, prefill, ...) sum to the client's time,
    which results are not lossless and, for each comparison, how much less time decoding takes."""
    timed = [result.unattributed or 0.0 for result in results if result.is_told]
    worst = max(timed, default=0.0)
    only, advice = ("", "") if worst <= ENOUGH else ("only ", ": look at unattributed first")
    lines = [f"The parts add up to what the client saw {only}within {worst:.1%}{advice}."]
    if not timed:
        lines = ["No server reported its timings: communication is what the client could see, the rest is one part."]
    lines += [
        f"NOT LOSSLESS: {result.workload}, {result.arm}: its acceptance is mocked or its rule lossy, so it is not "
        "compared."
        for result in results
        if not result.lossless
    ]
    for pair in (pair for pair in pairs if pair.part == "decode" and pair.lossless):
        if pair.doubt:
            lines.append(f"{pair.workload}: no verdict on {pair.arm} compared with {pair.against}: {pair.doubt}.")
        elif pair.cut is not None:
            change = f"{abs(pair.cut):.0%} {'less' if pair.cut >= 0 else 'more'} time"
            lines.append(f"{pair.workload}: decoding takes {pair.arm} {change} than {pair.against} at the median.")
    return " ".join(lines)


def _tone(results: list[LatencyResult], pairs: list[Pair]) -> Tone:
    if not all(item.lossless for item in results):
        return "bad"
    cuts = [item.cut for item in pairs if item.part == "decode" and not item.doubt]
    return tone_of([1 / (1 - cut) for cut in cuts if cut and cut < 1])


def _report(
    run: RunFolder,
    results: list[LatencyResult],
    pairs: list[Pair],
    workloads: list[Workload],
    settings: dict[str, Any],
    progress: Progress,
) -> None:
    figures = Table(COLUMNS, results, width=230)
    lines = [(result, part, spread) for result in results for part, spread in result.parts.items()]
    remedies = [remedy_of(result) for result in results if result.largest]
    verdict = verdict_on(results, pairs)
    failures = [
        f"{result.workload}, {result.arm}: {n}x {why}" for result in results for why, n in result.failures.items()
    ]
    about = [f"{workload.name}: {workload.about}; {len(workload.requests)} requests." for workload in workloads]
    comparison = Table(PAIR_COLUMNS, pairs)
    notice = write_report(
        run,
        lambda: bars_of(results),
        title="Where the milliseconds go",
        verdict=verdict,
        tone=_tone(results, pairs),
        explained=["latency"],
        sections={
            "Where the time goes": [*about, *([remedies] if remedies else [])],
            "Figures": [TEXTS["columns"], figures],
            "Compared with the first variant": [comparison] if pairs else [],
            "Every part": [Table(PART_COLUMNS, lines)],
            "Failures": [failures],
        },
        settings=flat(settings),
    )
    progress.table(figures)
    if pairs:
        progress.table(comparison)
    for text in (verdict, *remedies, *(f"FAILED: {failure}" for failure in failures), *([notice] if notice else [])):
        progress.say(text)
    progress.say(f"report, figures and the parts of each answer: {run.path}")


def remedy_of(result: LatencyResult) -> str:
    """Return one sentence that names the part with the most time in the median latency, and how to reduce it."""
    assert result.largest
    bar = result.bars["p50"]
    share = bar[result.largest] / (sum(bar.values()) or 1.0)
    return (
        f"{result.workload}, {result.arm}: most of the time, {share:.0%} at the median, goes to {result.largest}. "
        f"To make it less: {TEXTS['remedies'][result.largest]}"
    )


def bars_of(results: Sequence[LatencyResult]) -> list[Plot]:
    """Return one plot per workload, with stacked bars of each contender's p50, p90 and p99 latency by part, in
    milliseconds."""
    names = list(SEGMENTS)
    return [
        stacked(
            f"{workload}: where the time of a request goes",
            [
                (f"{result.arm[-16:]} {share}", [1000 * result.bars[share][name] for name in names])
                for result in results
                if result.workload == workload and result.largest
                for share in SHARES
            ],
            names,
            "ms",
        )
        for workload in dict.fromkeys(result.workload for result in results)
    ]
