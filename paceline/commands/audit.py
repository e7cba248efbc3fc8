"""`paceline audit`: checks that a server's answers are those of the model it claims to run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.commands.options import Changed, Only, Opt, options
from paceline.commands.shared import REFUSED, Json, Limit, PromptSource, TerminalProgress, finish, starting
from paceline.config import EngineConfig, read_api_keys
from paceline.loop.audit.config import AuditConfig

FIELDS = Only("model", "dtype", "max_len", "backend", "isa", "weight_format", "device", "threads")
NAMES = Changed(
    model=Opt(help="The model that the server claims to run: built-in name, folder, GGUF file or hub id."),
    dtype=Opt(default="float32", help="Number format of the local reference model."),
)
OPTIONS = Changed(temperatures=Opt("--temperature"), timeout_s=Opt("--timeout"))
STATUS = {"honest": 0, "faulty": 1, "unsure": REFUSED}


@options
def audit(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Address of an OpenAI-compatible server, as http://HOST:PORT.")
    ],
    engine: Annotated[EngineConfig, FIELDS, NAMES],
    config: Annotated[AuditConfig, OPTIONS],
    prompts: PromptSource = None,
    limit: Limit = None,
    api_key: Annotated[str | None, typer.Option(help="Key of the server; also PACELINE_API_KEY.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the key.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/audit-<time>].")] = None,
    as_json: Json = False,
) -> None:
    """Check that an endpoint runs the model it claims to run.

    Loads that model locally and compares the endpoint's answers with it: sampled and greedy texts, log-probabilities,
    stop strings and token counts, and whether a seed makes answers repeatable. Exit status 0: no fault found; 1: a
    fault; 3: undecided, as the server reports too little; 2: an error.

    Examples:
      paceline audit http://localhost:8000 --model smollm2-135m
    """
    key = next(iter(read_api_keys((api_key,) if api_key else (), api_key_file)), None)
    starting(engine.model)
    from paceline.loop.audit.run import audit as library

    done = library(url, engine, config, prompts=prompts, limit=limit, key=key, out=out, progress=TerminalProgress())
    finish(done.as_line(), as_json, STATUS[done.verdict])
