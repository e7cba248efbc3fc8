"""Attention of a packed batch over the static KV cache, and RoPE of its queries and keys.

The plan of a pass, including masks, is built once and used by every layer. Adjacent rows with equal token counts run as
one product with a mask; other rows run over exactly their own length. Queries that share a key head are stacked as rows
of one product (GQA without repeated keys), four times faster on CPU at one position than `enable_gqa=True`
(docs/project/log/2026-11.md).

RoPE tables use Hugging Face's half-split layout and the formulas of Transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.config.decoder import DecoderConfig, RopeKind
from paceline.model.config.ropes import check_rope
from paceline.model.torch.kernels.layer import Places
from paceline.model.torch.sdpa import chosen_kernels


@dataclass(frozen=True, slots=True)
class Scores:
    """Options of attention scores (products of query and key)."""

    scale: float | None = None
    """Factor on the scores; None: 1 / sqrt(head_dim)."""
    cap: float = 0.0
    """Soft cap of the scores, cap * tanh(score / cap), before the mask; 0 is off."""
    sinks_H: Tensor | None = None
    """Attention sink of each head: the learned score of an always visible key without a value (gpt-oss)."""


PLAIN = Scores()


@dataclass(slots=True)
class _Span:
    """One product: the next num_rows * count tokens of the pass with cache rows [row, row + num_rows)."""

    row: int
    num_rows: int
    count: int
    begin: int
    end: int
    """Cache positions [begin, end) that are visible to any query of the span."""
    mask: Tensor | None


class AttentionPlan:
    """The cache positions that each token of a pass attends to; shared by all layers with the same sliding window."""

    live_T: Tensor | None = None
    """Mask of valid tokens in a pass of fixed shape, where others are padding; None: all are valid."""

    def __init__(
        self,
        rows: list[int],
        starts: list[int],
        counts: list[int],
        *,
        group: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        window: int | None = None,
        is_causal: bool = True,
        parents: list[int] | None = None,
    ) -> None:
        """`starts`, `counts`: for each cache row, the number of positions before the pass and of new tokens. `group`:
        query heads per key head. `parents`: as in ForwardBatch; a token then attends to its ancestors, itself and all
        positions before its row's start."""
        self._group = group
        self._window = window
        self._is_causal = is_causal
        self._dtype = dtype
        self._device = device
        self.spans: list[_Span] = []
        index = 0
        token = 0
        for length in _runs(rows, counts):
            size = length * counts[index]
            own = None if parents is None else parents[token : token + size]
            self.spans.append(self._span(rows[index], length, starts[index : index + length], counts[index], own))
            index += length
            token += size

    @classmethod
    def masked(
        cls,
        rows: list[int],
        counts: list[int],
        visible: list[Tensor],
        *,
        group: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Build a plan from masks. visible[i], bool [counts[i], positions], is True where a new token of row rows[i]
        attends to a position of this row. `group`: query heads per key head."""
        plan = cls([], [], [], group=group, dtype=dtype, device=device)
        for row, count, seen in zip(rows, counts, visible, strict=True):
            plan.spans.append(_Span(row, 1, count, 0, seen.shape[-1], plan._additive(seen[None].to(device))))
        return plan

    def _span(self, row: int, num_rows: int, starts: list[int], count: int, parents: list[int] | None) -> _Span:
        end = max(starts) + count
        begin = 0 if self._window is None else max(0, min(starts) + 1 - self._window)
        is_plain = num_rows == 1 and (count == 1 or (not self._is_causal and begin == 0 and self._window is None))
        if parents is not None:
            mask = self._tree_mask(starts, count, begin, end, parents)
        else:
            mask = None if is_plain else self._mask(starts, count, begin, end)
        return _Span(row, num_rows, count, begin, end, mask)

    def _mask(self, starts: list[int], count: int, begin: int, end: int) -> Tensor:
        """Additive mask [rows, 1, group * count, end - begin]: 0 for visible keys, -inf for others."""
        start_B = torch.tensor(starts, device=self._device)[:, None, None]
        query = start_B + torch.arange(count, device=self._device)[:, None]
        key = torch.arange(begin, end, device=self._device)[None, None, :]
        visible = key <= query if self._is_causal else (key < start_B + count).expand(-1, count, -1)
        if self._window is not None:
            visible = visible & (query - key < self._window) & (key - query < self._window)
        return self._additive(visible)

    def _tree_mask(self, starts: list[int], count: int, begin: int, end: int, parents: list[int]) -> Tensor:
        """Like `_mask`, for trees: `parents` of the span's tokens, row after row."""
        visible = torch.zeros(len(starts), count, end, dtype=torch.bool)
        for index, start in enumerate(starts):
            seen_CC, depths = ancestors(parents[index * count : (index + 1) * count])
            visible[index, :, :start] = True
            visible[index, :, start : start + count] = seen_CC
            if self._window is not None:
                positions = torch.arange(end)
                positions[start : start + count] = start + torch.tensor(depths)
                visible[index] &= (start + torch.tensor(depths))[:, None] - positions < self._window
        return self._additive(visible[:, :, begin:].to(self._device))

    def _additive(self, visible: Tensor) -> Tensor:
        mask = torch.zeros(visible.shape, dtype=self._dtype, device=self._device).masked_fill_(~visible, float("-inf"))
        return mask.repeat(1, self._group, 1)[:, None]

    def attend(self, query_THD: Tensor, keys: Tensor, values: Tensor, scores: Scores = PLAIN) -> Tensor:
        """Compute the attention output [T, heads * head_dim] of queries [T, heads, head_dim].

        keys, values: one layer of the cache, [rows, kv_heads, max_len, head_dim], with the new tokens already written.
        """
        if len(self.spans) == 1:
            return self._attend_span(self.spans[0], query_THD, keys, values, scores)
        queries = query_THD.split([span.num_rows * span.count for span in self.spans])
        parts = zip(self.spans, queries, strict=True)
        return torch.cat([self._attend_span(span, query, keys, values, scores) for span, query in parts])

    def _attend_span(self, span: _Span, query_THD: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
        rows, seen = slice(span.row, span.row + span.num_rows), slice(span.begin, span.end)
        return attend_rows(query_THD, keys[rows, :, seen], values[rows, :, seen], span.mask, scores)


def attend_rows(query_THD: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores = PLAIN) -> Tensor:
    """Compute the attention output [T, heads * head_dim] for adjacent cache rows that all have the same number of
    queries. query_THD contains the queries of the first row, then those of the second, and so on.

    keys, values: cache positions to attend to, [rows, kv_heads, positions, head_dim]. mask: numbers added to the
    scores, [rows, 1, query heads per key head * queries per row, positions].
    """
    num_rows, kv_heads, _, head_dim = keys.shape
    count, group = len(query_THD) // num_rows, query_THD.shape[1] // kv_heads
    stacked = query_THD.view(num_rows, count, kv_heads, group, head_dim)
    if count > 1:
        stacked = stacked.permute(0, 2, 3, 1, 4)
    stacked = stacked.reshape(num_rows, kv_heads, group * count, head_dim)
    if scores.cap or scores.sinks_H is not None:
        out = _weigh(stacked, keys, mask, scores, count) @ values
    else:
        with chosen_kernels(keys.device):
            out = F.scaled_dot_product_attention(stacked, keys, values, attn_mask=mask, scale=scores.scale)
    if count > 1:
        out = out.view(num_rows, kv_heads, group, count, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(len(query_THD), -1)


def _weigh(stacked: Tensor, keys: Tensor, mask: Tensor | None, scores: Scores, count: int) -> Tensor:
    """Attention weights [rows, kv_heads, group * count, positions] with cap or sinks; softmax in float32."""
    scale = stacked.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    weights = stacked @ keys.transpose(-1, -2) * scale
    if scores.cap:
        weights = torch.tanh(weights / scores.cap) * scores.cap
    if mask is not None:
        weights = weights + mask
    if scores.sinks_H is None:
        return weights.softmax(-1, torch.float32).to(keys.dtype)
    sinks = scores.sinks_H.view(1, keys.shape[1], -1, 1).repeat_interleave(count, 2).expand(len(keys), -1, -1, -1)
    return torch.cat([weights, sinks.to(weights.dtype)], -1).softmax(-1, torch.float32)[..., :-1].to(keys.dtype)


def ancestors(parents: list[int]) -> tuple[Tensor, list[int]]:
    """Return (seen, depths) for the C tokens of a tree. `parents`: index of each token's parent; negative for a root.
    seen, bool [C, C]: True where the column's token is the row's token or an ancestor of it. depths: number of
    ancestors."""
    seen_CC, depths = torch.eye(len(parents), dtype=torch.bool), list[int]()
    for token, parent in enumerate(parents):
        if parent >= 0:
            seen_CC[token] |= seen_CC[parent]
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return seen_CC, depths


def _runs(rows: list[int], counts: list[int]) -> list[int]:
    """Lengths of the maximal runs of adjacent rows with equal token counts."""
    lengths: list[int] = []
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if index and row == rows[index - 1] + 1 and count == counts[index - 1]:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


class CacheWriter:
    """Writes new keys and values to the cache, in every layer to the same positions."""

    def __init__(
        self, rows: list[int], starts: list[int], counts: list[int], device: torch.device | str = "cpu"
    ) -> None:
        self._single = (rows[0], starts[0], counts[0]) if len(rows) == 1 else None
        self._device = device
        self._places: Places | None = None
        if self._single is None:
            row_T = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
            self._row_T = torch.tensor(row_T, device=device)
            self._position_T = torch.tensor(positions_of(starts, counts), device=device)

    @property
    def places(self) -> Places:
        """Cache row and position of each token to write, as the Triton kernel `kernels.layer.heads` reads them."""
        if self._places is None and self._single is not None:
            row, start, count = self._single
            position_T = torch.arange(start, start + count, device=self._device)
            self._places = Places(torch.full_like(position_T, row), position_T)
        elif self._places is None:
            self._places = Places(self._row_T, self._position_T)
        return self._places

    def write(self, cache: Tensor, new_THD: Tensor) -> None:
        """Copy new keys or values [T, kv_heads, head_dim] into one layer of the cache [rows, kv_heads, max_len,
        head_dim]."""
        if self._single is None:
            cache[self._row_T, :, self._position_T] = new_THD
        else:
            row, start, count = self._single
            cache[row].narrow(1, start, count).copy_(new_THD.transpose(0, 1))


def positions_of(starts: list[int], counts: list[int]) -> list[int]:
    """Return each new token's position: starts[i] + 0, 1, ... for the counts[i] tokens of row i."""
    return [start + offset for start, count in zip(starts, counts, strict=True) for offset in range(count)]


class Rope:
    """RoPE in the half-split layout, by tables [max_len, R]; rotates the first R channels of each head."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        half = cos.shape[-1] // 2
        self._half, self._size = half, cos.shape[-1]
        self._cos = cos
        self._signed_sin = torch.cat([-sin[:, :half], sin[:, half:]], dim=-1)

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: RopeKind = "main",
        slack: int = 0,
    ) -> Self:
        """Make the RoPE for texts of up to `max_len` tokens. `kind`: "local" for sliding-window layers that have other
        frequencies than the rest, else "main". `slack`: positions that the tables cover beyond `max_len`."""
        tables = rope_tables(config, max_len + slack, kind, longest=max_len)
        return cls(*(table.to(device, dtype) for table in tables))

    def tables(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        """Look up cosines and signed sines (see `rotate`) of T positions: [T, 1, R] each."""
        if len(positions) == 1:
            at = positions[0]
            return self._cos[at : at + 1, None], self._signed_sin[at : at + 1, None]
        return self.tables_at(torch.tensor(positions, device=self._cos.device))

    def tables_at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Look up cosines and signed sines (see `rotate`) of positions [T] on the device: [T, 1, R] each."""
        return self._cos[positions_T][:, None], self._signed_sin[positions_T][:, None]

    def rotate(self, heads_THD: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate the first R channels x of each head: x * cos + swap_halves(x) * signed_sin. `tables`: (cos,
        signed_sin) of the tokens, [T, 1, R]; signed_sin is sin with its first half negated."""
        if self._size < heads_THD.shape[-1]:
            rotated, rest = heads_THD.tensor_split([self._size], dim=-1)
            return torch.cat([self.rotate(rotated, tables), rest], dim=-1)
        cos, signed_sin = tables
        return torch.addcmul(heads_THD * cos, heads_THD.roll(self._half, -1), signed_sin)


def rope_tables(
    config: DecoderConfig, max_len: int, kind: RopeKind = "main", longest: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines for `max_len` positions, float32 [max_len, R] each, times YaRN's or LongRoPE's factor.

    `kind`: "local" uses the config's `local_rope_*`. `longest`: maximum text length, by which LongRoPE chooses its
    short or long factors; None: max_len. Raises UnsupportedModelError for an unknown RoPE type, ModelFileError for a
    missing or invalid number.
    """
    inv_freq, attention_factor = inverse_frequencies(config, kind, max_len if longest is None else longest)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def inverse_frequencies(config: DecoderConfig, kind: RopeKind = "main", longest: int = 0) -> tuple[Tensor, float]:
    """Compute RoPE's frequencies for R rotated channels. Returns (radians per position, float32 [R / 2], factor on
    cosines and sines). `kind`, `longest`: as in `rope_tables`; with 0, LongRoPE chooses its short factors."""
    theta, scaling = config.rope_theta, config.rope_scaling
    if kind == "local":
        theta, scaling = config.local_rope_theta, config.local_rope_scaling
    scaling = scaling or {"rope_type": "default"}
    check_rope(scaling)
    size = config.rotary_dim or config.rope_size(kind)
    plain = 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
    match scaling["rope_type"]:
        case "linear":
            return plain / scaling["factor"], 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(plain, scaling, theta), _yarn_attention_factor(scaling)
        case "longrope":
            which = "long_factor" if longest > scaling["original_max_position_embeddings"] else "short_factor"
            return plain / torch.tensor(scaling[which], dtype=torch.float32), _longrope_attention_factor(scaling)
        case "proportional":  # Gemma 4: the later part of each half of a head is not rotated
            plain[int(scaling["partial_rotary_factor"] * size // 2) :] = 0.0
            return plain / scaling["factor"], 1.0
        case "factors":
            return plain / torch.tensor(scaling["factors"], dtype=torch.float32), 1.0
        case _:
            return plain, 1.0


def _longrope_attention_factor(scaling: dict[str, Any]) -> float:
    """LongRoPE (arXiv 2402.13753): sqrt(1 + log(factor) / log(original length)), unless the config has a value."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    return 1.0 if factor <= 1 or original <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _llama3(plain: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones unchanged, those between interpolated."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > context / low, plain / factor, plain)
    blend = (context / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / factor + blend * stretched
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(between, blended, stretched)


def _yarn(plain: Tensor, scaling: dict[str, Any], theta: float) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): low frequencies are interpolated, high ones unchanged, with a ramp
    between."""
    dim, context = 2 * len(plain), scaling["original_max_position_embeddings"]

    def dimension_turning(times: float) -> float:
        return dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_turning(scaling.get("beta_fast") or 32)
    high = dimension_turning(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001  # Transformers' guard against a ramp of width zero
    unscaled = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / scaling["factor"] * (1 - unscaled) + plain * unscaled


def _yarn_attention_factor(scaling: dict[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)
