"""Creates a new drafter's config and initial weights, or reads those of a drafter to be continued (`--init`).

A new drafter has the target's widths, heads and rotary embedding, with random layers or copies of the target's layers
(train/methods/copied_layers.py), which have already learned to attend. The final norm is scaled so that the first loss
is about log(vocabulary), not 30.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from math import gcd, log
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from paceline.draft import shipped
from paceline.draft.dflash.checkpoint import read_draft_ids, read_stored
from paceline.draft.dflash.config import (
    DFlashConfig,
    as_dflash2,
    as_dspark,
    check_fit,
    default_layer_ids,
    is_dflash,
    new_config,
)
from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.draft.dflash2.drafter import DFlash2Network
from paceline.draft.dspark.drafter import DSparkNetwork
from paceline.draft.formats.family import network_of
from paceline.draft.vocabulary import ALL_TOKENS, Vocabulary, rows_of_tokens
from paceline.errors import ConfigError
from paceline.hub import resolve
from paceline.model.checkpoint import load_tensors, read_json
from paceline.model.config.decoder import TABLES, DecoderConfig
from paceline.model.target import Target, head_weight
from paceline.train.config import DrafterShape
from paceline.train.documents.dataset import Corpus
from paceline.train.learn.losses import Head, Slots
from paceline.train.methods.copied_layers import copy_layers

FIRST_LOGITS_DEVIATION = 1.0
"""Largest standard deviation of a new drafter's logits. Random normal logits of this deviation add half a nat to the
loss."""
FIRST_LOSS_MARGIN = 0.5
"""Nats by which the first loss may exceed log(vocabulary)."""
MEASURED_SLOTS, BISECTIONS = 256, 10
OWN_HEAD = (
    "this drafter has another width than its target and a head of its own, so no loss can compare the target's "
    "probabilities: choose --loss d-pace"
)
"""Message of the ConfigError for a loss that such a drafter cannot learn from."""


def config_for(target: Target, shape: DrafterShape) -> dict[str, Any]:
    """Returns the contents of config.json of a new DFlash drafter for this target. Sizes that are not set in `shape`
    are the target's or, for a model that Transformers runs, derived from its hidden size."""
    decoder = getattr(target, "config", None)
    keys: dict[str, Any] = {}
    has_bias = shape.attention_bias
    if isinstance(decoder, DecoderConfig):
        keys = keys_from(decoder)
        if has_bias is None:
            has_bias = shape.is_copied and (decoder.qkv_bias or decoder.output_bias)
    if has_bias:
        keys["attention_bias"] = True
    keys |= own_sizes(shape, keys)
    if shape.sliding_window is not None:
        keys |= window_keys(shape.sliding_window, shape.num_layers)
    if shape.is_causal is not None:
        keys["is_causal"] = shape.is_causal
    raw = new_config(
        target.hidden_size,
        target.vocab_size,
        target.num_layers,
        num_layers=shape.num_layers,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        **{name: value for name, value in keys.items() if value is not None},
    )
    raw["dflash_config"]["target_layer_ids"] = list(_tap_layers(target.num_layers, shape))
    raw["dflash_config"] |= end_keys(target)
    return raw


def window_keys(window: int, num_layers: int) -> dict[str, Any]:
    """Returns the config.json entries of draft layers with a sliding window. A draft position then attends only to
    positions fewer than `window` away: earlier ones and, inside its own block, also later ones."""
    layers = ["sliding_attention"] * num_layers
    return {"sliding_window": window, "use_sliding_window": True, "layer_types": layers, "is_causal": False}


def keys_from(decoder: DecoderConfig) -> dict[str, Any]:
    """Returns the config.json entries that a new drafter copies from its target's config `decoder`. The scaling of the
    rotary embedding is left out if a drafter cannot apply it: if it depends on the text's length (LongRoPE), or if the
    target rotates only a part of each head."""
    keys = {key: getattr(decoder, field) for key, field in TABLES["drafter"]["from_target"].items()}
    scaling = keys["rope_scaling"]
    if scaling and (decoder.rotary_dim or scaling["rope_type"] in ("longrope", "proportional")):
        keys["rope_scaling"] = None
    return keys


def end_keys(target: Target) -> dict[str, float]:
    """Returns the config.json entries for the scales and the soft cap that the target applies to its embeddings and
    logits. A drafter must apply them itself: they are not part of the embedding matrix and LM head that it shares with
    the target."""
    ends, keys = target.ends, dict[str, float]()
    if ends.embedding != 1.0:
        keys["input_embedding_scale"] = ends.embedding
    if ends.logits != 1.0:
        keys["output_multiplier"] = ends.logits
    if ends.cap:
        keys["final_logit_softcapping"] = ends.cap
    return keys


def own_sizes(shape: DrafterShape, keys: dict[str, Any]) -> dict[str, int]:
    """Returns the config.json entries for sizes that `shape` gives: MLP width, query heads and key-value heads. `keys`:
    entries copied from the target. If `shape` gives query heads but no key-value heads, their ratio is the target's.
    Raises ConfigError if the number of query heads is not a multiple of the number of key-value heads."""
    sizes = {"intermediate_size": shape.intermediate_size, "num_attention_heads": shape.num_heads}
    heads, kv_heads = keys.get("num_attention_heads"), keys.get("num_key_value_heads")
    group = heads // kv_heads if heads and kv_heads else 1
    if shape.num_heads and not shape.num_kv_heads:
        sizes["num_key_value_heads"] = max(1, shape.num_heads // group)
    else:
        sizes["num_key_value_heads"] = shape.num_kv_heads
    chosen = {name: value for name, value in sizes.items() if value is not None}
    queries, groups = chosen.get("num_attention_heads", heads), chosen.get("num_key_value_heads", kv_heads)
    if queries and groups and queries % groups:
        raise ConfigError(
            f"{queries} query heads over {groups} key heads do not divide evenly: change num_heads or num_kv_heads"
        )
    return chosen


def _tap_layers(num_layers: int, shape: DrafterShape) -> tuple[int, ...]:
    if shape.tap_layers is not None:
        return shape.tap_layers
    number = min(shape.num_taps or max(5, shape.num_layers), num_layers)
    ids = default_layer_ids(num_layers, number) if num_layers > 4 else range(number)
    return tuple(sorted({min(max(layer, 0), num_layers - 1) for layer in ids}))


def init_folder(init: str | None, target_name: str) -> Path | None:
    """Returns the folder of the drafter from which training continues; None for a new drafter. `init`: value of
    `--init`, a folder or "default" for the drafter that ships for `target_name`. Raises ConfigError if the drafter does
    not exist, DownloadError or CacheError if the shipped one cannot be downloaded."""
    if init is None:
        return None
    if init == "default" and target_name not in shipped.SHIPPED:
        having = ", ".join(sorted(shipped.SHIPPED))
        raise ConfigError(
            f"--init default: no drafter ships for {target_name}, only for {having}: give a folder with config.json"
        )
    folder = shipped.find(target_name) if init == "default" else Path(os.path.expanduser(init))
    if not os.path.isfile(folder / "config.json"):
        raise ConfigError(f"--init {init}: there is no drafter in {folder}: give a folder with config.json")
    return folder


def embedding_matrix(target: Target, config: DFlashConfig | None = None, own: Vocabulary = ALL_TOKENS) -> Tensor:
    """Returns a copy of the embedding matrix [V, D] that the drafter reads, with a row for each of the target's V
    tokens: the target's matrix, or for a drafter of another width (`config.has_own_width`) rows of its own LM head.
    `own`: the drafter's vocabulary, with this head as `head_VD`; tokens outside it get the mask token's row."""
    if config is not None and config.has_own_width and own.head_VD is not None:
        rows_V = rows_of_tokens(own.ids, config.mask_token_id, target.vocab_size)
        return own.head_VD[rows_V].to(target.device, target.dtype)
    return target.matrix_embed(torch.arange(target.vocab_size, device=target.device)).clone()


def head_of(target: Target, config: DFlashConfig, draft_ids: Tensor | None, head_VD: Tensor | None = None) -> Head:
    """Returns the LM head that the drafter uses. `draft_ids`: tokens that the head has rows for, the draft vocabulary;
    None for all tokens. `head_VD`: weights of the drafter's own head, with these rows; None to use the target's."""
    draft_ids = None if draft_ids is None else draft_ids.to(target.device)
    if head_VD is not None:
        weight_VD = head_VD.to(target.device, target.dtype)
    else:
        weight_VD = head_weight(target)
        weight_VD = weight_VD if draft_ids is None else weight_VD[draft_ids]
    return Head(weight_VD, config.output_multiplier, config.final_logit_softcapping, draft_ids, target=target.ends)


def most_frequent(
    number: int | None, corpus: Corpus, target: Target, say: Callable[[str], None], known: Tensor | None = None
) -> Tensor | None:
    """Returns a draft vocabulary: the ids of the `number` most frequent tokens in the corpus's answers, ascending.
    Returns None, for all tokens, if `number` is None, 0, or at least the size of the target's vocabulary. Among equally
    frequent tokens, those in `known` (token ids) are preferred. `say`, given by the caller, gets a line of text for the
    user: the share of the answers' tokens that the vocabulary covers."""
    if not number or number >= target.vocab_size:
        return None
    counts_V = torch.from_numpy(corpus.token_counts(target.vocab_size))
    order_V = torch.arange(target.vocab_size)
    if known is not None:
        order_V = torch.cat([known, order_V[~torch.isin(order_V, known)]])
    chosen = order_V[torch.argsort(counts_V[order_V], descending=True, stable=True)][:number].sort().values
    share = float(counts_V[chosen].sum() / counts_V.sum())
    say(f"drafting among {number} of {target.vocab_size} tokens, {share:.1%} of what the answers hold")
    return chosen


def continued_vocabulary(init: Path | None, corpus: Corpus, target: Target) -> Vocabulary:
    """Returns the draft vocabulary with which a drafter's training continues. `init`: its folder; None for a new
    drafter, which drafts all tokens.
    - A drafter that drafts all tokens still drafts all tokens.
    - A drafter of another width than the target's keeps its vocabulary, and its own LM head.
    - Any other drafter keeps its tokens, and adds all tokens of the answers in `corpus`."""
    if init is None:
        return ALL_TOKENS
    if is_dflash(read_json(init / "config.json")) and (stored := read_stored(init)).config.has_own_width:
        return stored.vocabulary
    if (known := read_draft_ids(init)) is None:
        return ALL_TOKENS
    new = torch.from_numpy(corpus.token_counts(target.vocab_size)).nonzero().flatten()
    return Vocabulary(torch.cat([known, new.to(known.dtype)]).unique())


def network_for(
    target: Target,
    target_name: str,
    shape: DrafterShape,
    init: Path | None,
    seed: int,
    *,
    block_size: int | None = None,
    window: int | None = None,
) -> tuple[dict[str, Any], DFlashNetwork]:
    """Returns (config.json, network with float32 weights) of the drafter to train.
    - `init`: folder of the drafter to continue; None for a new drafter with the sizes in `shape`.
    - `target_name`: model whose layers a new drafter copies, if `shape.is_copied`.
    - `block_size`, `window` (positions that draft layers attend to): new values for the drafter in `init`; None to keep
      its own. The window becomes that of all layers. If only some layers are causal, these are the ones with a sliding
      window, and only their window changes. Without `init` both have no effect.

    Raises DrafterMismatchError if `init` belongs to another target, ConfigError if it cannot be trained."""
    if init is not None:
        stored = read_stored(init)
        config, tensors = stored.config, stored.tensors
        check_fit(config, target, *(stored.vocabulary if config.has_own_width else ALL_TOKENS))
        changed = {} if block_size is None else {"block_size": block_size}
        if window is not None and len(set(config.is_causal)) > 1:  # its layers with a window, the only causal ones
            changed |= {"sliding_window": window, "use_sliding_window": True}
        elif window is not None:
            changed |= window_keys(window, config.shape.num_layers) | {"is_causal": all(config.is_causal)}
        config = DFlashConfig.from_json(config.raw | changed)
        if config.from_anchor:
            raise ConfigError(
                f"--init {init}: this drafter predicts the token after each position: training those is not implemented"
            )
        raw = config.raw
        network = network_of(config, {name: tensor.float().clone() for name, tensor in tensors.items()}, init)
    else:
        raw = config_for(target, shape)
        config = DFlashConfig.from_json(raw)
        check_fit(config, target)
        network = DFlashNetwork.random(config, seed)
        if shape.is_copied:
            copy_layers(network, load_tensors(resolve(target_name)), getattr(target, "config", None))
    if shape.kind not in ("dflash", config.kind):
        return _extended({**raw, "vocab_size": target.vocab_size}, network, shape, seed)
    return raw, network


def _extended(
    raw: dict[str, Any], body: DFlashNetwork, shape: DrafterShape, seed: int
) -> tuple[dict[str, Any], DFlashNetwork]:
    """Extends a DFlash v1 drafter with config.json `raw` to one of `shape.kind`; at first it drafts the same tokens.
    Raises ConfigError if a DFlash 2 drafter should become a DSpark one, or the other way round."""
    if body.config.kind != "dflash":
        raise ConfigError(
            f"--drafter-kind {shape.kind}: a {body.config.kind} drafter cannot become one: give --init a dflash drafter"
        )
    if shape.kind == "dflash2":
        raw, kind = as_dflash2(raw, rank=shape.selector_rank), DFlash2Network
        # The group size of published drafters, or the largest divisor of the hidden size in it.
        group = raw["dflash_config"]["conv_group_size"]
        raw["dflash_config"]["conv_group_size"] = gcd(group, body.config.shape.hidden_size)
    else:
        raw, kind = as_dspark(raw, rank=shape.selector_rank), DSparkNetwork
    return raw, kind.extending(body, DFlashConfig.from_json(raw), seed, factored=shape.codebooks == "factored")


class FirstNorm(NamedTuple):
    """The norm before the LM head of a new drafter. Its weight determines how large the first logits are;
    `scale_first_logits` adjusts it."""

    weight: Tensor
    offset: float = 0.0
    """Added to the weight when it is applied (`DecoderConfig.norm_offset`)."""


@torch.no_grad()
def scale_first_logits(norm: FirstNorm, head: Head, hidden_TD: Tensor, slots: Slots) -> float:
    """Scales the weight of `norm` so that a new drafter's first loss is near log(vocabulary), the loss of uniform
    guesses; returns the factor.

    hidden_TD [T, D]: hidden states of the T draft positions of the first blocks; `slots`: their labels; `head`: the LM
    head. The factor gives the logits a standard deviation of about one. If the loss is still above log(vocabulary) +
    `FIRST_LOSS_MARGIN`, a smaller factor is searched by bisection."""
    rows_T, reached_T = head.local(slots.labels_AK.flatten())
    is_learned_T = slots.valid_AK.flatten() & reached_T
    hidden_TD, labels_T = hidden_TD[is_learned_T][:MEASURED_SLOTS], rows_T[is_learned_T][:MEASURED_SLOTS]
    deviation = float(head.logits(hidden_TD).float().std(dim=-1).mean())
    most = log(len(head.weight_VD)) + FIRST_LOSS_MARGIN

    def is_near(factor: float) -> bool:
        return float(cross_entropy(head.logits(hidden_TD * factor).float(), labels_T)) <= most

    low, high = 0.0, FIRST_LOGITS_DEVIATION / max(deviation, 1e-6)
    if is_near(high):
        low = high
    else:
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if is_near(middle) else (low, middle)
    factor = low or high
    norm.weight.add_(norm.offset).mul_(factor).sub_(norm.offset)
    return factor
