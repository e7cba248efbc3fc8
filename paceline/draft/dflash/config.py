"""Config of a DFlash, DFlash 2 or DSpark drafter: parses, checks and creates config.json with z-lab's keys.

Defaults are as in the authors' `dflash` package, 0.1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.draft.dflash.packaging import DEEPSPEC, refuse_other_networks, unpacked
from paceline.draft.foresight import Foresight
from paceline.errors import DrafterMismatchError, ModelFileError, UnsupportedModelError
from paceline.model.config.decoder import (
    FAMILIES,
    LARGEST,
    TABLES,
    DecoderConfig,
    decoder_config,
    fraction,
    is_whole,
    short,
    whole,
)
from paceline.model.config.values import check_flags, part
from paceline.model.target import Sizes

ARCHITECTURE, ARCHITECTURE_2, DSPARK = "DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel"


@dataclass(frozen=True, slots=True)
class DFlash2Sizes:
    """Sizes of the parts that DFlash 2 adds to DFlash v1: convolutions, and a candidate selector, which scores the most
    probable tokens of a draft position given the draft before it."""

    conv_kernel_size: int
    """Number of positions that a convolution combines: a position and those before it in the block."""
    conv_group_size: int
    """Number of adjacent channels that share the input-dependent part of the convolution weights."""
    selector_rank: int
    selector_top_k: int
    """Number of candidate tokens per draft position."""


@dataclass(frozen=True, slots=True)
class MarkovSizes:
    """Width and options of the two heads that only DSpark has: a Markov head, and an optional confidence head."""

    rank: int
    """Width of the Markov head's codebooks."""
    has_confidence: bool = True
    confidence_sees_token: bool = True
    """True if the confidence head also reads the previous token's row of the Markov head."""


MARKOV_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
"""Keys of a DSpark drafter's config.json."""


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Config of a DFlash drafter. The drafter is a Qwen3-like decoder without embedding and LM head, which reads hidden
    states of some target layers."""

    shape: DecoderConfig
    """Sizes, RoPE and windows of the draft layers; its `vocab_size` is not used."""
    vocab_size: int | None
    num_target_layers: int | None
    target_layer_ids: tuple[int, ...]
    """Target layers whose hidden states the drafter reads; layer l is Transformers' hidden_states[l + 1]."""
    block_size: int
    mask_token_id: int
    is_causal: tuple[bool, ...]
    """For each draft layer: True if a block position does not attend to later positions of the block. By default only
    sliding-window layers are causal."""
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float
    """Soft cap of the logits; 0: no cap."""
    raw: dict[str, Any]
    """The JSON object of config.json, in z-lab's format."""
    target_hidden_size: int
    """Hidden size of the target. A drafter of another width embeds tokens with the rows of its own LM head."""
    from_anchor: bool = False
    """True if block position k predicts the token after its own position, so that position 0 (the last committed token)
    drafts too; False: the token at its own position. Files call this sample_from_anchor or shift_label."""
    second: DFlash2Sizes | None = None
    """Additional sizes of a DFlash 2 drafter, else None."""
    markov: MarkovSizes | None = None
    """Additional sizes of a DSpark drafter, else None."""
    foresight: Foresight = field(default_factory=Foresight)
    """Parameters of noise-aware drafting, from the key `paceline` of config.json."""

    @property
    def kind(self) -> str:
        """Drafting method: dflash, dflash2 or dspark."""
        return "dflash2" if self.second else "dspark" if self.markov else "dflash"

    @property
    def has_own_width(self) -> bool:
        """True if the drafter's hidden size differs from its target's."""
        return self.target_hidden_size != self.shape.hidden_size

    @property
    def num_slots(self) -> int:
        """Number of drafts that a full block yields."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @classmethod
    def from_json(cls, raw: dict[str, Any], path: Path | str = "config.json") -> DFlashConfig:
        """Parses a config.json in z-lab's or DeepSpec's format; `raw` is its JSON object. `path`: its name in error
        messages. Raises UnsupportedModelError for an unsupported format or architecture, ModelFileError for a missing
        or invalid key."""
        path = Path(path)
        raw = unpacked(raw, DSPARK, dict.fromkeys(MARKOV_KEYS[2:], False))
        own = {**raw, **part(raw, path, "dflash_config")}
        part(raw, path, "speculators", "speculators_config", "verifier")  # read by inspect and export
        _check_supported(raw, path)
        refuse_other_networks(own, {ARCHITECTURE: "dflash", ARCHITECTURE_2: "dflash2", DSPARK: "dspark"}, path)
        # `decoder_config` requires a vocab_size; that of `shape` is not used.
        values = FAMILIES["Qwen3ForCausalLM"] | {"vocab_size": 1} | raw | {"architectures": ["Qwen3ForCausalLM"]}
        shape = decoder_config(values, path)
        num_target_layers = whole(own, "num_target_layers", path, 0, least=0) or None
        layer_ids = own.get("target_layer_ids")
        if layer_ids is None and num_target_layers is not None:
            layer_ids = default_layer_ids(num_target_layers, shape.num_layers)
        if not isinstance(layer_ids, list) or not layer_ids or not all(map(is_whole, layer_ids)):
            needed = "needs num_target_layers, or target_layer_ids as a list of layers"
            raise ModelFileError(f"{path}: config.json {needed} (got {short(layer_ids)}): correct it")
        if len(set(layer_ids)) < len(layer_ids):
            raise ModelFileError(f"{path}: target_layer_ids names a layer twice: correct config.json")
        return cls(
            shape=shape,
            vocab_size=whole(raw, "vocab_size", path, 0, least=0) or None,
            num_target_layers=num_target_layers,
            target_layer_ids=tuple(layer_ids),
            block_size=whole(own, "block_size", path, 16, least=2),
            mask_token_id=whole(own, "mask_token_id", path, least=0),
            is_causal=_causal_layers(values, shape.num_layers, path),
            input_embedding_scale=fraction(own, "input_embedding_scale", 1.0, path, above=-LARGEST),
            output_multiplier=fraction(own, "output_multiplier", 1.0, path, above=-LARGEST),
            final_logit_softcapping=max(0.0, fraction(own, "final_logit_softcapping", 0.0, path, above=-LARGEST)),
            raw=raw,
            target_hidden_size=whole(own, "target_hidden_size", path, shape.hidden_size),
            from_anchor=_flag(own, ("sample_from_anchor", "shift_label"), path),
            second=_second(raw, own, shape, path),
            markov=_markov(raw, own, path),
            foresight=Foresight.of(raw, path),
        )


def default_layer_ids(num_target_layers: int, num_layers: int) -> list[int]:
    """Returns the target layers, counted from 0, that a drafter of `num_layers` layers reads by default: one for each
    draft layer, evenly spaced from layer 1 to the third last. A drafter of one layer reads the target's middle
    layer."""
    if num_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + index * span / (num_layers - 1)) for index in range(num_layers)]


def new_config(
    hidden_size: int,
    vocab_size: int,
    num_target_layers: int,
    *,
    num_layers: int = 3,
    block_size: int = 8,
    head_dim: int = 64,
    intermediate_size: int | None = None,
    mask_token_id: int | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """Returns the config.json of a new DFlash v1 drafter for a target with these sizes. `num_layers`, `head_dim` and
    `intermediate_size` are the drafter's own. `keys` adds or replaces entries.

    The mask token defaults to the vocabulary's last id. Attention is grouped-query, with up to four query heads per key
    head.
    """
    layer_ids = default_layer_ids(num_target_layers, num_layers)
    return {
        "architectures": [ARCHITECTURE],
        **TABLES["drafter"]["always"],
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "num_hidden_layers": num_layers,
        "num_target_layers": num_target_layers,
        **layer_sizes(hidden_size, head_dim, intermediate_size),
        "block_size": block_size,
        "dflash_config": {
            "mask_token_id": vocab_size - 1 if mask_token_id is None else mask_token_id,
            "target_layer_ids": sorted({min(max(layer, 0), num_target_layers - 1) for layer in layer_ids}),
        },
        **keys,
    }


def as_dflash2(raw: Mapping[str, Any], *, rank: int = 256, top_k: int = 16) -> dict[str, Any]:
    """Returns the config.json of a DFlash 2 drafter that extends the DFlash v1 drafter with config `raw`. `rank`:
    length of the vectors in the selector's two codebooks, one per token; `top_k`: candidate tokens per draft
    position."""
    own = raw.get("dflash_config") or {}
    added = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": rank, "selector_top_k": top_k}
    return {**raw, "architectures": [ARCHITECTURE_2], "dflash_config": {**own, **added}}


def as_dspark(raw: Mapping[str, Any], *, rank: int = 256) -> dict[str, Any]:
    """Returns the config.json of a DSpark drafter that extends the DFlash v1 drafter with config `raw`. `rank`: length
    of a vector in the Markov head's two codebooks, each of which has one vector per token."""
    own = raw.get("dflash_config") or {}
    added = dict(zip(MARKOV_KEYS, (rank, "vanilla", True, True), strict=True))
    return {**raw, "architectures": [DSPARK], "dflash_config": {**own, **added}}


def check_fit(
    config: DFlashConfig, target: Sizes, draft_ids: Tensor | None = None, head_VD: Tensor | None = None
) -> None:
    """Raises DrafterMismatchError, with both values, if a drafter does not fit the target in hidden size, vocabulary or
    layers. `draft_ids`: token ids of its draft vocabulary; None: all tokens. `head_VD`: the drafter's own LM head;
    None: it uses the target's."""
    last_id = -1 if draft_ids is None else int(draft_ids.max())
    wrong_layers = [layer for layer in config.target_layer_ids if not 0 <= layer < target.num_layers]
    hidden_size, num_layers, vocab_size = target.hidden_size, target.num_layers, target.vocab_size
    rows = vocab_size if draft_ids is None else len(draft_ids)
    wide = config.shape.hidden_size
    head = [rows, wide] if head_VD is None else list(head_VD.shape)
    refuse_mismatch(
        (config.target_hidden_size != hidden_size, "hidden size", config.target_hidden_size, hidden_size),
        (config.has_own_width and head_VD is None, "width (the drafter has no head of its own)", wide, hidden_size),
        (config.vocab_size not in (None, vocab_size), "vocabulary", config.vocab_size, vocab_size),
        (config.num_target_layers not in (None, num_layers), "target layers", config.num_target_layers, num_layers),
        (config.mask_token_id >= vocab_size, "mask token", config.mask_token_id, f"{vocab_size} tokens"),
        (last_id >= vocab_size, "draft vocabulary", f"token {last_id}", f"{vocab_size} tokens"),
        (head != [rows, wide], "head", f"{head[0]} x {head[-1]}", f"{rows} tokens x {wide}"),
        (bool(wrong_layers), "tapped layers", wrong_layers, f"{num_layers} layers"),
    )
    if config.has_own_width and draft_ids is not None and config.mask_token_id not in draft_ids:
        raise DrafterMismatchError(
            f"the drafter's head has no row for its mask token {config.mask_token_id}, which it needs: fetch the "
            "drafter again"
        )


def refuse_mismatch(*checks: tuple[bool, str, object, object]) -> None:
    """Raises DrafterMismatchError, with both values, for the first property in which a drafter does not fit its target.
    Each check: (True if it does not fit, name of the property, the drafter's value, the target's value)."""
    for is_wrong, what, drafter_value, target_value in checks:
        if is_wrong:
            raise DrafterMismatchError(
                f"{what}: the drafter says {drafter_value}, the target has {target_value}: "
                "give a drafter that was trained for this target"
            )


def layer_sizes(hidden_size: int, head_dim: int, intermediate_size: int | None) -> dict[str, int]:
    """Returns the keys of config.json for the sizes of a new draft layer. Attention is grouped-query, with up to four
    query heads per key head. The inner width of the MLP is by default 8/3 of the hidden size, rounded up to a multiple
    of 64."""
    num_heads = max(1, hidden_size // head_dim)
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // next(group for group in (4, 3, 2, 1) if num_heads % group == 0),
        "head_dim": head_dim,
        "intermediate_size": intermediate_size or -(-hidden_size * 8 // 3 // 64) * 64,
    }


def is_dflash(raw: Mapping[str, Any]) -> bool:
    """True if `raw` is the config.json of a DFlash, DFlash 2 or DSpark drafter, of any format."""
    names = f"{raw.get('architectures')} {raw.get('speculators_model_type')}"
    return "dflash_config" in raw or "dflash" in names.lower() or "dspark" in names.lower()


def _check_supported(raw: Mapping[str, Any], path: Path) -> None:
    if "speculators_model_type" in raw:
        raise UnsupportedModelError(
            f"{path}: this config is in speculators format: read its folder, which makes it z-lab's"
        )
    names = raw.get("architectures") or [ARCHITECTURE]
    if not isinstance(names, list):
        raise ModelFileError(f"{path}: architectures must be a list: correct config.json")
    if not {ARCHITECTURE, ARCHITECTURE_2, DSPARK} & set(map(str, names)) or raw.get("model_type", "qwen3") != "qwen3":
        raise UnsupportedModelError(
            f"{path}: drafter architecture {names[0]} on model_type {raw.get('model_type')} is not implemented: "
            f"give a {ARCHITECTURE}, {ARCHITECTURE_2}, {DSPARK} or {DEEPSPEC} on qwen3"
        )
    types = raw.get("layer_types")
    known = {"full_attention", "sliding_attention"}
    is_list = isinstance(types, list) and all(isinstance(kind, str) for kind in types)
    if types is not None and (not is_list or len(types) != raw.get("num_hidden_layers") or not set(types) <= known):
        raise ModelFileError(
            f"{path}: layer_types must name full_attention or sliding_attention once a layer: correct it"
        )


def _causal_layers(values: dict[str, Any], num_layers: int, path: Path) -> tuple[bool, ...]:
    check_flags(values, path, ("is_causal",))
    if values.get("is_causal") is not None:
        return (bool(values["is_causal"]),) * num_layers
    types = values.get("layer_types")
    if types is None:
        has_window = values.get("use_sliding_window") is True and values.get("sliding_window") is not None
        first = whole(values, "max_window_layers", path, 28, least=0) if has_window else num_layers
        return tuple(index >= first for index in range(num_layers))
    return tuple(kind == "sliding_attention" for kind in types)


def _flag(own: Mapping[str, Any], names: tuple[str, ...], path: Path) -> bool:
    values = [own[name] for name in names if own.get(name) is not None]
    if not all(isinstance(value, bool) for value in values) or len(set(values)) > 1:
        raise ModelFileError(f"{path}: {' and '.join(names)} must be true or false, and agree: correct config.json")
    return bool(values and values[0])


def _second(raw: Mapping[str, Any], own: dict[str, Any], shape: DecoderConfig, path: Path) -> DFlash2Sizes | None:
    names = DFlash2Sizes.__slots__
    if ARCHITECTURE_2 not in (raw.get("architectures") or []):
        if keys := [name for name in names if own.get(name) is not None]:
            raise ModelFileError(
                f"{path}: {keys[0]} is of DFlash 2, the architecture is {ARCHITECTURE}: without convolution and "
                f"selector its drafts would be others; write {ARCHITECTURE_2} in config.json"
            )
        return None
    sizes = DFlash2Sizes(*(whole(own, name, path, least=1) for name in names))
    if shape.hidden_size % sizes.conv_group_size:
        raise ModelFileError(
            f"{path}: conv_group_size {sizes.conv_group_size} does not divide hidden_size {shape.hidden_size}: "
            "correct them"
        )
    whole(dict(raw), "vocab_size", path, least=1)
    return sizes


def _markov(raw: Mapping[str, Any], own: dict[str, Any], path: Path) -> MarkovSizes | None:
    if DSPARK not in (raw.get("architectures") or []):
        if keys := [name for name in MARKOV_KEYS if own.get(name) is not None]:
            raise ModelFileError(
                f"{path}: {keys[0]} is of DSpark, the architecture is another: without its heads its drafts would be "
                f"others; write {DSPARK} in config.json"
            )
        return None
    if own.get("markov_head_type", "vanilla") != "vanilla":
        raise UnsupportedModelError(
            f"{path}: markov_head_type {short(own['markov_head_type'])} is not implemented: give a vanilla one"
        )
    whole(dict(raw), "vocab_size", path, least=1)
    rank = whole(own, "markov_rank", path, 256, least=1)
    flags = ({name: own.get(name, True)} for name in MARKOV_KEYS[2:])
    return MarkovSizes(rank, *(_flag(each, tuple(each), path) for each in flags))
