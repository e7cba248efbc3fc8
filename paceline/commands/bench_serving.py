"""`paceline bench serving`: the options of `paceline.bench.servers`, and its figures as JSON."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.bench.config import ServersConfig, ServingConfig
from paceline.commands.options import Changed, Opt, Without, options
from paceline.commands.shared import Json, Limit, PromptSource
from paceline.commands.terminal import TerminalProgress
from paceline.config import EngineConfig
from paceline.errors import ConfigError

NAMES = Changed(
    concurrencies=Opt("--concurrency"),
    rates=Opt("--rate"),
    num_requests=Opt("--requests"),
    timeout_s=Opt("--timeout"),
)
NOT_ASKED = Without("model", "num_drafted", "plan", "rule", "mocked_tokens_per_round", "prefill_chunk")


@options
def bench_serving(
    servers: Annotated[ServersConfig, Without("words"), Changed(speculate=Opt(comma=True))],
    config: Annotated[ServingConfig, NAMES],
    engine: Annotated[EngineConfig, NOT_ASKED],
    prompts: PromptSource = None,
    limit: Limit = None,
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/bench-serving-<time>].")] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """A server under load, speculation off and on taking turns: first token, inter-token and inter-chunk times, throughput.

    Without --url it starts a paceline server for each contender, all at once, and needs memory for each; with --url each
    request says which contender it is, and other OpenAI-compatible servers are measured as they are. The client keeps
    bytes and reads them after the pass, but it shares the processor with a server on the same machine: the report says how
    much of a core it took. More prompts than the server has rows keep its prefix cache out of the first token's time.

    Example: paceline bench serving --concurrency 1,8 --limit 8 --max-tokens 64

    Example: paceline bench serving --url http://127.0.0.1:8000 --rate 0.5,2,8 --repeat 3
    """
    words = words_of(engine)
    if servers.url and words:
        raise ConfigError(f"{', '.join(words[::2])} cannot change a server that runs: leave out either that or --url")
    if servers.model and not servers.url:
        words += ("--model", servers.model)
    from paceline.bench import servers as library

    return library.bench_serving(replace(servers, words=words), config, prompts, limit, out, TerminalProgress())


def words_of(engine: EngineConfig) -> tuple[str, ...]:
    """The settings that are not the default, as options of `paceline serve`."""
    defaults = EngineConfig()
    changed = {each.name: getattr(engine, each.name) for each in fields(engine)}
    changed = {name: value for name, value in changed.items() if value != getattr(defaults, name)}
    return tuple(word for name, value in changed.items() for word in (f"--{name.replace('_', '-')}", str(value)))
