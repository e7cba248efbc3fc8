"""`paceline export`: a drafter's folder for other programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import options
from paceline.commands.shared import Json, say
from paceline.config import EngineConfig, resolve

if TYPE_CHECKING:
    from paceline.draft.export import HeadRows

Folder = Annotated[
    str, typer.Argument(metavar="DRAFTER", help="A drafter's folder, a hub id, or a built-in model that has one.")
]


@options
def export(
    drafter: Folder,
    out: Annotated[Path, typer.Option(help="A new folder.")],
    form: Annotated[
        str, typer.Option("--format", help="speculators (vLLM), or z-lab (vLLM, SGLang, the authors' package).")
    ] = "speculators",
    model: Annotated[
        str | None, typer.Option(help="The target: its name goes into the config, its head's rows into the file.")
    ] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Write a drafter for other programs: vLLM, SGLang, the authors' package.

    Every command reads any of these formats directly; this is for other programs. speculators has a place for a draft
    vocabulary (d2t, t2d, lm_head): its head's rows are taken from --model. z-lab has none: others then draft among all tokens.
    What the format has no place for is said. Example:
    paceline export runs/mine/drafter --format speculators --model smollm2-135m --out for-vllm
    """
    from paceline.draft.checkpoint import read_stored
    from paceline.draft.export import export as write
    from paceline.draft.registry import folder_of

    folder = folder_of(drafter)
    stored = read_stored(folder)
    rows, verifier = _target(model, needs_head=form == "speculators" and stored.vocabulary.ids is not None)
    left_out = write(stored, form, out, head_rows=rows, verifier=verifier)
    for each in left_out:
        say(f"left out: {each}")
    say(f"{folder} ({stored.form}) is in {out}, in {form} format")
    return {"drafter": str(folder), "from": stored.form, "format": form, "out": str(out), "left_out": left_out}


def _target(model: str | None, needs_head: bool) -> tuple[HeadRows | None, dict[str, Any]]:
    """Rows of the target's head, and what the config says of it."""
    if model is None:
        return None, {}
    from paceline.draft.export import rows_of
    from paceline.hub import BUILTINS
    from paceline.model.checkpoint import config_json
    from paceline.model.target import head_weight
    from paceline.train.ends import light_folder, load_ends

    raw = config_json(light_folder(model))
    builtin = BUILTINS.get(model)
    name = builtin.repo.removesuffix("-GGUF") if builtin and builtin.repo else model
    verifier = {"name_or_path": name, "architectures": raw.get("architectures") or []}
    if not needs_head:
        return None, verifier
    settings = resolve(replace(EngineConfig(), model=model, dtype="float32", device="cpu", max_batch=1, max_len=2))
    return rows_of(head_weight(load_ends(settings))), verifier
