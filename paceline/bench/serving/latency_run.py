"""`bench latency` as a library call: a server for each drafter, or those that run; report.md and report.html.

line = bench_latency(ArmsConfig(drafters=("none", "default")), LatencyConfig(), workloads=("voice",))
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.bench.config import ArmsConfig, LatencyConfig
from paceline.bench.serving.latency import GROUPS, PARTS, SEGMENTS, SHARES, TOLD, Alone, Arm, LatencyBench, LatencyResult, Pair
from paceline.bench.serving.servers import look, started
from paceline.bench.serving.workloads import WORKLOADS, Workload, named_workload, workload_of
from paceline.config import read_api_keys
from paceline.errors import ConfigError, refuse, reraised
from paceline.net.streaming import Client
from paceline.report.pages import Plot, render, stacked
from paceline.report.statistics import Spread, Tone, tone_of
from paceline.report.tables import SILENT, Column, Progress, Table, flat, spread_column
from paceline.runs.folder import RunFolder

ENOUGH = 0.02
"""Share of the time that may be without a part."""
COLUMNS = (
    Column("workload", lambda each: each.workload),
    Column("arm", lambda each: each.arm),
    Column("answers", lambda each: f"{each.num_answers}" + (f", {each.num_failed} FAILED" if each.num_failed else "")),
    spread_column("whole ms", lambda each: each.total, 1000, 0),
    spread_column("first token ms", lambda each: each.first_token, 1000, 0),
    *(spread_column(f"{name} ms", lambda each, name=name: each.groups[name], 1000, 1) for name in GROUPS),
    Column("unattributed", lambda each: each.unattributed, "{:.1%}", "right"),
    Column("largest", lambda each: each.largest),
    Column("tokens", lambda each: each.num_tokens, "{:.0f}", "right"),
    Column("tokens/round", lambda each: each.tokens_per_round, "{:.2f}", "right"),
    Column("lossless", lambda each: "yes" if each.lossless else "NO"),
)


@dataclass(frozen=True, slots=True)
class _Line:
    """A part of an arm, for the table of all parts."""

    workload: str
    arm: str
    part: str
    spread: Spread


PART_COLUMNS = (
    Column("workload", lambda each: each.workload),
    Column("arm", lambda each: each.arm),
    Column("part", lambda each: each.part.replace("_", " ")),
    Column("mean ms", lambda each: 1000 * each.spread.mean, "{:.2f}", "right"),
    spread_column("p50 / p90 / p99 ms", lambda each: each.spread, 1000, 2),
    Column("what it is", lambda each: TOLD["meanings"][each.part]),
)
PAIR_COLUMNS = (
    Column("workload", lambda each: each.workload),
    Column("arm", lambda each: each.arm),
    Column("beside", lambda each: each.against),
    Column("part", lambda each: each.part),
    Column("p50 ms", lambda each: 1000 * each.p50_s, "{:.1f}", "right"),
    Column("the other's", lambda each: 1000 * each.against_p50_s, "{:.1f}", "right"),
    Column("less", lambda each: each.cut, "{:.0%}", "right"),
    Column("difference ms", lambda each: _difference(each)),
)


def _difference(pair: Pair) -> str:
    low, high = pair.interval_s
    interval = "" if low is None or high is None else f" [{1000 * low:+.1f}, {1000 * high:+.1f}]"
    return f"{1000 * pair.difference_s:+.1f}{interval}"


def bench_latency(
    arms: ArmsConfig,
    config: LatencyConfig,
    workloads: Sequence[str] = (),
    prompts: Sequence[str] = (),
    schema: Path | None = None,
    limit: int | None = None,
    out: Path | None = None,
    progress: Progress = SILENT,
    alone: Alone = contextlib.nullcontext,
) -> dict[str, Any]:
    """`workloads` by name and `prompts` of files, voice where there is neither; `schema` is what answers to the files' prompts
    have to be. Returns the command's JSON, with the run folder as "run". Raises ConfigError when no arm can be asked."""
    asked = _asked(workloads, prompts, schema, limit)
    key = next(iter(read_api_keys((), arms.api_key_file)), None)  # as an option it would stay in the run folder
    settings = {"bench": asdict(config), "arms": asdict(arms), "workloads": [each.name for each in asked], "limit": limit}
    with contextlib.ExitStack() as stack:
        found = [_arm(name, url, key, arms.model if arms.urls else None, config) for name, url in arms.named_urls]
        run = RunFolder.create("bench-latency", settings, out)
        if arms.drafters:
            named = [(name, ("--drafter", drafter, *arms.words)) for name, drafter in arms.named_drafters]
            urls = stack.enter_context(started(named, run.path, progress))
            found = [_arm(name, url, key, None, config) for (name, _), url in zip(named, urls, strict=True)] + found
        progress.say(", ".join(f"{each.name} at {each.client.url}" for each in found))
        bench = LatencyBench(found, asked, config, alone)
        with progress.bar("latency", bench.num_answers) as advance:
            bench.run(on_answer=advance)
    for (workload, arm), answers in bench.measured.items():
        for number, answer in enumerate(answers):
            told = asdict(answer)
            run.log(workload=workload, arm=arm, request=number, **{name: told[name] for name in told if name != "text"})
    results, pairs = bench.results(), bench.pairs()
    line = {"results": [asdict(each) for each in results], "pairs": [asdict(each) for each in pairs], "seed": config.seed}
    run.results(line)
    _report(run, results, pairs, asked, settings, progress)
    if all(each.num_failed == each.num_answers for each in results):
        raise ConfigError(f"every request failed, first with: {next(iter(results[0].failures))}")
    return {**line, "run": run.path}


def _asked(names: Sequence[str], prompts: Sequence[str], schema: Path | None, limit: int | None) -> list[Workload]:
    unknown = next((name for name in names if name not in WORKLOADS), None)
    refuse(
        ConfigError,
        (
            unknown is not None,
            f"there is no workload {unknown!r}: choose from {', '.join(WORKLOADS)}, or give prompts of your own",
        ),
        (schema is not None and not prompts, "schema goes with prompts of a file: the workloads have their own"),
    )
    wanted = None
    if schema is not None:
        with reraised(
            ConfigError, f"cannot read the schema in {schema}", "give a file with a JSON schema", OSError, ValueError
        ):
            wanted = json.loads(schema.read_text(encoding="utf-8"))
    of_files = [workload_of(each, limit, wanted) for each in prompts]
    found = [named_workload(name, limit) for name in names or (() if of_files else ("voice",))] + of_files
    called = [each.name for each in found]
    refuse(
        ConfigError,
        (
            len(set(called)) < len(called),
            f"two workloads have one name ({', '.join(called)}): rename a file, or name each once",
        ),
    )
    return found


def _arm(name: str, url: str, key: str | None, model: str | None, config: LatencyConfig) -> Arm:
    known, is_ours = look(url, key, model)
    client = Client(url, key, config.timeout_s, keeps=not config.new_connections)
    return Arm(name, client, known, {"return_timings": True, "return_metrics": True} if is_ours else {})


def _tone(results: list[LatencyResult], pairs: list[Pair]) -> Tone:
    if not all(each.lossless for each in results):
        return "bad"
    cuts = [each.cut for each in pairs if each.part == "decode" and not each.doubt]
    return tone_of([1 / (1 - cut) for cut in cuts if cut and cut < 1])


def _report(
    run: RunFolder,
    results: list[LatencyResult],
    pairs: list[Pair],
    asked: list[Workload],
    settings: dict[str, Any],
    progress: Progress,
) -> None:
    """report.md and report.html, and the same in short to `progress`."""
    figures = Table(COLUMNS, results, width=230)
    lines = [_Line(each.workload, each.arm, part, each.parts[part]) for each in results for part in PARTS if part in each.parts]
    remedies = [remedy_of(each) for each in results if each.largest]
    values: dict[str, Any] = {
        "title": "Where the milliseconds go",
        "verdict": render("latency_verdict.txt", results=results, pairs=pairs, enough=ENOUGH).strip(),
        "tone": _tone(results, pairs),
        "about": [f"{each.name}: {each.about}; {len(each.requests)} requests." for each in asked],
        "figures": figures,
        "remedies": remedies,
        "beside": Table(PAIR_COLUMNS, pairs),
        "parts": Table(PART_COLUMNS, lines),
        "failures": [f"{each.workload}, {each.arm}: {n}x {why}" for each in results for why, n in each.failures.items()],
        "settings": flat(settings),
    }
    run.write("report.md", render("latency.md", **values))
    progress.table(figures)
    if pairs:
        progress.table(values["beside"])
    for said in (values["verdict"], *remedies, *(f"FAILED: {each}" for each in values["failures"])):
        progress.say(said)
    try:
        run.write("report.html", render("latency.html", drawn=bars_of(results), **values))
    except ConfigError as error:
        progress.say(f"no report.html: {error}")
    progress.say(f"report, figures and the parts of each answer: {run.path}")


def remedy_of(result: LatencyResult) -> str:
    """One sentence on the segment that is largest at the median, and what makes it smaller."""
    assert result.largest
    bar = result.bars["p50"]
    share = bar[result.largest] / (sum(bar.values()) or 1.0)
    return (
        f"{result.workload}, {result.arm}: most of the time, {share:.0%} at the median, goes to {result.largest}. "
        f"To make it less: {TOLD['remedies'][result.largest]}"
    )


def bars_of(results: Sequence[LatencyResult]) -> list[Plot]:
    """For each workload a figure: p50, p90 and p99 of each arm, as stacked bars in milliseconds."""
    names = list(SEGMENTS)
    return [
        stacked(
            f"{workload}: where the time of a request goes",
            [
                (f"{each.arm[-16:]} {share}", [1000 * each.bars[share][name] for name in names])
                for each in results
                if each.workload == workload and each.largest
                for share in SHARES
            ],
            names,
            "ms",
        )
        for workload in dict.fromkeys(each.workload for each in results)
    ]
