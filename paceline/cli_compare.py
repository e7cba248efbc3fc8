"""The `compare` command. Options are read here; `commands/compare.py` does the work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import paceline
from paceline.cli_options import (
    Backend,
    Device,
    Drafter,
    Dtype,
    IgnoreEos,
    Json,
    MaxLen,
    MaxTokens,
    Mock,
    Model,
    NumDrafted,
    Option,
    Seed,
    Speculate,
    System,
    Temperature,
    Threads,
    WeightFormat,
    Weights,
    settings_of,
)
from paceline.errors import ConfigError, PromptError


def compare(
    prompt: Annotated[str | None, typer.Argument(help="What to ask; - is stdin.")] = None,
    recorded: Annotated[
        Path | None, Option("--from", metavar="RUN_FOLDER", help="Draw a recorded run again; nothing is asked.")
    ] = None,
    model: Model = None,
    drafter: Drafter = "default",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    weight_format: WeightFormat = "auto",
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = 128,
    seed: Seed = None,
    repeat: Annotated[int, Option(help="Answers each way, in turns; the one of median time is kept.")] = 3,
    raw: Annotated[bool, Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: System = None,
    ignore_eos: IgnoreEos = False,
    num_drafted: NumDrafted = None,
    speculate: Speculate = "auto",
    max_len: MaxLen = None,
    threads: Threads = None,
    device: Device = "auto",
    weights: Weights = "checkpoint",
    mock: Mock = None,
    out: Annotated[Path | None, Option(help="Run folder [default: runs/compare-<time>, or that of --from].")] = None,
    svg: Annotated[Path | None, Option(metavar="FILE", help="Also an animated SVG, for a README.")] = None,
    svg_speed: Annotated[
        float | None,
        Option(help="Times as fast as it was, in the SVG: 0.5 is slow motion [default: so that the eye can follow]."),
    ] = None,
    as_json: Json = False,
) -> None:
    """One prompt with speculation off and on, every token at the time it came: a page that replays both side by side.

    The page is one file, compare.html in the run folder; it needs no server and no network.

    Example: paceline compare "Why is the sky blue?" --max-tokens 96 --svg demo.svg
    """
    given = dict(locals())
    from paceline.commands.compare import CompareAsk, show
    from paceline.commands.compare import compare as run

    if recorded is not None:
        if prompt is not None:
            raise ConfigError("--from draws what was recorded: leave the prompt out")
        show(recorded, out, svg, svg_speed, as_json)
        return
    text = _prompt(prompt)
    if raw and system:
        raise ConfigError("--system needs the chat template: leave --raw out")
    if repeat < 1:
        raise ConfigError(f"--repeat must be at least 1, not {repeat}")
    params = paceline.SamplingParams(**{name: given[name] for name in ("temperature", "max_tokens", "seed", "ignore_eos")})
    run(CompareAsk(text, _settings(given), params, system, raw, repeat, out, svg, svg_speed, as_json))


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    if given["drafter"] == "none" or given["speculate"] == "off" or given["num_drafted"] == 0:
        raise ConfigError("nothing to compare without drafts: choose another --drafter, --speculate or --num-drafted")
    return settings_of({**given, "kv_memory": None}, given["model"], max_batch=1)


def _prompt(prompt: str | None) -> str:
    if prompt is None:
        raise PromptError('there is no prompt: give one, as in paceline compare "Why is the sky blue?", or - for stdin')
    text = sys.stdin.buffer.read().decode("utf-8", "replace") if prompt == "-" else prompt
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if not text.strip():
        raise PromptError("the prompt is empty: give some text")
    return text


def add_commands(app: typer.Typer) -> None:
    """Register the command of this module."""
    app.command()(compare)
