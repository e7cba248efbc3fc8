"""Commands of `paceline bench`: decode, steps, lossy, serving and latency."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.bench.config import (
    ArmsConfig,
    BenchConfig,
    LatencyConfig,
    LossyConfig,
    MockConfig,
    ServersConfig,
    ServingConfig,
    StepsConfig,
)
from paceline.commands.options import Changed, Only, Opt, Without, given, options
from paceline.commands.shared import MOCK, NO_MOCKS, Json, Limit, PromptSource, TerminalProgress, say, starting
from paceline.config import EngineConfig
from paceline.errors import ConfigError, refuse
from paceline.runs.folder import write_whole

NAMES = Changed(
    drafters=Opt(comma=True),
    batches=Opt("--batch"),
    temperatures=Opt("--temperature"),
    seed=Opt(default=None, help="Seed of the first request; the others count up from it. Without, seeds are random."),
)
MOCK_NAMES = Changed(
    tokens_per_round=Opt("--mock-tokens-per-round", default=()),
    prompt_tokens=Opt("--mock-prompt-tokens"),
    trees=Opt("--mock-trees"),
    marginals=Opt("--mock-marginals"),
)
MEASURED = Opt(help="The same as --drafter of generate; random-dflash takes the draft lengths to measure.")
ONLY_MOCKED = {"--mock-prompt-tokens", "--mock-marginals"}
NOT_MOCKED = {
    *("--prompts", "--limit", "--against", "--save-results", "--mock", "--temperature", "--seed", "--ignore-eos"),
    *("--marginals", "--speculate", "--trees", "--rule"),
}
"""Options of `bench decode` without effect on rounds with mocked acceptance."""

LOAD_NAMES = Changed(
    concurrencies=Opt("--concurrency"), rates=Opt("--rate"), num_requests=Opt("--requests"), timeout_s=Opt("--timeout")
)
NO_SERVER = Without("max_batch", "kv_memory", "prefill_chunk")
NOT_STARTED = Without("model", "num_drafted", "speculate", "rule", "prefill_chunk")


@options
def bench_decode(
    engine: Annotated[
        EngineConfig, NO_SERVER, Without("drafter", "num_drafted", "mocked_survival", "mocked_marginals"), MOCK
    ],
    config: Annotated[BenchConfig, NAMES],
    mocked: Annotated[MockConfig, Only("tokens_per_round", "prompt_tokens", "trees", "marginals"), MOCK_NAMES],
    prompts: PromptSource = None,
    limit: Limit = None,
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/bench-decode-<time>].")] = None,
    save_results: Annotated[
        Path | None, typer.Option(help="Also write figures and raw runs to this JSON file or folder.")
    ] = None,
    as_json: Json = False,
    context: typer.Context = None,  # pyright: ignore[reportArgumentType]  (typer gives it)
) -> dict[str, Any]:
    """Measure decoding speed and acceptance.

    Measures every combination of drafter, temperature and batch size on the prompts. Each speed is compared with that
    of plain decoding in the same process.

    Examples:
      paceline bench decode --limit 4 --drafters none,ngram --batch 1,4 \\
        --max-tokens 64
    """
    starting(engine.model)
    from paceline.bench import runs

    names = given(context, "COMMANDLINE")
    written = {param.opts[0] for param in context.command.params if param.name in names}
    if mocked.tokens_per_round or mocked.trees:
        unused = ", ".join(sorted(written & NOT_MOCKED))
        drafter, *more = [name for name in config.drafters if name not in ("none", "default")] or [mocked.drafter]
        if unused:
            raise ConfigError(
                f"{unused} does not go with --mock-tokens-per-round and --mock-trees: leave one of them out"
            )
        if more:
            raise ConfigError("--drafters names several: mocked acceptance measures one drafter")
        same = {name: getattr(config, name) for name in ("batches", "max_tokens", "repeat", "num_drafted")}
        mocked = replace(mocked, drafter=drafter, **same)
        return runs.bench_mock(engine, mocked, out, TerminalProgress())
    unused = ", ".join(sorted(written & ONLY_MOCKED))
    refuse(ConfigError, (bool(unused), f"{unused} needs --mock-tokens-per-round or --mock-trees"))
    line = runs.bench_decode(engine, config, prompts, limit, out, TerminalProgress())
    if save_results:
        name = f"decode_{line['device']}_{time.strftime('%Y-%m-%d')}.json"
        file = save_results if save_results.suffix == ".json" else save_results / name
        write_whole(file, (line["run"] / "results.json").read_text(encoding="utf-8"))
        say(f"results: {file}")
    return line


@options
def bench_steps(
    engine: Annotated[
        EngineConfig, NO_SERVER, NO_MOCKS, Without("num_drafted", "speculate", "rule"), Changed(drafter=MEASURED)
    ],
    config: Annotated[StepsConfig, Changed(batches=Opt("--batch"), max_positions=Opt("--positions"))],
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/bench-steps-<time>].")] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Measure step times for `simulate --calibrate`.

    Measures how long verification, drafting and the rest of a round (host) take, for each batch size and number of
    verified positions per row. Acceptance is mocked: the text is meaningless, but the times are those of real engine
    rounds.

    Examples:
      paceline bench steps --drafter random-dflash --context 256
    """
    starting(engine.model)
    from paceline.bench import runs

    return runs.bench_steps(engine, config, out, TerminalProgress())


@options
def bench_lossy(
    engine: Annotated[EngineConfig, NO_SERVER, NO_MOCKS],
    config: Annotated[LossyConfig, Changed(tasks=Opt(comma=True))],
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/bench-lossy-<time>].")] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Measure the speed-up and the cost of lossy rules.

    Runs plain decoding, lossless speculation and each lossy rule on tasks with a score. Reports, with confidence
    intervals and a Pareto chart: acceptance length, tokens/s, the task's score, mean total variation and KL divergence
    from the model, and the share of tokens that the rule changed. The report says whether any rule is faster than
    lossless speculation. Code in HumanEval answers is executed, with limits of time and memory.

    Examples:
      paceline bench lossy --tasks tickets=heldout.jsonl --limit 20 \\
        --settings "typical:eps=0.3,delta=0.3;lenience:0.5"
    """
    starting(engine.model)
    from paceline.bench import runs

    return runs.bench_lossy(engine, config, out, TerminalProgress())


@options
def bench_serving(
    servers: Annotated[ServersConfig, Without("words"), Changed(speculate=Opt(comma=True))],
    config: Annotated[ServingConfig, LOAD_NAMES],
    engine: Annotated[EngineConfig, NOT_STARTED, NO_MOCKS],
    prompts: PromptSource = None,
    limit: Limit = None,
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/bench-serving-<time>].")] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Measure a server under load, with and without drafts.

    Reports throughput, the time to the first token, and the times between tokens and between chunks of the stream.
    Speculation off and on (or the settings of --speculate) are measured in turns.

    Without --url, one paceline server is started for each setting; all run at the same time, and each needs memory.
    With --url, a running paceline server gets the setting with each request; other OpenAI-compatible servers are
    measured as they are.

    The client uses some CPU time, which a server on the same machine then lacks: the report shows how much. Use more
    prompts than the server can answer at the same time; otherwise its prefix cache shortens the time to the first
    token.

    Examples:
      paceline bench serving --concurrency 1,8 --limit 8 --max-tokens 64
      paceline bench serving --url http://127.0.0.1:8000 --rate 0.5,2,8 --repeat 3
    """
    words = words_of(engine)
    _check_unused(words, servers.url)
    if servers.model and not servers.url:
        words += ("--model", servers.model)
    from paceline.bench.serving import servers as library

    return library.bench_serving(replace(servers, words=words), config, prompts, limit, out, TerminalProgress())


@options
def bench_latency(
    arms: Annotated[ArmsConfig, Without("words"), Changed(drafters=Opt(comma=True), urls=Opt("--url"))],
    config: Annotated[LatencyConfig, Changed(timeout_s=Opt("--timeout"))],
    engine: Annotated[EngineConfig, NOT_STARTED, NO_MOCKS, Without("drafter")],
    workloads: Annotated[
        list[str] | None,
        typer.Option("--workload", help="voice, coding or chat [default: voice, unless there are --prompts]."),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompts", help="A file of prompts, sent one after the other. May be repeated."),
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="JSON schema that answers to --prompts follow.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first requests of each workload.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/bench-latency-<time>].")] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Measure where a request's milliseconds go.

    Splits the latency into communication, host, prefill, drafting and verification, shown as stacked bars. A paceline
    server is started for each drafter; --url measures running servers. Servers that do not report these parts get one
    bar segment for all time in the server. The servers take turns, and each is compared with the first one, request by
    request.

    Examples:
      paceline bench latency --drafters none,default \\
        --workload voice --workload chat
      paceline bench latency --drafters default,runs/tickets/drafter \\
        --prompts tickets_heldout.jsonl
      paceline bench latency --drafters default \\
        --url vllm=http://127.0.0.1:8001 --workload voice
    """
    words = words_of(engine)
    _check_unused(words, not arms.drafters)
    if arms.drafters and arms.model:
        words += ("--model", arms.model)
    from paceline.bench.serving import latency_run

    arms = replace(arms, words=words)
    return latency_run.bench_latency(
        arms, config, workloads or (), prompts or (), schema, limit, out, TerminalProgress()
    )


def _check_unused(words: Sequence[str], is_running: object) -> None:
    """Raises ConfigError if options of a server to be started were given for servers that are running."""
    if is_running and words:
        options = ", ".join(word for word in words if word.startswith("--"))
        raise ConfigError(f"{options} cannot change a server that runs: leave out either that or --url")


def words_of(engine: EngineConfig) -> tuple[str, ...]:
    """Return the options of `paceline serve` that give a server these engine settings, such as ("--model",
    "smollm2-135m"). Default values are left out."""
    defaults, words = EngineConfig(), list[str]()
    for field in fields(engine):
        name, value = field.name.replace("_", "-"), getattr(engine, field.name)
        if value == getattr(defaults, field.name):
            continue
        words += [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return tuple(words)
