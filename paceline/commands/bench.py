"""`paceline bench decode`, `steps`, `lossy`, `serving` and `latency`: the options of `bench.runs`, `servers`, `latency_run`."""

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
from paceline.commands.options import Changed, Only, Opt, Without, options
from paceline.commands.shared import MOCK, Json, Limit, PromptSource, TerminalProgress, say, starting
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.runs.folder import write_whole

NAMES = Changed(
    drafters=Opt(comma=True),
    batches=Opt("--batch"),
    temperatures=Opt("--temperature"),
    seed=Opt(default=None, help="Base of the requests' seeds; without, each is drawn."),
)
MOCK_NAMES = Changed(
    tokens_per_round=Opt("--mock-tokens-per-round", default=()),
    prompt_tokens=Opt("--mock-prompt-tokens"),
    trees=Opt("--mock-trees"),
    marginals=Opt("--mock-marginals"),
)
MEASURED = Opt(help="As --drafter of generate; random-dflash drafts as many as are measured.")
NO_MOCK = "does not go with --mock-tokens-per-round and --mock-trees: leave one of them out"

LOAD_NAMES = Changed(
    concurrencies=Opt("--concurrency"),
    rates=Opt("--rate"),
    num_requests=Opt("--requests"),
    timeout_s=Opt("--timeout"),
)
NOT_ASKED = Without(
    "model", "num_drafted", "plan", "rule", "mocked_tokens_per_round", "mocked_survival", "mocked_marginals", "prefill_chunk"
)

NO_ENGINE = ("drafter", "max_batch", "kv_memory", "num_drafted", "prefill_chunk", "mocked_survival", "mocked_marginals")


@options
def bench_decode(
    engine: Annotated[EngineConfig, Without(*NO_ENGINE), MOCK],
    config: Annotated[BenchConfig, NAMES],
    mocked: Annotated[MockConfig, Only("tokens_per_round", "prompt_tokens", "trees", "marginals"), MOCK_NAMES],
    prompts: PromptSource = None,
    limit: Limit = None,
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/bench-decode-<time>].")] = None,
    save_results: Annotated[Path | None, typer.Option(help="Also write one JSON file of figures and raw runs, here.")] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Measure decoding speed and acceptance.

    Every combination of prompts, drafters, temperatures and batch sizes is measured, against plain decoding in the
    same process.

    Examples:
      paceline bench decode --limit 4 --drafters none,ngram --batch 1,4 \\
        --max-tokens 64
    """
    starting(engine.model)
    from paceline.bench import runs

    if mocked.tokens_per_round or mocked.trees:
        refused = {
            "prompts": prompts,
            "limit": limit,
            "against": config.against,
            "mock": engine.mocked_tokens_per_round,
            "save-results": save_results,
        }
        for name, value in refused.items():
            if value not in (None, ()):
                raise ConfigError(f"--{name} {NO_MOCK}")
        drafter = next((name for name in config.drafters if name not in ("none", "default")), mocked.drafter)
        same = {name: getattr(config, name) for name in ("batches", "max_tokens", "repeat", "num_drafted")}
        mocked = replace(mocked, drafter=drafter, **same)
        return runs.bench_mock(engine, mocked, out, TerminalProgress())
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
        EngineConfig,
        Without(
            "max_batch",
            "kv_memory",
            "num_drafted",
            "plan",
            "rule",
            "mocked_tokens_per_round",
            "mocked_survival",
            "mocked_marginals",
            "prefill_chunk",
        ),
        Changed(drafter=MEASURED),
    ],
    config: Annotated[StepsConfig, Changed(batches=Opt("--batch"), max_positions=Opt("--positions"))],
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/bench-steps-<time>].")] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Measure step times for `simulate --calibrate`.

    Times verifying, drafting and the host for each number of rows and positions, in turns. Acceptance is mocked: the
    text means nothing, the times are those of the engine's own rounds.

    Examples:
      paceline bench steps --drafter random-dflash --context 256
    """
    starting(engine.model)
    from paceline.bench import runs

    return runs.bench_steps(engine, config, out, TerminalProgress())


@options
def bench_lossy(
    engine: Annotated[
        EngineConfig,
        Without("max_batch", "kv_memory", "prefill_chunk", "mocked_tokens_per_round", "mocked_survival", "mocked_marginals"),
    ],
    config: Annotated[LossyConfig, Changed(tasks=Opt(comma=True))],
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/bench-lossy-<time>].")] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Measure what lossy rules bring and cost.

    Plain decoding, the lossless lane and each setting take turns on tasks with a score. Reports acceptance length,
    tokens/s, mean total variation and divergence from the model, share of tokens changed and the task's score, with
    intervals and a Pareto chart. Where the lossless lane dominates, the report says so. Code of HumanEval answers is
    run, with limits of time and memory.

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
    engine: Annotated[EngineConfig, NOT_ASKED],
    prompts: PromptSource = None,
    limit: Limit = None,
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/bench-serving-<time>].")] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Measure a server under load, with and without drafts.

    Reports first-token, inter-token and inter-chunk times and throughput; the contenders take turns. Without --url a
    paceline server is started for each contender, all at once, and memory is needed for each; with --url each request
    names its contender, and other OpenAI-compatible servers are measured as they are. The client keeps bytes and
    parses them after the pass, but it shares the processor with a server on the same machine: the report says how
    much of a core it took. Use more prompts than the server has rows, so that its prefix cache does not shorten the
    first-token time.

    Examples:
      paceline bench serving --concurrency 1,8 --limit 8 --max-tokens 64
      paceline bench serving --url http://127.0.0.1:8000 --rate 0.5,2,8 --repeat 3
    """
    words = words_of(engine)
    if servers.url and words:
        raise ConfigError(f"{_options_in(words)} cannot change a server that runs: leave out either that or --url")
    if servers.model and not servers.url:
        words += ("--model", servers.model)
    from paceline.bench.serving import servers as library

    return library.bench_serving(replace(servers, words=words), config, prompts, limit, out, TerminalProgress())


@options
def bench_latency(
    arms: Annotated[ArmsConfig, Without("words"), Changed(drafters=Opt(comma=True), urls=Opt("--url"))],
    config: Annotated[LatencyConfig, Changed(timeout_s=Opt("--timeout"))],
    engine: Annotated[EngineConfig, NOT_ASKED, Without("drafter")],
    workloads: Annotated[
        list[str] | None, typer.Option("--workload", help="voice, coding or chat [default: voice, unless there are --prompts].")
    ] = None,
    prompts: Annotated[
        list[str] | None, typer.Option("--prompts", help="A file of prompts, asked one after the other. May be repeated.")
    ] = None,
    schema: Annotated[Path | None, typer.Option(help="JSON schema that answers to --prompts keep to.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many requests of each.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/bench-latency-<time>].")] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Measure where a request's milliseconds go.

    Parts are communication, host, prefill, drafting and verifying, as bars that add up. A paceline server is started
    for each drafter; --url measures running servers. Servers of other engines do not report their parts: their time
    is one part. Variants take turns, and each request is compared with the first variant's.

    Examples:
      paceline bench latency --drafters none,default \\
        --workload voice --workload chat
      paceline bench latency --drafters default,runs/tickets/drafter \\
        --prompts tickets_heldout.jsonl
      paceline bench latency --drafters default \\
        --url vllm=http://127.0.0.1:8001 --workload voice
    """
    words = words_of(engine)
    if not arms.drafters and words:
        raise ConfigError(f"{_options_in(words)} cannot change a server that runs: leave out either that or --url")
    if arms.drafters and arms.model:
        words += ("--model", arms.model)
    from paceline.bench.serving import latency_run

    arms = replace(arms, words=words)
    return latency_run.bench_latency(arms, config, workloads or (), prompts or (), schema, limit, out, TerminalProgress())


def _options_in(words: Sequence[str]) -> str:
    return ", ".join(word for word in words if word.startswith("--"))


def words_of(engine: EngineConfig) -> tuple[str, ...]:
    """The settings that are not the default, as options of `paceline serve`."""
    defaults = EngineConfig()
    changed = {each.name: getattr(engine, each.name) for each in fields(engine)}
    changed = {name: value for name, value in changed.items() if value != getattr(defaults, name)}
    named = [(name.replace("_", "-"), value) for name, value in changed.items()]
    words = [
        (f"--{name}" if value else f"--no-{name}",) if isinstance(value, bool) else (f"--{name}", str(value))
        for name, value in named
    ]
    return tuple(word for pair in words for word in pair)
