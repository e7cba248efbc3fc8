"""`paceline export` converts a drafter for other programs; `paceline inspect` describes and checks one."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import Only, options
from paceline.commands.shared import Json, TerminalProgress, say, starting
from paceline.config import EngineConfig, resolve
from paceline.errors import ConfigError, DrafterMismatchError, refuse
from paceline.report.tables import Column, Table

if TYPE_CHECKING:
    from paceline.draft.base import Drafter
    from paceline.draft.dflash.checkpoint import StoredDrafter
    from paceline.draft.eagle3.checkpoint import Eagle3Checkpoint
    from paceline.draft.formats.export import HeadRows

SHOWN = 8
"""Variations (alternative values of a setting) that `inspect` shows in its table; --json lists all."""
Folder = Annotated[
    str,
    typer.Argument(
        metavar="DRAFTER",
        help="A drafter's folder or GGUF file, a hub id, a built-in model with a drafter, or default: that of --model.",
    ),
]


@options
def export(
    drafter: Folder,
    out: Annotated[Path, typer.Option(help="A new folder; for gguf a new file.")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="For DFlash: speculators (vLLM), z-lab (vLLM, SGLang, the authors' package) or gguf (llama.cpp); "
            "for EAGLE-3: "
            "speculators or specforge; for an MTP layer: target, a copy of --model that contains the layer.",
        ),
    ] = "speculators",
    model: Annotated[
        str | None,
        typer.Option(
            help="The target. Its name, its LM head rows and, for gguf, its tokenizer are copied into the files."
        ),
    ] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Convert a drafter for vLLM, SGLang or llama.cpp.

    Every paceline command reads these formats directly; export is for other programs. Settings of the drafter that a
    format cannot express are reported.

    A drafter with a draft vocabulary (part of the target's tokens) is written with the tensors d2t, t2d and lm_head,
    which vLLM reads. If it has no lm_head of its own, give --model: rows of the target's lm_head are copied. Without
    --model, such a drafter cannot be written in the format speculators, and z-lab omits the draft vocabulary.

    The format gguf copies the target's tokenizer if --model is a GGUF file; llama.cpp does not load the drafter without
    the tokenizer.

    Examples:
      paceline export runs/mine/drafter --format speculators \\
        --model smollm2-135m --out for-vllm
      paceline export runs/mine/drafter --format gguf \\
        --model smollm2-135m --out drafter.gguf
      paceline export runs/mtp/drafter --format target \\
        --model path/to/model --out path/to/model-2
    """
    from paceline.draft.dflash.checkpoint import read_stored
    from paceline.draft.formats.export import export as write
    from paceline.draft.registry import folder_of, kind_of
    from paceline.hub import resolve as resolve_model
    from paceline.model.gguf.container import is_gguf

    folder = folder_of(drafter, model)
    kind = kind_of(folder)
    if kind == "mtp" or form == "target":
        return _into_target(folder, form, model, out)
    if kind == "eagle3":
        return _eagle3(folder, form, model, out)
    stored = read_stored(folder)
    ids, head_VD = stored.vocabulary
    has_place = form == "gguf" or stored.config.second is None
    rows, verifier = _target(model, needs_head=ids is not None and head_VD is None and has_place)
    target = resolve_model(model) if model is not None and form == "gguf" else None
    left_out = write(
        stored, form, out, head_rows=rows, verifier=verifier, target=target if target and is_gguf(target) else None
    )
    for setting in left_out:
        say(f"left out: {setting}")
    say(f"{folder} ({stored.form}) is in {out}, in {form} format")
    return {"drafter": str(folder), "from": stored.form, "format": form, "out": str(out), "left_out": left_out}


def _eagle3(folder: Path, form: str, model: str | None, out: Path) -> dict[str, Any]:
    """Write an EAGLE-3 drafter in the format speculators or specforge."""
    from paceline.draft.eagle3.checkpoint import write_eagle3
    from paceline.draft.eagle3.drafter import Eagle3Drafter
    from paceline.runs.folder import check_new

    if form not in ("speculators", "specforge"):
        raise ConfigError(
            f"an EAGLE-3 drafter has no format {form!r}: give --format speculators (vLLM) or specforge (SGLang, "
            "SpecForge)"
        )
    check_new(out)
    checkpoint = Eagle3Drafter.from_folder(folder).stored  # raises for tensors that do not fit the config
    style = "speculators" if "transformer_layer_config" in checkpoint.config.raw else "specforge"
    write_eagle3(out, checkpoint, _target(model, needs_head=False)[1] if form == "speculators" else None)
    say(f"{folder} ({style}) is in {out}, in {form} format")
    return {"drafter": str(folder), "from": style, "format": form, "out": str(out), "left_out": []}


def _into_target(folder: Path, form: str, model: str | None, out: Path) -> dict[str, Any]:
    """Write a copy of the target that contains the MTP layer."""
    from paceline.draft.mtp.checkpoint import read_mtp
    from paceline.draft.mtp.stitch import stitch
    from paceline.draft.registry import kind_of
    from paceline.hub import resolve as resolve_model

    if form != "target" or kind_of(folder) != "mtp" or model is None:
        raise ConfigError(
            "format target, the only one for a trained MTP layer, puts it into a copy of its target: give the folder "
            "that paceline train --drafter-kind mtp wrote, and the target as --model"
        )
    names = stitch(read_mtp(folder), resolve_model(model), out)
    say(f"{out} is {model} with {len(names)} tensors of {folder}: use it as the model, with --drafter mtp")
    return {"drafter": str(folder), "from": "mtp", "format": form, "out": str(out), "written": names}


def _target(model: str | None, needs_head: bool) -> tuple[HeadRows | None, dict[str, Any]]:
    """Return the target's LM head rows (None unless `needs_head`) and its config entry for the speculators format."""
    if model is None:
        return None, {}
    from paceline.draft.formats.export import rows_of
    from paceline.hub import BUILTINS
    from paceline.model.checkpoint import config_json
    from paceline.model.remote_embedding import light_folder, load_ends
    from paceline.model.target import head_weight

    raw = config_json(light_folder(model))
    builtin = BUILTINS.get(model)
    name = (builtin and builtin.base) or model
    verifier = {"name_or_path": name, "architectures": raw.get("architectures") or []}
    if not needs_head:
        return None, verifier
    settings = resolve(replace(EngineConfig(), model=model, dtype="float32", device="cpu", max_batch=1, max_len=2))
    return rows_of(head_weight(load_ends(settings))), verifier


@options
def inspect(
    drafter: Folder,
    engine: Annotated[EngineConfig, Only("dtype", "device", "max_len", "threads")],
    model: Annotated[
        str | None, typer.Option(help="The target: measures the drafter's acceptance length with it.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, max=20, help="Number of built-in prompts to answer.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 48,
    vary: Annotated[
        bool | None,
        typer.Option(
            "--vary/--no-vary", help="Try alternative values of each setting [default: if acceptance is low]."
        ),
    ] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Describe a drafter, and check that it fits a model.

    A drafter whose settings name a wrong layer, mask token or draft position raises no error: it only has a low
    acceptance length. With --model, the acceptance length is measured on greedy answers to built-in prompts. If it is
    below 2.0, other values of the drafter's settings are tried, one at a time, and ranked: layer ids, mask token,
    rotary style and length, window flags, head, anchor position, norm flags.

    Examples:
      paceline inspect runs/mine/drafter --model smollm2-135m
    """
    from paceline.draft.dflash.checkpoint import read_stored
    from paceline.draft.eagle3.checkpoint import read_eagle3
    from paceline.draft.eagle3.drafter import Eagle3Drafter
    from paceline.draft.formats.family import drafter_from
    from paceline.draft.formats.inspection import described, described_eagle3, described_mtp
    from paceline.draft.mtp.drafter import MtpDrafter
    from paceline.draft.registry import folder_of, kind_of

    if model is None:
        usual = EngineConfig()
        given = {"num_prompts": num_prompts != 20, "max_tokens": max_tokens != 48, "vary": vary is not None}
        for name in ("dtype", "device", "max_len", "threads"):
            given[name] = getattr(engine, name) != getattr(usual, name)
        text = "means nothing without --model, which measures: give it"
        refuse(ConfigError, *((is_given, f"--{name.replace('_', '-')} {text}") for name, is_given in given.items()))
    folder = folder_of(drafter, model)
    stored: StoredDrafter | Eagle3Checkpoint | None = None
    kind = kind_of(folder)
    if kind == "mtp":
        module: Drafter = MtpDrafter.from_folder(folder)
        facts = described_mtp(module.layer, folder)
    elif kind == "eagle3":
        stored = read_eagle3(folder)
        module, facts = Eagle3Drafter.from_folder(folder), described_eagle3(stored)
    else:
        stored = read_stored(folder)
        module, facts = drafter_from(stored, folder), described(stored, folder)
    for fact in facts:
        print(f"{fact.what:17s} {fact.value}" + (f"  ({fact.meaning})" if fact.meaning else ""))
    line: dict[str, Any] = {"drafter": str(folder), "kind": kind, "facts": [fact._asdict() for fact in facts]}
    line |= {"target": model, "fits": None, "tokens_per_round": None, "mismatch": None}
    if model is None:
        return line
    engine = replace(engine, model=model, drafter="none", max_batch=8)
    return line | _measured(module, stored, engine, num_prompts, max_tokens, vary)


def _measured(
    drafter: Drafter,
    stored: StoredDrafter | Eagle3Checkpoint | None,
    engine: EngineConfig,
    num_prompts: int,
    max_tokens: int,
    vary: bool | None,
) -> dict[str, Any]:
    """Measure the drafter's acceptance length with the target and, if it is low or `vary` is set, that of each
    variation. An MTP layer (without `stored`) has no variations, because its settings are the target's."""
    starting(engine.model)
    from paceline.engine.llm import LLM
    from paceline.loop.adapt.servers import mismatch

    llm = LLM.of(engine)
    try:
        llm.use_drafter(drafter)
    except DrafterMismatchError as error:
        print(f"{'fits':17s} no  ({error})")
        return {"fits": False, "mismatch": str(error)}
    prompts = [mismatch.encode(llm.tokenizer, prompt) for prompt in mismatch.PROMPTS[:num_prompts]]
    say(f"answering {len(prompts)} prompts")
    requests = mismatch.ask(llm, prompts, max_tokens)
    if not requests:
        raise ConfigError("the target's answers are empty: inspect needs a model that answers the built-in prompts")
    tokens_per_round = mismatch.measure(llm, llm.drafter, requests)
    print(
        f"{'brings':17s} {tokens_per_round:.2f} tokens a round  ({len(requests)} answers, greedy; 1 is plain decoding)"
    )
    line: dict[str, Any] = {"fits": True, "tokens_per_round": tokens_per_round, "num_prompts": len(requests)}
    if stored is None or vary is False or (vary is None and tokens_per_round >= mismatch.LOW):
        return line
    with TerminalProgress().bar("variations", len(list(mismatch.variations(stored, llm.target)))) as advance:
        ranked = mismatch.rank(llm, stored, requests, advance)
    columns = (
        Column("setting", lambda each: each.kind),
        Column("change", lambda each: each.change),
        Column("tokens/round", lambda each: each.tokens_per_round, "{:.2f}", align="right"),
        Column("prompts", lambda each: each.num_prompts, align="right"),
    )
    Table(columns, ranked[: 1 + SHOWN]).show()
    best = mismatch.named(ranked)
    verdict = (
        f"most likely: {best.kind}. {best.change}: {best.tokens_per_round:.2f} tokens a round in place of "
        f"{ranked[0].tokens_per_round:.2f}"
        if best
        else "no single setting mends it: the drafter was hardly trained, or for another target or another kind of text"
    )
    print(verdict)
    return line | {"variations": [asdict(variation) for variation in ranked], "mismatch": best.kind if best else None}
