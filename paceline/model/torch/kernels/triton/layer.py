"""Triton kernels of a decoder layer's small operations, for `model/torch/kernels/layer.py`.

All compute in float32 and round where the PyTorch formulas there round.
"""

import triton
import triton.language as tl

from paceline.model.torch.kernels.triton.overlap import overlap


@triton.jit
def _weighted(values, scale, weight_ptr, at, mask, IS_WIDE: tl.constexpr, DTYPE: tl.constexpr):
    """values * scale * weight, rounded to DTYPE; unless IS_WIDE, also rounded before the product with the weight."""
    normed = values * scale
    if not IS_WIDE:
        normed = normed.to(DTYPE).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return (normed * weight).to(DTYPE)


@triton.jit
def add_norm(
    hidden_ptr, update_ptr, out_ptr, update_weight_ptr, weight_ptr, update_eps, eps, scale,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_UPDATE: tl.constexpr, HAS_UPDATE_NORM: tl.constexpr,
    HAS_NORM: tl.constexpr, IS_UPDATE_WIDE: tl.constexpr, IS_WIDE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute, for one row in each program, hidden += scale * norm(update) in place and out = norm(hidden); hidden,
    update and out are [rows, SIZE].

    HAS_UPDATE: there is an update. HAS_UPDATE_NORM: it is normed, with update_weight [SIZE] and update_eps. HAS_NORM:
    `out` is written, normed with weight [SIZE] and eps. IS_UPDATE_WIDE, IS_WIDE: normed values are multiplied by the
    weight in float32; otherwise they are rounded to the dtype before this product. BLOCK: SIZE rounded up to a power of
    two.
    """
    overlap(OVERLAPS)
    begin = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, BLOCK)
    mask = at < SIZE
    hidden = tl.load(hidden_ptr + begin + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        update = tl.load(update_ptr + begin + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_UPDATE_NORM:
            update_scale = tl.rsqrt(tl.sum(update * update, 0) / SIZE + update_eps)
            dtype: tl.constexpr = update_ptr.dtype.element_ty
            update = _weighted(update, update_scale, update_weight_ptr, at, mask, IS_UPDATE_WIDE, dtype).to(tl.float32)
        rounded = (hidden + scale * update).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + begin + at, rounded, mask=mask)
        hidden = rounded.to(tl.float32)
    if HAS_NORM:
        hidden_scale = tl.rsqrt(tl.sum(hidden * hidden, 0) / SIZE + eps)
        normed = _weighted(hidden, hidden_scale, weight_ptr, at, mask, IS_WIDE, out_ptr.dtype.element_ty)
        tl.store(out_ptr + begin + at, normed, mask=mask)


@triton.jit
def heads(
    fused_ptr, query_ptr, keys_ptr, values_ptr, rows_ptr, slots_ptr, cos_ptr, sin_ptr, weight_ptr, eps,
    token_stride, row_stride, head_stride, slot_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ROTARY: tl.constexpr, HAS_NORM: tl.constexpr, IS_WIDE: tl.constexpr, IS_WHOLE: tl.constexpr,
    WHOLE_BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Apply norm and RoPE to one head of one token in each program, and write keys and values to the cache.

    fused: for each token (token_stride apart) the heads of queries, keys and values, of SIZE channels each; query [T,
    NUM_HEADS, SIZE]: output. keys, values: one layer of the cache, with row_stride, head_stride and slot_stride; rows,
    slots [T]: cache row and position of each token. ROTARY: number of rotated channels of each head; cos, sin [T,
    ROTARY]: cosines and signed sines of `Rope.tables`.

    HAS_NORM: queries and keys are normed, with eps and weight: SIZE numbers for each query and key head. IS_WHOLE: one
    norm over all queries of the token and one over all its keys, instead of one per head. IS_WIDE: normed values are
    multiplied by the weight in float32; otherwise they are rounded before this product. BLOCK: SIZE rounded up to a
    power of two; WHOLE_BLOCK: the same for all channels of a norm with IS_WHOLE.
    """
    overlap(OVERLAPS)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = fused_ptr.dtype.element_ty
    at = tl.arange(0, BLOCK)
    mask = at < SIZE
    token_ptr = fused_ptr + token * token_stride
    own_ptr = token_ptr + head * SIZE
    own = tl.load(own_ptr + at, mask=mask, other=0.0)
    if head < NUM_HEADS + NUM_KV_HEADS:
        scale = 1.0
        if HAS_NORM:
            if IS_WHOLE:
                first = tl.where(head < NUM_HEADS, 0, NUM_HEADS * SIZE)
                count = tl.where(head < NUM_HEADS, NUM_HEADS * SIZE, NUM_KV_HEADS * SIZE)
                whole_at = tl.arange(0, WHOLE_BLOCK)
                whole = tl.load(token_ptr + first + whole_at, mask=whole_at < count, other=0.0).to(tl.float32)
                scale = tl.rsqrt(tl.sum(whole * whole, 0) / count + eps)
            else:
                wide = own.to(tl.float32)
                scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
            own = _weighted(own.to(tl.float32), scale, weight_ptr + head * SIZE, at, mask, IS_WIDE, dtype)
        if ROTARY > 0:
            half: tl.constexpr = ROTARY // 2
            is_rotated = at < ROTARY
            partner_at = tl.where(at < half, at + half, at - half)
            # The partner comes from memory, as another lane of `own` cannot be read: not normed yet.
            partner = tl.load(own_ptr + partner_at, mask=is_rotated, other=0.0)
            if HAS_NORM:
                weight_at = weight_ptr + head * SIZE
                partner = _weighted(partner.to(tl.float32), scale, weight_at, partner_at, is_rotated, IS_WIDE, dtype)
            cos = tl.load(cos_ptr + token * ROTARY + at, mask=is_rotated, other=0.0).to(tl.float32)
            sin = tl.load(sin_ptr + token * ROTARY + at, mask=is_rotated, other=0.0).to(tl.float32)
            # Rounded after the product and after the sum, as `Rope.rotate` does.
            product = (own.to(tl.float32) * cos).to(dtype).to(tl.float32)
            rotated = (product + partner.to(tl.float32) * sin).to(dtype)
            own = tl.where(is_rotated, rotated, own)
    if head < NUM_HEADS:
        tl.store(query_ptr + (token * NUM_HEADS + head) * SIZE + at, own, mask=mask)
    else:
        place = tl.load(rows_ptr + token) * row_stride + tl.load(slots_ptr + token) * slot_stride
        if head < NUM_HEADS + NUM_KV_HEADS:
            tl.store(keys_ptr + place + (head - NUM_HEADS) * head_stride + at, own, mask=mask)
        else:
            tl.store(values_ptr + place + (head - NUM_HEADS - NUM_KV_HEADS) * head_stride + at, own, mask=mask)


@triton.jit
def gated(gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr, OVERLAPS: tl.constexpr):
    """Compute activation(gate) * up for one row and BLOCK of columns in each program: gate_up [rows, 2 * SIZE], gate
    first -> out [rows, SIZE]. The activation is GELU by tanh if IS_GELU, else SiLU."""
    overlap(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * SIZE + SIZE + at, mask=mask, other=0.0).to(tl.float32)
    slope = gate
    if IS_GELU:  # 0.5 x (1 + tanh(z)) = x sigmoid(2 z)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-slope))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * SIZE + at, (activated * up).to(dtype), mask=mask)
