"""Training of an EAGLE-3 drafter: test-time training on the same blocks as every other drafter.

A block is an anchor and the K tokens after it; its K draft positions are K steps of one chain. Step 0 reads the
features of all positions before the anchor, causally; step i reads the hidden state of step i - 1 and the text's own
token. It attends to the keys of step 0 up to its anchor, and to the chain's own keys of steps 1 to i, as in drafting.

    loss = sum over steps i of 0.8^i * CE(head of the drafter, token of the text)      (EAGLE-3, arXiv 2503.01840,
    section 3)

Losses over the target's distribution restrict it to the draft vocabulary. Positions with a token outside that
vocabulary have no loss, and count as missed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.draft.eagle3.checkpoint import Eagle3Config, check_eagle3_fit, default_taps, new_config, read_eagle3
from paceline.draft.eagle3.drafter import Eagle3Network
from paceline.errors import ConfigError
from paceline.model.config.decoder import DecoderConfig
from paceline.model.target import Target, head_weight
from paceline.model.torch.attention import PLAIN, Rope, Scores, rope_tables
from paceline.model.torch.fused import rotate
from paceline.train.config import DrafterShape, LossConfig
from paceline.train.features.hidden_states import begin_without_mean, train_in_scaled_units
from paceline.train.learn.attention import Layout
from paceline.train.learn.initial_weights import keys_from, own_sizes
from paceline.train.learn.losses import Head, SlotMetrics, measure, slot_losses, slot_weights
from paceline.train.learn.packs import Pack, Trainable

KeyValue = tuple[Tensor, Tensor]
DECAY = 0.8
"""Ratio of each step's loss weight to that of the previous step."""


def eagle3_for(
    target: Target, shape: DrafterShape, init: Path | None, ids: Tensor, seed: int
) -> tuple[dict[str, Any], Eagle3Network]:
    """Returns (config.json, network with float32 weights) of a new EAGLE-3 drafter, or of the one in the folder `init`.
    `ids`: the draft vocabulary. Raises DrafterMismatchError if `init` belongs to another target, ConfigError if it has
    an embedding of its own."""
    if init is not None:
        drafter = read_eagle3(init)
        tensors = {name: tensor.float().clone() for name, tensor in drafter.tensors.items()}
        tensors["lm_head.weight"] = tensors["lm_head.weight"][drafter.ids.argsort()]
        raw = {**drafter.config.raw}
        if not drafter.config.tap_layers:
            raw["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in default_taps(target.num_layers)]
        config = Eagle3Config.from_json(raw)
        network = Eagle3Network.of(config, tensors, init)
    else:
        raw = config_for(target, shape, len(ids))
        config = Eagle3Config.from_json(raw)
        network = Eagle3Network.random(config, seed)
        with torch.no_grad():
            network.lm_head.weight.copy_(head_weight(target)[ids.to(target.device)].float())
    check_eagle3_fit(config, target, config.tap_layers, has_embedding=False)
    if hasattr(network, "embed_tokens"):
        raise ConfigError(f"--init {init}: training a drafter with an embedding of its own is not implemented")
    return raw, network


def config_for(target: Target, shape: DrafterShape, draft_vocab: int) -> dict[str, Any]:
    """Returns the contents of config.json of a new EAGLE-3 drafter for this target, in SpecForge's format."""
    decoder, keys = getattr(target, "config", None), dict[str, Any]()
    if isinstance(decoder, DecoderConfig):
        keys = keys_from(decoder)
    keys |= own_sizes(shape, keys)
    if shape.attention_bias:
        keys["attention_bias"] = True
    return new_config(
        target.hidden_size,
        target.vocab_size,
        target.num_layers,
        draft_vocab_size=draft_vocab,
        version=shape.eagle_version,
        num_hidden_layers=shape.num_layers,
        tap_layers=shape.tap_layers,
        **{name: value for name, value in keys.items() if value is not None},
    )


@torch.no_grad()
def use_scaled_eagle3_units(network: Eagle3Network, scale_F: Tensor, mean_F: Tensor, *, is_new: bool) -> Tensor:
    """Prepares an EAGLE-3 network for training on features of similar magnitude. Returns the scale [F] by which the
    caller must multiply features: all ones if the network itself norms features before `fc` (their projection),
    otherwise scale_F. In a new drafter (`is_new`), it also initialises the weights of these norms, proportional to
    scale_F, and those of `fc`, whose output for the mean input becomes zero. scale_F, mean_F [F]: results of
    `measure_scale`."""
    config = network.config
    if not config.fc_norm and not config.norm_before_fc:
        train_in_scaled_units(network, scale_F)
        if is_new:
            begin_without_mean(network, mean_F)
        return scale_F
    if is_new:
        norms = network.fc_norm if config.fc_norm else [network.input_norm]
        parts = scale_F.chunk(config.num_taps) if config.fc_norm else [scale_F]
        for norm, part_F in zip(norms, parts, strict=True):
            # A norm divides by the size of the whole vector; this weight multiplies it back and applies each feature's
            # scale.
            norm.weight.copy_(part_F * part_F.reciprocal().square().mean().sqrt())  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        begin_without_mean(network, mean_F)
    return torch.ones_like(scale_F)


def target_head(target: Target, ids: Tensor) -> Head:
    """Returns the target's LM head with only the rows of the draft vocabulary `ids`."""
    ids = ids.to(target.device)
    return Head(head_weight(target)[ids], columns=ids, target=target.ends)


class ChainAttention:
    """Attention for training drafters that draft token by token, for one pack (batch of blocks). All blocks draft their
    first token in step 0, the second one in step 1, and so on; the caller sets the attribute `step` before each. Step 0
    has one query per context position of the pack, each later step one query per block."""

    def __init__(
        self, shape: DecoderConfig, layout: Layout, dtype: torch.dtype, *, first: int = 1, scores: Scores = PLAIN
    ) -> None:
        """`layout`: its contexts must begin at position 0. Context position e is rotated as position e + `first`;
        EAGLE-3 uses 1, the position of the next token. `scores`: scale and soft cap of the attention scores."""
        self._shape, self._layout, self._first, self._scores = shape, layout, first, scores
        device = layout.anchors[0].device
        longest = 2 + max(max(layout.context_lens), 1 + max(int(anchors_A.max()) for anchors_A in layout.anchors))
        tables = rope_tables(shape, longest + layout.block_size)
        self._rope = Rope(*(table.to(device, dtype) for table in tables))
        self._anchors_A = torch.cat(layout.anchors)
        firsts = [sum(layout.context_lens[:number]) for number in range(len(layout.context_lens))]
        own = zip(firsts, layout.anchors, strict=True)
        self.entries_A = torch.cat([first + (anchors_A - 1).clamp(min=0) for first, anchors_A in own])
        """Index of the context position from which each block's chain begins, [A]."""
        self.step = 0
        self._context: dict[int, KeyValue] = {}
        self._own: dict[int, list[KeyValue]] = {}

    def __call__(self, layer: int, query_THD: Tensor, key_THD: Tensor, value_THD: Tensor) -> Tensor:
        entries_T = self._layout.context_positions() if self.step == 0 else self._anchors_A - 1 + self.step
        tables = self._rope.tables_at(entries_T + self._first)
        query_THD, key_THD = _rotated(query_THD, tables), _rotated(key_THD, tables)
        if self.step == 0:
            self._context[layer] = key_THD, value_THD
        else:
            self._own.setdefault(layer, []).append((key_THD, value_THD))
        parts, first_entry, first_block = [], 0, 0
        for anchors_A, length in zip(self._layout.anchors, self._layout.context_lens, strict=True):
            entries = slice(first_entry, first_entry := first_entry + length)
            blocks = slice(first_block, first_block := first_block + len(anchors_A))
            query = query_THD[entries if self.step == 0 else blocks]
            last_Q = torch.arange(length, device=anchors_A.device) if self.step == 0 else anchors_A - 1
            own = [] if self.step == 0 else [(key[blocks], value[blocks]) for key, value in self._own[layer]]
            context = tuple(tensor[entries] for tensor in self._context[layer])
            parts.append(self._attend(query, last_Q, (context[0], context[1]), own, self._shape.window(layer)))
        return torch.cat(parts)

    def _attend(
        self, query_QHD: Tensor, last_Q: Tensor, context: KeyValue, own: list[KeyValue], window: int | None
    ) -> Tensor:
        """Attends from queries to the context up to entry `last_Q`, and to one key of each list in `own`."""
        group = query_QHD.shape[1] // context[0].shape[1]
        grouped = query_QHD.unflatten(1, (-1, group))  # [Q, kv heads, group, head_dim]
        scores = torch.einsum("qkgd,nkd->kgqn", grouped, context[0]).float()
        distance = last_Q[:, None] - torch.arange(len(context[0]), device=last_Q.device)
        seen = distance >= 0
        if window is not None:
            seen = seen & (distance + len(own) < window)
        near = [torch.einsum("qkgd,qkd->kgq", grouped, key).float()[..., None] for key, _ in own]
        scale, cap = self._scores.scale or query_QHD.shape[-1] ** -0.5, self._scores.cap
        scores = torch.cat([scores, *near], dim=-1) * scale
        scores = torch.tanh(scores / cap) * cap if cap else scores
        seen = F.pad(seen, (0, len(own)), value=True)
        weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1).to(context[1].dtype)
        out = torch.einsum("kgqn,nkd->qkgd", weights[..., : len(context[0])], context[1])
        for number, (_, value) in enumerate(own):
            out = out + torch.einsum("kgq,qkd->qkgd", weights[..., len(context[0]) + number], value)
        return out.flatten(1)


def _rotated(heads_THD: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates like `Rope.rotate`, with a gradient. The tables may cover only the first values of each head."""
    size = tables[0].shape[-1]
    if size == heads_THD.shape[-1]:
        return rotate(heads_THD, *tables)
    turned, rest = heads_THD.tensor_split([size], dim=-1)
    return torch.cat([rotate(turned, *tables), rest], dim=-1)


def chain_hidden(
    network: Callable[[Tensor, Tensor, ChainAttention], tuple[Tensor, Tensor]],
    attend: ChainAttention,
    pack: Pack,
    states_ND: Tensor,
    embed: Callable[[Tensor], Tensor],
) -> Tensor:
    """Runs all steps of a pack of blocks that are drafted token by token. Returns the hidden states that the LM head
    reads, [A * K, D] (A blocks, K drafts each). The input token of a step is the text's, not the drafter's own draft.
    - `network`: the drafter, for one step: (token embeddings, hidden states of the step before, attention) -> (hidden
      states for the next step, hidden states for the LM head).
    - `attend`: the attention of this pack.
    - states_ND: hidden states at the N context positions, for the first step.
    - `embed`: token ids -> embeddings."""
    states_TD, normed_TD = network(embed(pack.behind_N), states_ND, attend)
    states_AD, outputs = states_TD[attend.entries_A], [normed_TD[attend.entries_A]]
    for attend.step in range(1, pack.slots.labels_AK.shape[1]):
        tokens_A = pack.slots.labels_AK[:, attend.step - 1].long()
        states_AD, normed_AD = network(embed(tokens_A), states_AD, attend)
        outputs.append(normed_AD)
    return torch.stack([output_AD.float() for output_AD in outputs], dim=1).flatten(0, 1)


class Eagle3Trainable(Trainable):
    """An EAGLE-3 drafter in training, which has an LM head of its own over its draft vocabulary."""

    def __init__(self, network: Eagle3Network, raw: dict[str, Any], block_size: int) -> None:
        """`block_size`: 1 + the number of steps."""
        self.network, self.raw, self.layers, self.block_size = network, raw, network.layers, block_size
        self._own = network  # with its class, for the type checker

    def hidden(self, pack: Pack, embedding_VD: Tensor, is_autocast: bool) -> Tensor:
        """Returns hidden states [A * K, D] (A blocks, K draft positions each), from which the drafter's own LM head
        computes logits. embedding_VD [V, D]: the target's embedding matrix. With `is_autocast`, products are computed
        in bfloat16."""
        network, dtype = self._own, torch.bfloat16 if is_autocast else torch.float32
        attend = ChainAttention(network.config.shape, pack.layout, dtype)
        with torch.autocast(embedding_VD.device.type, torch.bfloat16, enabled=is_autocast):
            taps_NF = pack.taps_NF if is_autocast else pack.taps_NF.float()
            features_ND = network.features(taps_NF)
            return chain_hidden(network, attend, pack, features_ND, lambda ids: F.embedding(ids, embedding_VD).float())

    def loss(
        self,
        pack: Pack,
        embedding_VD: Tensor,
        head: Head,
        config: LossConfig,
        num_slots: float,
        *,
        is_autocast: bool,
        is_measured: bool,
    ) -> tuple[Tensor, SlotMetrics]:
        """Returns (loss, metrics) of one pack; the loss is divided by `num_slots`, the draft positions of the whole
        step. `head`: the target's head over the draft vocabulary; embedding_VD [V, D]: the target's embedding matrix.
        With `is_autocast`, products are computed in bfloat16; without `is_measured` the metrics are zero."""
        slots = pack.slots
        per_block = slots.labels_AK.shape[1]
        hidden_TD = self.hidden(pack, embedding_VD, is_autocast)
        rows_AK, reached_AK = head.local(slots.labels_AK)
        has_features_A = torch.cat(pack.layout.anchors) > 0
        learned_AK = slots.valid_AK & reached_AK & has_features_A[:, None]
        with torch.autocast(hidden_TD.device.type, enabled=False):
            logits_RV = F.linear(hidden_TD, self._own.lm_head.weight).float()
            label_R1 = rows_AK.flatten()[:, None]
            ce_AK, loss_AK = slot_losses(logits_RV, label_R1, slots, head, config)
        if config.name == "d-pace":
            weight_AK = slot_weights(config, ce_AK.detach(), learned_AK)
        else:
            weight_AK = DECAY ** torch.arange(per_block, device=loss_AK.device) * learned_AK
        metrics = SlotMetrics.zero(per_block)
        if is_measured:
            metrics = measure(logits_RV.detach(), label_R1, learned_AK)
            metrics.sums_4K[0] = slots.valid_AK.sum(0).cpu()  # a token that the head lacks counts as missed
            metrics.flat[0] = (loss_AK.detach() * learned_AK).sum(dtype=torch.float64).cpu()
        return (loss_AK * weight_AK).sum() / num_slots, metrics
