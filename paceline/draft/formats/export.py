"""Exports a drafter of the DFlash family: in z-lab's format, vLLM's `speculators` format, or llama.cpp's GGUF.

    export(read_stored(folder), "speculators", out, head_rows=rows,
           verifier={"name_or_path": ..., "architectures": [...]})

Returns descriptions of what a format cannot store. Rejects settings without which another program would silently draft
something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.draft import vocabulary
from paceline.draft.dflash.checkpoint import StoredDrafter, write_checkpoint
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.formats import speculators
from paceline.draft.formats.family import network_of
from paceline.draft.formats.gguf_writer import write_gguf
from paceline.errors import ConfigError, UnsupportedModelError, refuse
from paceline.runs.folder import check_new

FORMATS = ("z-lab", "speculators", "gguf")
HeadRows = Callable[[Tensor], Tensor]
"""Function from token ids [n] to the rows [n, D] of the target's LM head for these tokens."""


def export(
    stored: StoredDrafter,
    form: str,
    out: Path,
    *,
    head_rows: HeadRows | None = None,
    verifier: Mapping[str, Any] | None = None,
    with_vocabulary: bool = True,
    target: Path | None = None,
) -> list[str]:
    """Writes the drafter into a new folder or GGUF file `out`. `form`: "z-lab", "speculators" or "gguf". Returns notes
    for the user: a text for each part that was left out, or that other programs will not read.

    `head_rows`: function (token ids) -> these rows of the target's LM head. Only a drafter that has a draft vocabulary
    but no head of its own needs it. If such a drafter is exported without it, "z-lab" omits the draft vocabulary,
    "gguf" stores it for paceline only, and "speculators" raises ConfigError. Exception: for a DFlash 2 drafter, "z-lab"
    and "speculators" always omit the draft vocabulary.

    Options for one format:

    - `with_vocabulary`, for "z-lab": False omits draft vocabulary and head, for programs that read neither.
    - `verifier`, for "speculators": the target's name_or_path and architectures; unknown values may be missing.
    - `target`, for "gguf": the target's GGUF file, whose tokenizer is copied.

    Raises ModelFileError if tensors and config do not fit each other, ConfigError for an unknown format, a missing head
    or a wrong `target`, UnsupportedModelError for settings that the format cannot express, CacheError if `out` has
    files or cannot be written.
    """
    if form not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}, not {form!r}")
    check_new(out, "file" if form == "gguf" else "folder")
    network_of(stored.config, stored.tensors)  # raises for tensors that do not fit the config
    if stored.config.has_own_width:
        raise UnsupportedModelError(
            "this drafter is of another width than its target, with embeddings of its own: no format that others read "
            "has a place for them; it drafts in paceline alone"
        )
    if stored.config.markov and form != "speculators":
        raise UnsupportedModelError(f"DSpark drafters are not written in the format {form}: use the speculators format")
    if form == "gguf":
        if out.suffix.lower() != ".gguf":
            raise ConfigError(f"--out {out} must be a file that ends in .gguf: programs know the format by it")
        return write_gguf(stored, out, head_rows=head_rows, target=target)
    if form == "z-lab":
        return _as_z_lab(stored, out, head_rows, with_vocabulary)
    return _as_speculators(stored, out, head_rows, verifier or {})


def _as_z_lab(stored: StoredDrafter, out: Path, head_rows: HeadRows | None, with_vocabulary: bool) -> list[str]:
    """Write z-lab's format, with draft vocabulary and head as vLLM reads them (SGLang and the authors' package ignore
    both): the key `draft_vocab_size`, and tensors among the weights."""
    config, left_out = stored.config, list[str]()
    ids, head_VD = stored.vocabulary
    can_say = with_vocabulary and config.second is None and bool(config.vocab_size)
    if ids is not None and not (can_say and (head_VD is not None or head_rows)):
        remedy = "; name the target (--model) to have its head's rows written" if can_say else ""
        left_out.append(
            f"the draft vocabulary of {len(ids)} tokens: others draft among all tokens with the target's head{remedy}"
        )
    if head_VD is not None and not can_say:
        left_out.append("the drafter's own head: others take the target's")
    if left_out:
        ids = head_VD = None
    raw = {name: value for name, value in config.raw.items() if name != "draft_vocab_size"}
    raw |= {} if ids is None else {"draft_vocab_size": len(ids)}
    write_checkpoint(out, raw, {**stored.tensors, **_vocabulary(stored, ids, head_VD, head_rows)})
    return left_out + [f"{name}: the target's own is used" for name in stored.others]


def _vocabulary(
    stored: StoredDrafter, ids: Tensor | None, head_VD: Tensor | None, head_rows: HeadRows | None
) -> dict[str, Tensor]:
    """d2t, t2d and the head's rows for these ids, or the drafter's own head, or nothing; in the weights' dtype."""
    tensors = {} if ids is None else vocabulary.as_tensors(ids, stored.config.vocab_size or 0)
    if head_VD is None and ids is not None and head_rows is not None:
        head_VD = head_rows(ids)
    return tensors if head_VD is None else tensors | {vocabulary.HEAD: head_VD.to(stored.tensors["fc.weight"].dtype)}


def _as_speculators(
    stored: StoredDrafter, out: Path, head_rows: HeadRows | None, verifier: Mapping[str, Any]
) -> list[str]:
    config, left_out = stored.config, list[str]()
    _check_sayable(config)
    ids, head_VD = stored.vocabulary
    if config.second and ids is not None:
        left_out.append(f"the draft vocabulary of {len(ids)} tokens: the format's DFlash 2 drafts among all tokens")
        ids, head_VD = None, None
    if ids is not None and head_VD is None and head_rows is None:
        raise ConfigError(
            f"this drafter drafts among {len(ids)} tokens, and the format wants the target's head for them: name it "
            "(--model)"
        )
    tensors = {**stored.tensors, **_vocabulary(stored, ids, head_VD, head_rows)}
    settings = {
        "draft_vocab_size": (config.vocab_size or 0) if ids is None else len(ids),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "sliding_window_non_causal": _is_non_causal(config),
        "sample_from_anchor": config.from_anchor,
    }
    raw = speculators.from_z_lab(config, settings, verifier, str(tensors["fc.weight"].dtype).removeprefix("torch."))
    write_checkpoint(out, raw, speculators.with_their_names({**tensors, **stored.others}, ids))
    if not verifier.get("name_or_path") and not raw["speculators_config"]["verifier"].get("name_or_path"):
        left_out.append(
            "the target's name, which was not given: vLLM needs it, as --speculative-config has the target elsewhere"
        )
    return left_out


def _is_non_causal(config: DFlashConfig) -> bool:
    """True if no layer with a window is causal, also without windows: vLLM applies the key to full layers too, and
    would draft with untrained causal attention (vllm 56692)."""
    return not any(causal for layer, causal in enumerate(config.is_causal) if config.shape.window(layer))


def _check_sayable(config: DFlashConfig) -> None:
    """Raises UnsupportedModelError for a setting that the format cannot express."""
    if not config.vocab_size:
        raise UnsupportedModelError(
            "config.json has no vocab_size, which the speculators format needs: write the target's in it"
        )
    full = [causal for layer, causal in enumerate(config.is_causal) if not config.shape.window(layer)]
    unsayable = {
        "is_causal on layers without a window": any(full),
        "input_embedding_scale": config.input_embedding_scale != 1.0,
        "output_multiplier": config.output_multiplier != 1.0,
        "final_logit_softcapping": bool(config.final_logit_softcapping),
    }
    text = "the speculators format has no place for {}: others would draft something else; use z-lab's format"
    refuse(UnsupportedModelError, *((is_so, text.format(what)) for what, is_so in unsayable.items()))


def rows_of(head_VD: Tensor) -> HeadRows:
    """Returns a `HeadRows` function (token ids -> rows of the LM head) for a head [V, D] in memory."""
    return lambda ids: head_VD[ids.to(head_VD.device)].to("cpu", torch.float32)
