"""Commands that measure a drafter. Options are read here; `commands/` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli_options import (
    Backend,
    Device,
    Dtype,
    IgnoreEos,
    Json,
    MaxLen,
    NumDrafted,
    Option,
    Threads,
    WeightFormat,
    numbers,
    settings_of,
)
from paceline.commands.regenerate import regenerate
from paceline.commands.train import train

Prompts = Annotated[list[str] | None, Option(help="JSON lines, Parquet, folder of traces or data set id; may be repeated.")]
Limit = Annotated[int | None, Option(help="Only the first prompts of each source.")]
AnswerTokens = Annotated[int, Option("--max-tokens", help="Longest answer, in tokens.")]


def evaluate(
    drafter: Annotated[str, typer.Argument(help="A drafter's folder, default, ngram, or a hub id.")],
    prompts: Prompts = None,
    limit: Limit = None,
    model: Annotated[str, Option("--model", "--target", help="The model it drafts for.")] = "smollm2-135m",
    batch: Annotated[str, Option(help="Comma-separated numbers of requests in flight.")] = "1,8",
    temperature: Annotated[str, Option(help="Comma-separated; 0 is greedy.")] = "0,1",
    max_tokens: AnswerTokens = 128,
    repeat: Annotated[int, Option(help="Repetitions; figures are medians.")] = 1,
    out: Annotated[Path | None, Option(help="Run folder, a training run's too [default: runs/evaluate-<time>].")] = None,
    num_drafted: NumDrafted = None,
    ignore_eos: IgnoreEos = False,
    seed: Annotated[int, Option(help="Base of the requests' seeds.")] = 0,
    max_len: MaxLen = None,
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    weight_format: WeightFormat = "auto",
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """A drafter in the real engine, against plain decoding: tokens per round, survival, speed-up, texts, set by set.

    Example: paceline evaluate runs/mine/drafter --prompts questions.jsonl --limit 20
    """
    settings = settings_of({**locals(), "drafter": "none", "num_drafted": None, "plan": "fixed"}, model)
    del settings["drafter"]
    batches = tuple(int(value) for value in numbers("--batch", batch, whole=True))
    temperatures = tuple(numbers("--temperature", temperature))
    from paceline.bench.config import BenchConfig
    from paceline.commands.evaluate import EvaluateAsk
    from paceline.commands.evaluate import evaluate as run

    config = BenchConfig(("none",), batches, temperatures, max_tokens, repeat, ignore_eos, (), num_drafted, seed)
    run(EvaluateAsk(drafter, settings, config, tuple(prompts or ()), limit, out, as_json))


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (train, regenerate, evaluate):
        app.command()(command)
