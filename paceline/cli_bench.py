"""The command `bench serving`. Options are read here; `commands/` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli_options import (
    Backend,
    Device,
    Drafter,
    Dtype,
    IgnoreEos,
    Json,
    KvMemory,
    MaxLen,
    MaxTokens,
    Option,
    Threads,
    WeightFormat,
    Weights,
    numbers,
)
from paceline.errors import ConfigError

DEFAULTS: dict[str, Any] = {
    "drafter": "default",
    "max_batch": 8,
    "max_len": None,
    "kv_memory": None,
    "dtype": "auto",
    "backend": "auto",
    "weight_format": "auto",
    "device": "auto",
    "threads": None,
    "weights": "checkpoint",
}
"""Options of the servers that are started."""


def bench_serving(
    url: Annotated[
        str | None, Option(help="A server that runs, such as http://127.0.0.1:8000 [default: start own ones].")
    ] = None,
    model: Annotated[str | None, Option("--model", help="Which model to serve; with --url, what the server calls it.")] = None,
    api_key_file: Annotated[Path | None, Option(help="File with the server's key; else PACELINE_API_KEY.")] = None,
    speculate: Annotated[
        str | None, Option(help="Contenders, comma-separated: off, auto, full, or a number of drafts [default: off,auto].")
    ] = None,
    concurrency: Annotated[
        str | None, Option(help="Closed loops: requests in flight, comma-separated [default: 1,2,4,8,16, or none with --rate].")
    ] = None,
    rate: Annotated[
        str | None, Option(help="Open loops: requests a second at random times (Poisson), comma-separated.")
    ] = None,
    requests: Annotated[
        int | None, Option(help="Requests of each pass [default: every prompt, 4 for each in flight, 10 s of a rate].")
    ] = None,
    prompts: Annotated[str | None, Option(help="JSON lines, Parquet or data set id [default: a small built-in set].")] = None,
    limit: Annotated[int | None, Option(help="Only the first prompts.")] = None,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, Option(help="0 is greedy; only then texts are compared.")] = 0.0,
    ignore_eos: IgnoreEos = False,
    seed: Annotated[int, Option(help="Of arrival times, and base of the requests' seeds.")] = 0,
    repeat: Annotated[int, Option(help="Repetitions; contenders take turns at each load.")] = 1,
    timeout: Annotated[float, Option(help="Seconds after which a request has failed.")] = 600.0,
    out: Annotated[Path | None, Option(help="Run folder [default: runs/bench-serving-<time>].")] = None,
    drafter: Drafter = "default",
    max_batch: Annotated[int, Option(help="Requests that a started server decodes together.")] = 8,
    max_len: MaxLen = None,
    kv_memory: KvMemory = None,
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    weight_format: WeightFormat = "auto",
    device: Device = "auto",
    threads: Threads = None,
    weights: Weights = "checkpoint",
    as_json: Json = False,
) -> None:
    """A server under load, speculation off and on taking turns: first token, inter-token and inter-chunk times, throughput.

    Without --url it starts a paceline server for each contender, all at once, and needs memory for each; with --url each
    request says which contender it is, and other OpenAI-compatible servers are measured as they are. The client keeps
    bytes and reads them after the pass, but it shares the processor with a server on the same machine: the report says how
    much of a core it took. More prompts than the server has rows keep its prefix cache out of the first token's time.

    Example: paceline bench serving --concurrency 1,8 --limit 8 --max-tokens 64

    Example: paceline bench serving --url http://127.0.0.1:8000 --rate 0.5,2,8 --repeat 3
    """
    _bench_serving(dict(locals()))


def _bench_serving(given: dict[str, Any]) -> None:
    from paceline.bench.config import ServingConfig
    from paceline.commands.bench_serving import ServingAsk, read_key
    from paceline.commands.bench_serving import bench_serving as run

    rates = tuple(numbers("--rate", given["rate"] or ""))
    asked = given["concurrency"] if given["concurrency"] is not None else "" if rates else "1,2,4,8,16"
    same = ("max_tokens", "temperature", "seed", "repeat", "ignore_eos")
    config = ServingConfig(
        concurrencies=tuple(int(value) for value in numbers("--concurrency", asked, whole=True)),
        rates=rates,
        num_requests=given["requests"],
        timeout_s=given["timeout"],
        **{name: given[name] for name in same},
    )
    changed = {name: given[name] for name, default in DEFAULTS.items() if given[name] != default}
    if given["url"] and changed:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise ConfigError(f"{names} cannot change a server that runs: leave out either that or --url")
    words = [word for name, value in changed.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--model", given["model"]] if given["model"] and not given["url"] else []
    run(
        ServingAsk(
            config=config,
            speculate=_contenders(given["speculate"]),
            server_words=tuple(words),
            api_key=read_key(given["api_key_file"]),
            **{name: given[name] for name in ("url", "model", "prompts", "limit", "out", "as_json")},
        )
    )


def _contenders(text: str | None) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
    for name in names:
        if name not in ("off", "auto", "full") and not (name.isdecimal() and name.isascii()):
            raise ConfigError(f"--speculate {name!r} is not known: choose from off, auto, full and numbers of drafts")
    if text is not None and not names:
        raise ConfigError("--speculate names no contender: write it as off,auto")
    return names


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    app.command("serving")(bench_serving)
