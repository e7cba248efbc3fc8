"""Converts a DFlash drafter's config between vLLM's `speculators` format (0.9.0) and z-lab's.

    speculators                            z-lab
    transformer_layer_config.*             the same keys, at the top level
    aux_hidden_state_layer_ids             dflash_config.target_layer_ids + 1: hidden_states[id], 0 is the embedding
    mask_token_id, block_size              dflash_config.mask_token_id, block_size
    sliding_window_non_causal              is_causal: false; full layers are never causal (`export.py` on vLLM)
    sample_from_anchor                     the same
    conv_*, selector_* (dflash2)           dflash_config.*
    markov_*, *confidence_head* (dspark)   dflash_config.*
    draft_vocab_size, d2t, t2d, lm_head    not in z-lab's own code: the draft vocabulary (`vocabulary.py`)

Keys without a counterpart are stored under `z_lab` or `speculators`, so that converting back restores every key. The
mapping is that of PyPI's `speculators` 0.9.0 (Apache 2.0); `experiments/interop.py` compares with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.draft.dflash.config import MARKOV_KEYS, DFlash2Sizes, DFlashConfig
from paceline.draft.dflash2.codebooks import BOOKS
from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.config.decoder import is_whole, short
from paceline.model.config.values import check_flags, part

log = logging.getLogger("paceline.draft")
KINDS = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
"""Value of speculators_model_type -> architecture; both are in a config.json of `speculators`."""
VERSION = "0.9.0"
OUTSIDE = (
    "architectures",
    "auto_map",
    "block_size",
    "dflash_config",
    "num_target_layers",
    "speculators",
    "draft_vocab_size",
)
"""Keys of z-lab's config.json that are not part of the decoder's config."""
OWN = (
    "speculators_model_type",
    "architectures",
    "transformer_layer_config",
    "aux_hidden_state_layer_ids",
    "block_size",
)
OWN += ("mask_token_id", "sliding_window_non_causal", "sample_from_anchor", "draft_vocab_size", "z_lab")
"""Keys of a `speculators` config.json that correspond to keys in z-lab's format."""
ADDED: dict[str, tuple[str, ...]] = {"dflash": (), "dflash2": (*DFlash2Sizes.__slots__,), "dspark": MARKOV_KEYS}
"""Kind -> keys of its config.json that no other kind has."""
MARKOV_NAMES = {f"markov_head.{book}": f"markov_head.markov_w{place}.weight" for place, book in enumerate(BOOKS, 1)}
"""Names of a DSpark drafter's codebooks, here -> in a file of `speculators`."""
DEFAULTS: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
"""Default values of Transformers' Qwen3Config, for keys that a config may omit."""


def to_z_lab(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Converts a config.json (`raw`) from the format of `speculators` to z-lab's. `path`: its name in error messages.
    Raises UnsupportedModelError for another drafting method or an unsupported setting, ModelFileError for a missing or
    invalid key."""
    kind = str(raw.get("speculators_model_type"))
    if kind not in KINDS:
        raise UnsupportedModelError(
            f"{path}: drafters of speculators_model_type {kind!r} are not implemented in speculators format: "
            f"give one of {', '.join(KINDS)}"
        )
    layer, z_lab = raw.get("transformer_layer_config"), part(dict(raw), path, "z_lab")
    if not isinstance(layer, dict):
        raise ModelFileError(f"{path}: transformer_layer_config must be an object: correct config.json")
    ids = raw.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not ids or not all(map(is_whole, ids)):
        raise ModelFileError(
            f"{path}: aux_hidden_state_layer_ids must be a list of layers (got {short(ids)}): correct config.json"
        )
    if 0 in ids:
        raise UnsupportedModelError(
            f"{path}: aux_hidden_state_layer_ids 0 is the target's embedding, which is never tapped here"
        )
    _check_sizes(raw, layer, path)
    check_flags(dict(raw), path, ("sliding_window_non_causal", "sample_from_anchor"))
    nested = {**part(z_lab, path, "dflash_config"), "target_layer_ids": [each - 1 for each in ids]}
    if raw.get("mask_token_id") is not None:
        nested["mask_token_id"] = raw["mask_token_id"]
    nested |= {name: raw[name] for name in ADDED[kind] if name in raw}
    converted = {**DEFAULTS, **layer, "model_type": "qwen3", "architectures": [KINDS[kind]]}
    converted |= {name: value for name, value in z_lab.items() if name in OUTSIDE}
    converted["dflash_config"] = nested
    (nested if "block_size" in nested else converted)["block_size"] = raw.get("block_size", 8)
    converted |= _causality(converted, bool(raw.get("sliding_window_non_causal", kind == "dflash2")), path)
    if raw.get("sample_from_anchor", kind == "dspark"):
        (nested if "sample_from_anchor" in nested else converted)["sample_from_anchor"] = True
    rest = {name: value for name, value in raw.items() if name not in (*OWN, *ADDED[kind])}
    rest |= {"model_type": layer["model_type"]} if layer.get("model_type", "qwen3") != "qwen3" else {}
    return {**converted, **({"speculators": rest} if rest else {})}


def _causality(layer: dict[str, Any], is_non_causal: bool, path: Path) -> dict[str, Any]:
    """z-lab's is_causal: only sliding-window layers may be causal. Removes is_causal from `layer`, where a converter
    may have left it without effect."""
    types, is_causal_key = layer.get("layer_types"), layer.pop("is_causal", None)
    has_window = layer.get("use_sliding_window") is True and layer.get("sliding_window") is not None
    is_causal = has_window and not is_non_causal
    if is_causal_key is not None and is_causal_key is not is_causal and has_window:
        log.warning(
            "%s: is_causal %s in transformer_layer_config, which sliding_window_non_causal contradicts",
            path,
            is_causal_key,
        )
    if isinstance(types, list) and "sliding_attention" in types and not is_causal:
        return {"is_causal": False}
    return {} if is_causal_key is None or is_causal_key is not is_causal else {"is_causal": is_causal_key}


def from_z_lab(
    config: DFlashConfig, settings: Mapping[str, Any], verifier: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """Converts a drafter's config.json from z-lab's format to that of `speculators`. `settings`: entries of the result
    that z-lab's format may lack or names differently, such as draft_vocab_size. `verifier`: the target's name_or_path
    and architectures; unknown values may be missing or empty. `dtype`: data type of the weights, such as "bfloat16"."""
    raw, kind = config.raw, config.kind
    own_keys = dict(raw.get("speculators") or {})
    layer = {name: value for name, value in raw.items() if name not in OUTSIDE}
    layer["model_type"] = own_keys.pop("model_type", "qwen3")
    outside = {name: raw[name] for name in ("auto_map", "num_target_layers", "dflash_config") if name in raw}
    proposal = proposal_config(own_keys.pop("speculators_config", None), kind, config.num_slots, verifier)
    nested = raw.get("dflash_config") or {}
    return {
        "architectures": [KINDS[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "dtype": dtype,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        **own_keys,
        "speculators_config": proposal,
        "transformer_layer_config": layer,
        **settings,
        **{name: nested[name] for name in ADDED[kind] if name in nested},
        **({"z_lab": outside} if outside else {}),
    }


def with_our_names(tensors: Mapping[str, Tensor], ids: Tensor | None, vocab_size: int | None) -> dict[str, Tensor]:
    """Returns a DSpark drafter's tensors with the two codebooks renamed from the format of `speculators` to paceline's
    names. If `successor_codebook` has rows only for the draft vocabulary `ids`, it is expanded to `vocab_size` rows,
    with zeros for all other tokens."""
    ours = {name: own for own, name in MARKOV_NAMES.items()}
    renamed, second = {ours.get(name, name): tensor for name, tensor in tensors.items()}, f"markov_head.{BOOKS[1]}"
    if second in renamed and ids is not None and vocab_size and len(renamed[second]) == len(ids):
        whole_VR = renamed[second].new_zeros(vocab_size, renamed[second].shape[1])
        renamed[second] = whole_VR.index_copy_(0, ids, renamed[second])
    return renamed


def with_their_names(tensors: Mapping[str, Tensor], ids: Tensor | None) -> dict[str, Tensor]:
    """Returns a DSpark drafter's tensors with the two codebooks renamed from paceline's names to those of
    `speculators`. `successor_codebook` keeps only the rows for the draft vocabulary `ids`; None: all rows."""
    second = f"markov_head.{BOOKS[1]}"
    narrowed = {second: tensors[second][ids]} if second in tensors and ids is not None else {}
    return {MARKOV_NAMES.get(name, name): tensor for name, tensor in {**tensors, **narrowed}.items()}


def proposal_config(
    config: Mapping[str, Any] | None, algorithm: str, num_drafted: int, verifier: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the entry speculators_config of a config.json, which names the drafting method, its number of drafts and
    the target. `verifier`: the target's name_or_path and architectures; unknown values may be missing or empty.

    `config`: the entry of an existing config.json, which is returned with only the target updated. None: a new entry is
    made, for `num_drafted` greedy drafts by the method `algorithm`, such as "eagle3".
    """
    method = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": num_drafted,
        "verifier_accept_k": 1,
    }
    config = config or {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"architectures": [], "name_or_path": None},
    }
    known = {name: value for name, value in verifier.items() if value}
    return {**config, "verifier": {**(config.get("verifier") or {}), **known}}


def _check_sizes(raw: Mapping[str, Any], layer: Mapping[str, Any], path: Path) -> None:
    other = [name for name in ("hidden_size", "num_hidden_layers", "num_attention_heads") if name not in layer]
    if layer.get("model_type", "qwen3") != "qwen3" and other:
        raise ModelFileError(
            f"{path}: transformer_layer_config of model_type {layer['model_type']} lacks {other[0]}: write it in "
            "config.json"
        )
    width, hidden = raw.get("target_hidden_size"), layer.get("hidden_size", DEFAULTS["hidden_size"])
    if width not in (None, hidden):
        raise UnsupportedModelError(
            f"{path}: target_hidden_size {short(width)} beside a drafter's hidden_size {short(hidden)} is not "
            "implemented"
        )
