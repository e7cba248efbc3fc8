"""The `serve` command. Options are read here; `commands/serve.py` does the work."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli_options import (
    Backend,
    Device,
    Drafter,
    Dtype,
    KvMemory,
    MaxLen,
    Model,
    NumDrafted,
    Option,
    Rule,
    Threads,
    WeightFormat,
    Weights,
    settings_of,
    size,
)
from paceline.errors import ConfigError


def _read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Values of the file become the options' defaults, so that what stands on the command line wins."""
    if path is None:
        return None
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("--config needs PyYAML: pip install 'paceline[serve]'") from error
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path} cannot be read as YAML ({reason})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path} holds no options: write one a line, as in port: 8000")
    known = {name for name in inspect.signature(serve).parameters if name != "config"}
    settings = {str(name).replace("-", "_"): value for name, value in values.items()}
    if unknown := sorted(set(settings) - known):
        raise ConfigError(
            f"--config {path} names {unknown[0]!r}, which is no option of serve: choose from {', '.join(sorted(known))}"
        )
    ctx.default_map = {**(ctx.default_map or {}), **settings}
    return path


Config = Annotated[
    Path | None, Option(callback=_read_config, is_eager=True, help="YAML file of these options; the command line wins.")
]


def serve(
    config: Config = None,
    model: Model = None,
    drafter: Drafter = "default",
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 is every interface.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[list[str] | None, Option(help="Key that opens the API; may be repeated. PACELINE_API_KEY too.")] = None,
    api_key_file: Annotated[Path | None, Option(help="File of keys, one a line.")] = None,
    cors_origin: Annotated[list[str] | None, Option(help="Origin whose pages may call the API; may be repeated.")] = None,
    allowed_host: Annotated[
        list[str] | None, Option(help="Name clients may call the server by; may be repeated [default: on loopback, its names].")
    ] = None,
    served_name: Annotated[list[str] | None, Option(help="What clients call the model; may be repeated.")] = None,
    max_body: Annotated[str, Option(help="Longest request body: 512K, 4M or bytes.")] = "4M",
    max_prompt_tokens: Annotated[int | None, Option(help="Longest prompt [default: what the cache holds].")] = None,
    default_max_tokens: Annotated[
        int | None, Option(help="Longest chat answer when a request sets no limit [default: the context].")
    ] = None,
    max_n: Annotated[int, Option(help="Most answers to one prompt.")] = 8,
    max_queue: Annotated[int, Option(help="Most answers waiting; what comes then gets status 429.")] = 256,
    deadline: Annotated[float, Option(help="Seconds in which a request must be finished; 0 is no limit.")] = 600.0,
    drain_seconds: Annotated[float, Option(help="How long answers under way may take after SIGTERM.")] = 30.0,
    stream_interval_ms: Annotated[
        float, Option(help="How long a token may wait for the next round's, to be sent together; 0 sends each round's at once.")
    ] = 16.0,
    traces: Annotated[Path | None, Option(help="Keep traces of requests in this folder, for training [default: none].")] = None,
    trace_sample: Annotated[float, Option(help="Share of requests that are traced.")] = 1.0,
    trace_redact: Annotated[list[str] | None, Option(help="Regex whose matches are taken out of traces; repeatable.")] = None,
    trace_size: Annotated[str, Option(help="Most disk space of all traces; the oldest go.")] = "1G",
    trace_days: Annotated[float, Option(help="Older traces go.")] = 30.0,
    max_batch: Annotated[int, Option(help="Requests that decode together.")] = 8,
    max_len: MaxLen = None,
    kv_memory: KvMemory = None,
    num_drafted: NumDrafted = None,
    speculate: Annotated[
        str, Option(help="auto: draft as many tokens as pay; full: as many as may; off; or a number, always.")
    ] = "auto",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    weight_format: WeightFormat = "auto",
    device: Device = "auto",
    threads: Threads = None,
    weights: Weights = "checkpoint",
    rule: Rule = "auto",
) -> None:
    """Serve the model to OpenAI clients: chat and text completions, streamed, with a page to try it.

    Example: paceline serve --port 8000
    """
    _serve(dict(locals()))


def _serve(given: dict[str, Any]) -> None:
    from paceline.serve.settings import ServeConfig, read_api_keys, speculation

    if given["traces"] is None and (given["trace_sample"] != 1.0 or given["trace_redact"]):
        raise ConfigError("--trace-sample and --trace-redact need --traces FOLDER")
    speculate = speculation(given["speculate"], given["num_drafted"], given["drafter"])
    settings = settings_of(given | speculate, given["model"])
    same = ("host", "port", "max_prompt_tokens", "default_max_tokens", "max_n", "max_queue", "deadline", "drain_seconds")
    config = ServeConfig(
        **{name: given[name] for name in (*same, "stream_interval_ms")},
        api_keys=read_api_keys(tuple(given["api_key"] or ()), given["api_key_file"]),
        cors_origins=tuple(given["cors_origin"] or ()),
        allowed_hosts=tuple(given["allowed_host"] or ()),
        served_names=tuple(given["served_name"] or ()),
        max_body_bytes=size("--max-body", str(given["max_body"])),
    )
    num_bytes = size("--trace-size", str(given["trace_size"]))
    from paceline.commands.serve import ServeAsk, TraceAsk
    from paceline.commands.serve import serve as run

    redact = tuple(given["trace_redact"] or ())
    traces = given["traces"] and TraceAsk(given["traces"], given["trace_sample"], redact, num_bytes, given["trace_days"])
    run(ServeAsk(settings, config, traces))


def add_commands(app: typer.Typer) -> None:
    """Register the command of this module."""
    app.command()(serve)
