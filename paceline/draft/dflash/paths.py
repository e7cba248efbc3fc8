"""DFlash's decode paths (the network prepared for drafting with one target), in PyTorch and in native calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dflash.reading import scale_logits, top_logprob
from paceline.draft.dflash.static import Kind, StaticForms
from paceline.draft.vocabulary import ALL_TOKENS, Vocabulary, rows_of_tokens
from paceline.model import sharing
from paceline.model.gguf.blocks import Weight
from paceline.model.kv_cache import StaticKVCache
from paceline.model.native.decoder import NativeDecoder, cache_view, layer_parts, native_cache, native_model
from paceline.model.native.library import Buffers, Matrix, pointer
from paceline.model.native.packing import pack, pack_vectors
from paceline.model.sampling.device_race import Draws, foreseen_tokens
from paceline.model.target import Target, head_weight
from paceline.model.torch.attention import AttentionPlan, CacheWriter, Rope, positions_of
from paceline.model.torch.decoder import Layer, LayerAttention, build_layers
from paceline.model.torch.heads import split_heads
from paceline.model.torch.parts import PackedLinear, Residual, RMSNorm, fuse
from paceline.model.torch.recorded_pass import rows_at


class Drafts(NamedTuple):
    """Most probable tokens at K draft positions of B rows, from one drafting pass."""

    best_BK: list[list[int]]
    """Index in the LM head of the most probable token at each position; -1 if the logits are not finite."""
    logits_BKV: Tensor | None = None
    """Logits of the LM head, [B, K, V]."""
    sure_BK: list[list[float]] | None = None
    """Log-probability of the most probable token at each position, if the pass computes it."""


class TorchPath:
    """DFlash in PyTorch operations on any device, with weights prepared for one target.

    The KV cache is stored as a single layer that contains the heads of all draft layers, so that one write stores the
    context for all of them. Each row has space for a block after its context; the block is discarded after the round.
    """

    def __init__(
        self, config: DFlashConfig, network: Mapping[str, Tensor], target: Target, own: Vocabulary = ALL_TOKENS
    ) -> None:
        """`network`: tensors of the network; those that DFlash 2 and DSpark add are ignored. `own`: the drafter's draft
        vocabulary and LM head."""
        self.config, shape, (draft_ids, head_VD) = config, config.shape, own
        dtype, device, num_rows, max_len = target.dtype, target.device, target.cache.num_rows, target.cache.max_len
        self._target, self.dtype, self.device = target, dtype, device
        self.ids = None if draft_ids is None else draft_ids.to(device)
        """Token ids of the LM head's rows; None: all tokens."""
        if head_VD is None and self.ids is not None:
            head_VD = head_weight(target)[self.ids]
        table_VD = None if head_VD is None else head_VD.to(device, dtype)
        self._head = target.matrix_head if table_VD is None else PackedLinear(table_VD)
        self._embed = target.matrix_embed
        if config.has_own_width and table_VD is not None:
            rows_V = rows_of_tokens(draft_ids, config.mask_token_id, target.vocab_size).to(device)
            self._embed = lambda tokens_T: table_VD[rows_V[tokens_T]]
        self._residual_dtype = torch.float32 if device.type == "cpu" else dtype
        weights = {name: tensor.detach().to(device, dtype) for name, tensor in body_of(network).items()}
        self.weight_bytes = sum(tensor.nbytes for tensor in weights.values())
        """Bytes of the drafter's prepared weights, without the target's."""
        if isinstance(self._head, PackedLinear):
            self.weight_bytes += self._head.num_bytes
        if config.has_own_width and table_VD is not None and device.type == "cpu":
            self.weight_bytes += table_VD.nbytes  # a second copy, where the head's is repacked
        self._fc = PackedLinear(weights["fc.weight"])
        self._hidden_norm = RMSNorm(weights["hidden_norm.weight"], shape.rms_norm_eps)
        self._final_norm = RMSNorm(weights["norm.weight"], shape.rms_norm_eps)
        attentions = [f"layers.{index}.self_attn" for index in range(shape.num_layers)]
        self._context_kv = fuse(dict(weights), *(f"{name}.{which}_proj" for which in "kv" for name in attentions))
        self.weight_bytes += self._context_kv.num_bytes  # a second copy: the layers have keys and values too
        key_norms = [weights[f"{name}.k_norm.weight"].expand(shape.num_kv_heads, -1) for name in attentions]
        self._context_norm = RMSNorm(torch.cat(key_norms), shape.rms_norm_eps)
        slack = (
            1 + config.num_slots
        )  # the verified positions of a round: one more than a block that drafts from its anchor
        self.rope = Rope.of(shape, max_len + slack, dtype, device)
        heads = shape.num_layers * shape.num_kv_heads
        self.cache = StaticKVCache(1, num_rows, heads, max_len, shape.head_dim, dtype, device, slack=slack)
        """Keys and values of the context in all draft layers, indexed by the target's cache rows."""
        self._layers, _ = build_layers(
            shape, weights.items(), partial(Layer.of, shape), make_other=lambda name, weight: None
        )
        self.kinds: list[Kind] = [
            (layer.window, is_causal) for layer, is_causal in zip(self._layers, config.is_causal, strict=True)
        ]
        self._keys = self.cache.keys[0].chunk(shape.num_layers, dim=1)  # views of each layer's heads
        self._values = self.cache.values[0].chunk(shape.num_layers, dim=1)
        self.group = shape.num_heads // shape.num_kv_heads
        self._static: StaticForms | None = None

    @property
    def is_fixed(self) -> bool:
        """True if passes are CUDA graphs of fixed shapes. A full block then takes no more time than part of one."""
        return self._target.recorder is not None

    def _forms(self) -> StaticForms | None:
        if self._static is None and self._target.recorder is not None:
            self._static = StaticForms(self, self._target.recorder)
        return self._static

    @torch.inference_mode()
    def record(self) -> None:
        """Capture the drafting and injecting passes as CUDA graphs, if the device uses them."""
        if forms := self._forms():
            forms.record()

    @torch.inference_mode()
    def inject(self, rows: list[int], starts: list[int], counts: list[int], taps_TF: Tensor) -> None:
        """Append keys and values of newly verified positions in all draft layers: `counts[i]` positions to row
        `rows[i]`, from its cache position `starts[i]` on. `taps_TF`: the target's hidden states at these positions, all
        of the first row first, F = tapped layers * hidden size. It may be longer; the rest is ignored."""
        forms = self._forms()
        if forms is None or not forms.inject(rows, starts, counts, taps_TF):
            writer = CacheWriter(rows, starts, counts, self.device)
            self.write_context(taps_TF[: sum(counts)], writer, self.rope.tables(positions_of(starts, counts)))
        self.cache.append(rows, counts)

    def write_context(self, taps_TF: Tensor, writer: CacheWriter, tables: tuple[Tensor, Tensor]) -> None:
        """Compute keys and values of all draft layers from the target's hidden states in one matrix product, and write
        them to the cache at the positions of `writer`. `tables`: RoPE's cosines and sines for these positions."""
        fused_TX = self._context_kv(self._hidden_norm(self._fc(taps_TF)))
        split_heads(
            fused_TX, 0, self.cache.keys[0], self.cache.values[0], writer, self._context_norm, self.rope, tables
        )

    @torch.inference_mode()
    def draft(self, rows: list[int], anchors: list[int], width: int, size: int, with_logits: bool) -> Drafts:
        """Drafts one block of `size` positions after the context of each of `rows`. Returns the most probable tokens at
        the block's first `width` draft positions. `anchors`: last committed token of each row, with which its block
        begins.

        `with_logits`: also return the logits [B, width, V]; the next pass may overwrite them.
        """
        if outputs := self._replayed(rows, anchors, size):
            best_and_logprob = outputs[0].tolist()  # the round's only device-to-host copy
            slots_B = [best_and_logprob[row][:width] for row in rows]
            logits_BKV = rows_at(outputs[1], rows)[:, :width] if with_logits else None
            best_BK = [[int(best) for best, _ in slots] for slots in slots_B]
            return Drafts(best_BK, logits_BKV, [[sure for _, sure in slots] for slots in slots_B])
        logits_BKV = self._head(self.slots(rows, anchors, width, size)).unflatten(0, (len(rows), width))
        return Drafts(_best(logits_BKV).tolist(), logits_BKV if with_logits else None)

    def _replayed(self, rows: list[int], anchors: list[int], size: int) -> list[Tensor] | None:
        """Outputs of `conclude` for full blocks, by cache row; None if no pass is captured as a CUDA graph."""
        forms = self._forms() if size == self.config.block_size else None
        return forms.block(rows, anchors) if forms else None

    def conclude(self, hidden_TD: Tensor, num_rows: int, width: int, anchors_B: Tensor) -> tuple[Tensor, ...]:
        """Computes drafts from the draft layers' output `hidden_TD`, the hidden states of all T positions of B =
        `num_rows` blocks before the final norm. Returns (drafts [B, width, 2], logits [B, width, V]) at each block's
        first `width` draft positions.

        Each draft is a pair of float64 numbers: the LM head's row of the most probable token, and its log-probability.
        `anchors_B`: last committed tokens; unused here, but subclasses need them.
        """
        logits_BKV = self._head(self._drafting_slots(hidden_TD, num_rows, width)).unflatten(0, (num_rows, width))
        sure_BK = top_logprob(scale_logits(logits_BKV, self.config))
        return torch.stack([_best(logits_BKV).double(), sure_BK.double()], dim=-1), logits_BKV

    def choose(self, outputs: Sequence[Tensor], drawn: tuple[Draws, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Chooses the drafts of B blocks from the tensors that `conclude` returned. Greedy rows get the most probable
        tokens; sampled rows get predictions of the tokens that the target will sample, made from its random numbers.
        Only tensor operations of fixed shape, for CUDA graphs.

        Returns (token ids [B, K], log-probabilities that they are accepted [B, K], float64). A token id is negative if
        the logits of its position are not finite. `outputs`: the tensors, sliced to the first K positions. `drawn`:
        (sampling parameters of the rows, each draft's index in prompt + answer [B, K]); None if all rows are greedy.
        """
        best_BK, confidence_BK = outputs[0].unbind(-1)
        drafts_BK = best_BK.long()
        if self.ids is not None:
            drafts_BK = torch.where(drafts_BK < 0, drafts_BK, self.ids[drafts_BK.clamp(min=0)])
        if drawn is None:
            return drafts_BK, confidence_BK
        (draws, position_BK), foresight = drawn, self.config.foresight
        logits_BKV = scale_logits(outputs[1], self.config)
        settings = foresight.scale, foresight.spread, self.ids
        own_BK, own_confidence_BK = foreseen_tokens(logits_BKV, draws, position_BK, *settings)
        is_greedy_B1 = draws.is_greedy_B[:, None]
        drafts_BK = torch.where(is_greedy_B1, drafts_BK, own_BK)
        return drafts_BK, torch.where(is_greedy_B1, confidence_BK, own_confidence_BK)

    def slots(self, rows: list[int], anchors: list[int], width: int, size: int) -> Tensor:
        """Runs the draft layers on a block of `size` positions for each row. Returns the final normed hidden states [B
        * width, D] of the first `width` draft positions of each block. `anchors`: last committed token of each row,
        with which its block begins."""
        masks = [self.config.mask_token_id] * (size - 1)
        tokens = [token for anchor in anchors for token in (anchor, *masks)]
        embedded_TD = self.embed_block(torch.tensor(tokens, device=self.device))
        starts, counts = [self.cache.lengths[row] for row in rows], [size] * len(rows)
        plan = partial(AttentionPlan, rows, starts, counts, group=self.group, dtype=self.dtype, device=self.device)
        plans = {(window, is_causal): plan(window=window, is_causal=is_causal) for window, is_causal in set(self.kinds)}
        writer = CacheWriter(rows, starts, counts, self.device)
        hidden_TD = self.run_layers(embedded_TD, size, plans, writer, self.rope.tables(positions_of(starts, counts)))
        return self._drafting_slots(hidden_TD, len(rows), width)

    @torch.inference_mode()
    def read(self, rows: list[int], anchors: list[int], width: int, size: int) -> tuple[Tensor, Tensor]:
        """Runs the network on a block of `size` positions for each row. Returns (final normed hidden states [B, width,
        D], scaled logits [B, width, V]) of each block's first `width` draft positions. `anchors`: last committed token
        of each row, with which its block begins."""
        return self._logits_of(self.slots(rows, anchors, width, size), len(rows))

    def _logits_of(self, slots_TD: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        logits_TV = scale_logits(self._head(slots_TD), self.config)
        return slots_TD.unflatten(0, (num_rows, -1)), logits_TV.unflatten(0, (num_rows, -1))

    def embed_block(self, tokens_T: Tensor) -> Tensor:
        """Returns the input embeddings [T, D] of the blocks' tokens."""
        embedded_TD = self._embed(tokens_T)
        scale = self.config.input_embedding_scale
        return embedded_TD if scale == 1.0 else embedded_TD * scale

    def _drafting_slots(self, hidden_TD: Tensor, num_rows: int, width: int) -> Tensor:
        """Final normed hidden states [B * width, D] of the first `width` draft positions."""
        first = 0 if self.config.from_anchor else 1
        return self._final_norm(hidden_TD.unflatten(0, (num_rows, -1))[:, first : first + width].flatten(0, 1))

    def run_layers(
        self,
        hidden_TD: Tensor,
        size: int,
        plans: Mapping[Kind, AttentionPlan],
        writer: CacheWriter,
        tables: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Runs all draft layers on packed blocks of `size` positions, from embeddings [T, D] to hidden states [T, D]
        before the final norm.

        `plans`: attention plan of each type of layer. `writer`, `tables`: cache writer, and RoPE's cosines and sines,
        for the positions of the blocks.
        """
        residual = Residual(hidden_TD.to(self._residual_dtype))
        for index, (kind, keys, values) in enumerate(zip(self.kinds, self._keys, self._values, strict=True)):
            self.run_layer(index, residual, size, LayerAttention(keys, values, plans[kind], writer, self.rope, tables))
        return residual.hidden_TD

    def run_layer(self, index: int, residual: Residual, size: int, attention: LayerAttention) -> None:
        """Run one draft layer on packed blocks of `size` positions, and add its outputs to `residual`."""
        self._layers[index].run(residual, attention)


def body_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a network that DFlash v1 also has, without those that DFlash 2 and DSpark add."""
    in_layer = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(("fc.", "hidden_norm.", "norm.")) or name.split(".", 2)[-1].startswith(in_layer)
    }


def _best(logits_BKV: Tensor) -> Tensor:
    """Most probable column at each position [B, K]; -1 if the largest logit is not finite."""
    largest, best = logits_BKV.max(-1)  # same as argmax, which is six times slower in bfloat16 on CPU
    return best.masked_fill_(~largest.isfinite(), -1)


def rows_of_head(target: NativeDecoder, draft_ids: Tensor) -> Matrix:
    """Returns the rows `draft_ids` of the target's LM head as one matrix. Drafters with the same draft vocabulary share
    one matrix. After the target gets a new cache, a new matrix is made, because the target's weights may have
    changed."""
    ids, form = draft_ids.tolist(), ("head", id(target.cache))
    return sharing.matrix(
        lambda: target.head_matrix.select(ids), [draft_ids], *form, num_bytes=lambda head: head.num_bytes
    )


class NativePath:
    """DFlash in native (C++) calls, for a target that runs in native calls. One call computes keys and values of the
    context in all layers, another runs the block. Logits are float32.

    With a target in block-quantised format, the drafter's matrices are rounded to Q8_0, which halves their bytes.
    Rounding may lower the acceptance of drafts, but does not change the output.
    """

    def __init__(
        self,
        config: DFlashConfig,
        network: Mapping[str, Tensor],
        target: NativeDecoder,
        own: Vocabulary = ALL_TOKENS,
        more: Callable[[int], dict[str, Any]] | None = None,
    ) -> None:
        """`network`, `own`: as in `TorchPath`. `more`: function from a layer's index to further fields of its CLayer
        (the native description of a layer)."""
        self.config, shape, dtype, (draft_ids, head_VD) = config, config.shape, target.dtype, own
        rounded = {name: tensor.detach().to("cpu", dtype) for name, tensor in body_of(network).items()}
        weights = {name: target.as_weight(tensor) for name, tensor in rounded.items()}

        def make_layer(index: int, parts: dict[str, Weight]) -> dict[str, Any]:
            fields = {**layer_parts(shape, index, parts, dtype), "is_causal": int(config.is_causal[index])}
            return fields | (more(index) if more else {})

        layers, _ = build_layers(shape, weights.items(), make_layer, make_other=lambda name, weight: None)
        context = [f"layers.{index}.self_attn.{which}_proj" for which in "kv" for index in range(shape.num_layers)]
        if head_VD is not None:
            self._head = pack([target.as_weight(head_VD)], dtype)
        else:
            self._head = target.head_matrix if draft_ids is None else rows_of_head(target, draft_ids)
        self._rows_V: list[int] | None = None
        if config.has_own_width:
            self._rows_V = rows_of_tokens(draft_ids, config.mask_token_id, target.vocab_size).tolist()
        slack, max_len = config.block_size, target.cache.max_len
        fc = pack([weights["fc.weight"]], dtype)
        context_kv = pack([weights[f"{name}.weight"] for name in context], dtype)
        matrices = [fc, context_kv, *(part for layer in layers for part in layer.values() if isinstance(part, Matrix))]
        self.weight_bytes = sum(
            matrix.num_bytes for matrix in [*matrices, *([] if self._head is target.head_matrix else [self._head])]
        )
        """Bytes of the drafter's prepared weights, without the target's."""
        self._model = native_model(
            shape,
            dtype,
            max_len + slack,
            layers,
            fc=fc,
            hidden_norm=rounded["hidden_norm.weight"].float().contiguous(),
            context_kv=context_kv,
            context_bias=pack_vectors([rounded.get(f"{name}.bias") for name in context]),
            final_norm=rounded["norm.weight"].float().contiguous(),
            head=self._head,
            embedding=target.embedding_matrix if self._rows_V is None else self._head,
            embedding_scale=config.input_embedding_scale,
        )
        self.cache = native_cache(shape, target.cache.num_rows, max_len, dtype, slack=slack)
        self._view, self._buffers = cache_view(self.cache), Buffers()

    def inject(self, rows: list[int], starts: list[int], counts: list[int], taps_TF: Tensor) -> None:
        self._model.inject(self._view, rows, starts, counts, taps_TF)
        self.cache.append(rows, counts)

    def draft(
        self,
        rows: list[int],
        anchors: list[int],
        width: int,
        size: int,
        with_logits: bool,
        taps_TD: Tensor | None = None,
    ) -> Drafts:
        """Drafts one block of `size` positions for each of `rows`, as `TorchPath.draft` does. `taps_TD`: buffer [B *
        size, D] in the target's dtype, to be filled with the final normed hidden states of all positions."""
        num_rows, masks = len(rows), [self.config.mask_token_id] * (size - 1)
        first = 0 if self.config.from_anchor else 1
        logit_rows = [row * size + slot for row in range(num_rows) for slot in range(first, first + width)]
        logits_TV = torch.empty(len(logit_rows), self._head.rows) if with_logits else None
        work = self._buffers.work
        work.num_rows, work.num_logit_rows, work.num_taps = num_rows, len(logit_rows), int(taps_TD is not None)
        work.logits, work.logits_stride, work.taps = pointer(logits_TV), self._head.rows, pointer(taps_TD)
        self._buffers.fill(rows=rows, starts=[self.cache.lengths[row] for row in rows], counts=[size] * num_rows)
        tokens = [token for anchor in anchors for token in (anchor, *masks)]
        if self._rows_V is not None:
            tokens = [self._rows_V[token] for token in tokens]
        self._buffers.fill(tokens=tokens, logit_rows=logit_rows)
        self._buffers.fill(tap_layers=[self.config.shape.num_layers - 1])  # the last layer's, after the final norm
        best = self._buffers.room("argmax", len(logit_rows))
        self._model.forward(self._view, work)
        best_BK = [best[row * width : (row + 1) * width] for row in range(num_rows)]
        return Drafts(best_BK, None if logits_TV is None else logits_TV.view(num_rows, width, -1))

    def read(self, rows: list[int], anchors: list[int], width: int, size: int) -> tuple[Tensor, Tensor]:
        taps_TD = torch.empty(len(rows) * size, self.config.shape.hidden_size, dtype=self.cache.keys.dtype)
        logits_BKV = self.draft(rows, anchors, width, size, True, taps_TD)[1]
        assert logits_BKV is not None
        first = 0 if self.config.from_anchor else 1
        hidden_BKD = taps_TD.unflatten(0, (len(rows), size))[:, first : first + width]
        return hidden_BKD, scale_logits(logits_BKV, self.config)

    is_fixed = False

    def record(self) -> None:
        """Does nothing: native calls need no CUDA graphs."""
