"""`paceline serve --engine vllm|sglang`: checks the options and starts another engine with them."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from paceline.commands.options import given
from paceline.commands.shared import say
from paceline.config import EngineConfig
from paceline.errors import ConfigError, refuse
from paceline.loop.adapt.config import OtherEngineConfig
from paceline.serve.settings import ServeConfig

TAKEN = (
    *("config", "model", "drafter", "num_drafted", "dtype", "max_batch", "max_len", "host", "port"),
    *("served_name", "api_key", "api_key_file", "words"),
)
"""Parameters of `serve` that apply to vLLM and SGLang too."""
OTHERS = ("engine_command", "ready_minutes", "check", "expected", "strict")
"""Parameters of `serve` that apply to vLLM and SGLang only."""


def _given(context: typer.Context | None) -> list[str]:
    """Return the options set on the command line or in the --config file; none for a call as a plain function."""
    return [] if context is None else given(context, "COMMANDLINE", "DEFAULT_MAP")


def check_own(words: Sequence[str], context: typer.Context | None) -> None:
    """Check the arguments of `serve` when paceline's own engine runs (no --engine). Raises ConfigError for arguments
    that only vLLM and SGLang can use: `words` (options after `--`), or an option such as --check. `context`: click's
    context of the command; None if called from Python."""
    if words:
        raise ConfigError(f"what is {' '.join(words)!r}? Options behind -- are another engine's: give --engine too")
    for name in _given(context):
        if name in OTHERS:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for another engine: give --engine vllm or sglang, or leave it out"
            )


def serve_with_other(
    engine: EngineConfig,
    serving: ServeConfig,
    other: OtherEngineConfig,
    words: tuple[str, ...],
    context: typer.Context | None,
) -> int:
    """Start vLLM or SGLang, wait until it ends, and return its exit status. It gets the model of `engine`, and the
    drafter and address of `serving`. `words`: further options for vLLM or SGLang. `context`: click's context of the
    command, which lists the options that the user set; None if called from Python. Raises ConfigError for options that
    only paceline's own engine has, for more than one drafter or API key, and for port 0."""
    options = _given(context)
    for name in options:
        if name not in (*TAKEN, *OTHERS, "engine"):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} is our own engine's: give {other.engine} an option of its own behind --, or leave it out"
            )
    drafters = serving.named_drafters()
    refuse(
        ConfigError,
        (len(drafters) > 1, f"{other.engine} has one drafter: give --drafter once"),
        (len(serving.api_keys) > 1, f"{other.engine} has one API key: give one"),
        (serving.port == 0, f"{other.engine} needs a port: give --port"),
    )
    from paceline.loop.adapt.servers.vllm_sglang.drafter_folder import Start
    from paceline.loop.adapt.servers.vllm_sglang.start import serve_with

    start = Start(
        other.engine,
        engine.model,
        next(iter(drafters.values())),
        serving.host,
        serving.port,
        engine.num_drafted,
        engine.dtype,
        engine.max_batch if "max_batch" in options else None,
        engine.max_len,
        serving.served_names,
        next(iter(serving.api_keys), None),
        other.engine_command,
        words,
    )
    return serve_with(start, other, say)
