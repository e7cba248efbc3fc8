"""Library call of `bench serving`: finds or starts servers, and measures them under load.

    line = bench_serving(ServersConfig(url="http://127.0.0.1:8000"), ServingConfig(concurrencies=(1, 8)))

The results are in report.md and report.html of the run folder.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.bench.config import BUILTIN_PROMPTS, ServersConfig, ServingConfig
from paceline.bench.serving.latency import LatencyResult
from paceline.bench.serving.load import BASELINE, Contender, Pass, ServingBench, ServingResult
from paceline.config import read_api_keys
from paceline.data.prompts import read_prompts
from paceline.errors import ConfigError
from paceline.net.streaming import Client, served_model
from paceline.report.pages import LOAD_PLOTS, LoadPlot, load_plots, render, write_load_report
from paceline.report.statistics import LOAD_GAIN, Tone, tone_of
from paceline.report.tables import SILENT, Column, Progress, Table, flat, spread_column
from paceline.runs.folder import RunFolder
from paceline.simulate.server.load import Arrivals

CONTENDERS = (BASELINE, "auto")
OWNER = "paceline"
"""Value of `owned_by` in /v1/models that identifies a paceline server, which supports the request fields `speculate`
and `return_metrics`."""
STOP_SECONDS = 40
"""Seconds after which a started server that does not exit is killed."""

ANSWERS = Column(
    "answers", lambda result: f"{result.num_answers}" + (f", {result.num_failed} FAILED" if result.num_failed else "")
)
COLUMNS = (
    Column("load", lambda result: result.load),
    Column("speculate", lambda result: result.speculate),
    ANSWERS,
    Column("tokens/s", lambda result: result.tokens_per_s, "{:.1f}", "right"),
    Column("range", lambda result: "{:.0f} to {:.0f}".format(*result.tokens_per_s_range), align="right"),
    Column("speed-up", lambda result: _speedup_cell(result), align="right"),
    spread_column("first token ms", lambda result: result.first_token, 1000, 0),
    spread_column("inter-token ms", lambda result: result.inter_token, 1000, 1),
    spread_column("inter-chunk ms", lambda result: result.inter_chunk, 1000, 1),
    spread_column("whole s", lambda result: result.total, 1, 2),
    Column("tokens/round", lambda result: result.tokens_per_round, "{:.2f}", "right"),
    Column("identical", lambda result: result.identical, "{:.0%}", "right"),
    Column("reused", lambda result: result.reused, "{:.0%}", "right"),
)
NOTE = (
    "Times are p50 / p90 / p99 over the answers of all repetitions. first token and whole count from when a request "
    "was due; inter-token is each answer's mean time between tokens after the first, inter-chunk the time between two "
    "pieces as they came: a piece holds all tokens of a round. tokens/s: output tokens over wall time, median over "
    "repetitions. speed-up: mean time of an answer with speculation off over the one here. identical: texts equal to "
    "those with speculation off. reused: prompt tokens that the server found in its cache; much of it makes first "
    "tokens early."
)
"""Explanation of the columns, for the reports."""


def bench_serving(
    servers: ServersConfig,
    config: ServingConfig,
    prompts: str | None = None,
    limit: int | None = None,
    out: Path | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Measure a server under load and write the report. `prompts`: file or data set id [default: the built-in set];
    `limit`: use only the first prompts. Returns the command's JSON output; "run" is the run folder.

    Raises PromptError for missing prompts, DownloadError if a running server does not answer, ModelNotFoundError if it
    does not serve the model, and ConfigError for a server that cannot be started, a wrong key, and if every request
    failed."""
    prompt_list = read_prompts(prompts or BUILTIN_PROMPTS, limit)
    key = key_of(servers.api_key_file)
    described: dict[str, Any] = {
        "bench": config,
        "url": servers.url,
        "model": servers.model,
        "speculate": servers.speculate or (),
        "server": servers.words,
        "prompts": prompts or "built-in",
        "limit": limit,
    }
    with contextlib.ExitStack() as stack:
        if servers.url:  # first, so that a wrong URL creates no run folder
            name, contenders = _running(servers, servers.url, key, config.timeout_s)
            run = RunFolder.create("bench-serving", described, out)
        else:
            run = RunFolder.create("bench-serving", described, out)
            name, contenders = stack.enter_context(_started(servers, key, config.timeout_s, run.path, progress))
        progress.say(f"{name}: " + ", ".join(f"{contender.name} at {contender.client.url}" for contender in contenders))
        bench = ServingBench(contenders, name, prompt_list, config)
        with progress.bar("serving", bench.num_answers) as advance:
            bench.run(
                on_answer=lambda load, speculate: advance(f"{load}, speculate {speculate}"),
                on_pass=lambda load, speculate, done: _log(run, bench, load, speculate, done),
            )
    results = bench.results()
    line = {
        "results": results,
        "model": name,
        "url": servers.url,
        "max_tokens": config.max_tokens,
        "repeat": config.repeat,
    }
    run.results(line)
    _report(run, bench, results, name, described, progress)
    refuse_failed(results)
    return {**line, "run": run.path}


def _speedup_cell(result: ServingResult) -> str | None:
    return f"{result.speedup:.2f}x" if result.speedup is not None else result.doubt and "busy: repeat"


def key_of(file: Path | None) -> str | None:
    """Return the API key for the servers: the first one in `file` or, without a file, in the environment variable
    PACELINE_API_KEY; None without both. The key is kept out of the settings, because these are stored in the run
    folder."""
    return next(iter(read_api_keys((), file)), None)


def refuse_failed(results: Sequence[ServingResult] | Sequence[LatencyResult]) -> None:
    """Raise ConfigError with the first reason if every request failed: there is nothing to report then."""
    if all(result.num_failed == result.num_answers for result in results):
        raise ConfigError(f"every request failed, first with: {next(iter(results[0].failures))}")


def _is_gain(result: ServingResult) -> bool:
    return result.speculate != "off" and bool(result.speedup) and not result.doubt


def _tone(results: list[ServingResult]) -> Tone:
    if any(result.num_failed or not result.lossless for result in results):
        return "bad"
    return tone_of([result.speedup for result in results if _is_gain(result) and result.speedup], LOAD_GAIN)


def _verdict(results: list[ServingResult]) -> str:
    gains = [(result.speedup, result.speculate, result.load) for result in results if _is_gain(result)]
    num_failed = sum(result.num_failed for result in results)
    num_answers = sum(result.num_answers for result in results)
    doubted = [result for result in results if result.doubt]
    lines = [f"No verdict on the speed-up ({result.speculate}, {result.load}): {result.doubt}." for result in doubted]
    if not all(result.lossless for result in results):
        mocked = (
            "the server mocks acceptance: its times are those of a drafter that does not exist, its texts mean nothing"
        )
        lines.insert(0, f"NOT LOSSLESS: {mocked}.")
    if gains or not doubted:
        lines.append(render("load_verdict.txt", gains=gains, num_failed=num_failed, num_answers=num_answers).rstrip())
    elif num_failed:
        lines.append(f"{num_failed} of {num_answers} answers failed: see Failures before anything else.")
    return "\n".join(lines)


def _report(
    run: RunFolder,
    bench: ServingBench,
    results: list[ServingResult],
    model: str,
    settings: dict[str, Any],
    progress: Progress,
) -> None:
    by_load = [(result.load.rate, result.load.concurrency, result.speculate, result) for result in results]
    figures = Table(COLUMNS, results, width=190)
    config, busiest = bench.config, max(result.client_cpu for result in results)
    late_s = max(result.late.p99 or 0.0 for result in results)
    sent = (
        f"Up to {config.max_tokens} tokens an answer at temperature {config.temperature:g}, {config.repeat} "
        f"repetitions. This client took at most {100 * busiest:.0f}% of a core; 99% of its requests went out within "
        f"{1000 * late_s:.1f} ms of their time."
    )
    failures = [
        f"{row.load}, speculate {row.speculate}: {n}x {why}" for row in results for why, n in row.failures.items()
    ]
    verdict = _verdict(results)
    plots = (*LOAD_PLOTS, LoadPlot("Time of an answer", "s", lambda result: result.total))
    notice = write_load_report(
        run,
        lambda: load_plots(plots, by_load),
        title=f"Serving under load: {model}",
        verdict=verdict,
        tone=_tone(results),
        about=sent,
        note=NOTE,
        figures=figures,
        listed={"Failures": failures},
        settings=flat(settings),
    )
    progress.table(figures)
    progress.say(f"{sent}\n{verdict}")
    for text in (*(f"FAILED: {failure}" for failure in failures), *([notice] if notice else [])):
        progress.say(text)
    progress.say(f"report, figures and raw answers: {run.path}")


def _log(run: RunFolder, bench: ServingBench, load: Arrivals, speculate: str, done: Pass) -> None:
    repetition = len(bench.passes[load, speculate]) - 1
    common = {**asdict(load), "speculate": speculate, "repetition": repetition, "wall_s": done.wall_s}
    if done.steps:
        run.log(**common, steps=done.steps)
    for index, answer in enumerate(done.answers):
        figures = {key: value for key, value in asdict(answer).items() if key != "text"}
        figures["chunk_gaps_s"] = [round(gap, 6) for gap in answer.chunk_gaps_s]
        run.log(**common, request=index, **figures)


def _running(servers: ServersConfig, url: str, key: str | None, timeout_s: float) -> tuple[str, list[Contender]]:
    name, is_ours = look(url, key, servers.model)
    client = Client(url, key, timeout_s)
    if not is_ours:
        if servers.speculate:
            raise ConfigError(f"{url} is no paceline server and knows nothing of --speculate: leave it out")
        return name, [Contender("as it is", client)]
    contenders = [
        Contender(name, client, {"return_metrics": True, "speculate": int(name) if name.isdecimal() else name})
        for name in servers.speculate or CONTENDERS
    ]
    return name, contenders


def look(url: str, key: str | None, model: str | None) -> tuple[str, bool]:
    """Ask the server at `url` for its models. Returns (name of the model to use, True if it is a paceline server).
    `key`: API key. `model`: the name to use; None selects the first one that the server lists. Raises DownloadError if
    the server does not answer, ModelNotFoundError if it does not list `model`, and ConfigError for a wrong key, or if
    `model` is None and the server lists no model."""
    with contextlib.closing(Client(url, key, timeout_s=30)) as client:
        name, owner = served_model(client, model, "--model")
    return name, owner == OWNER


@contextlib.contextmanager
def _started(
    servers: ServersConfig, key: str | None, timeout_s: float, folder: Path, progress: Progress
) -> Iterator[tuple[str, list[Contender]]]:
    """Start a server for each contender, and yield (name of the model, contenders)."""
    names = servers.speculate or CONTENDERS
    with started([(name, ("--speculate", name, *servers.words)) for name in names], folder, progress) as urls:
        model, _ = look(urls[0], key, None)
        fields = {"return_metrics": True}
        yield (
            model,
            [Contender(name, Client(url, key, timeout_s), fields) for name, url in zip(names, urls, strict=True)],
        )


@contextlib.contextmanager
def started(named: Sequence[tuple[str, Sequence[str]]], folder: Path, progress: Progress) -> Iterator[list[str]]:
    """Context manager that starts one `paceline serve` process for each pair (name, options) of `named`. Yields their
    URLs in the same order, and stops the servers at the end. Their logs are the files server-NAME.log in `folder`.
    Raises ConfigError if a server cannot be started.

    Servers start one after the other: each times its own passes when it starts, which another starting server would
    disturb. An idle server uses no processor time."""
    processes: list[subprocess.Popen[bytes]] = []
    urls: list[str] = []
    try:
        for number, (name, options) in enumerate(named, start=1):
            log = folder / f"server-{name}.log"
            progress.say(f"starting server {number} of {len(named)}, {' '.join(options[:2])} (its words: {log})")
            words = [sys.executable, "-m", "paceline", "serve", "--port", "0", *options]
            with log.open("wb") as out:
                processes.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out))
            urls.append(_ready(processes[-1], log))
        yield urls
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            process.wait()


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the URL of a server once it has loaded its model. Raises ConfigError with its last log line if it exits
    first."""
    while process.poll() is None:
        match = re.search(r"listening on (http://\S+),", log.read_text(errors="replace"))
        if match and _answers(match.group(1) + "/ready"):
            return match.group(1)
        time.sleep(0.1)
    words = log.read_text(errors="replace").split("error: ")[-1].strip().splitlines()
    raise ConfigError(f"a server could not be started: {words[-1] if words else 'it said nothing'}")


def _answers(url: str) -> bool:
    with contextlib.closing(Client(url, timeout_s=10)) as client, contextlib.suppress(OSError):
        return client.get("").status == 200
    return False
