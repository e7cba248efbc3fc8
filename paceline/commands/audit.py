"""`paceline audit`: does a server answer as the model that it claims to be?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import Changed, Only, Opt, options
from paceline.commands.shared import Json, PromptSource, TerminalProgress, starting
from paceline.config import EngineConfig, read_api_keys
from paceline.loop.audit.config import AuditConfig

ASKED = Only("model", "dtype", "max_len", "backend", "isa", "weight_format", "device", "threads")
NAMES = Changed(
    model=Opt(help="The model that the server claims to be: built-in name, folder, GGUF file or hub id."),
    dtype=Opt(default="float32", help="In what the model is computed here. float32 is the reference."),
)
OPTIONS = Changed(temperatures=Opt("--temperature"), timeout_s=Opt("--timeout"))
STATUS = {"honest": 0, "faulty": 1, "unsure": 2}


@options
def audit(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of an OpenAI-compatible server, as http://HOST:PORT.")],
    engine: Annotated[EngineConfig, ASKED, NAMES],
    config: Annotated[AuditConfig, OPTIONS],
    prompts: PromptSource = None,
    limit: Annotated[int | None, typer.Option(help="Only the first prompts.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of the server; also PACELINE_API_KEY.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the key.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/audit-<time>].")] = None,
    as_json: Json = False,
) -> None:
    """Check that an endpoint runs the model it claims to run.

    Sampled and greedy answers, seeds, log-probabilities, stop strings and token counts are compared with the model,
    loaded here. Exit status 0: no fault found, 1: a fault, 2: not judged.

    Examples:
      paceline audit http://localhost:8000 --model smollm2-135m
    """
    key = next(iter(read_api_keys((api_key,) if api_key else (), api_key_file)), None)
    starting(engine.model)
    from paceline.loop.audit.run import audit as library

    done = library(url, engine, config, prompts=prompts, limit=limit, key=key, out=out, progress=TerminalProgress())
    _end(done.as_line(), as_json, STATUS[done.verdict])


def _end(line: dict[str, Any], as_json: bool, status: int) -> None:
    import json

    from paceline.runs.folder import plain

    if as_json:
        print(json.dumps(plain(line)), flush=True)
    if status:
        raise typer.Exit(status)
