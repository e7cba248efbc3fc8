"""Triton kernels of `model/torch/kernels/attend.py`: attention over parts of each row's positions (splits), and the
combination of their results (Flash-Decoding).

Queries that share a key head are stacked: query m of a row and key head is that of query head m % GROUP and token m //
GROUP. Scores are in base 2, so that weights are exp2 of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.model.torch.kernels.triton.overlap import overlap

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["starts_B", "counts_B", "depths_BJ", "bits_BJ", "count", "window"])
def attend_split(
    query, keys, values, starts_B, counts_B, depths_BJ, bits_BJ, sums, weights, maxima,
    count, kv_heads, query_stride, query_head_stride, key_row_stride, key_head_stride, key_stride,
    value_row_stride, value_head_stride, value_stride, scale, cap, window,
    GROUP: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_BITS: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute the attention of one tile of queries of one (row, key head) pair, over one part (split) of the row's
    positions, in each program. Writes each query's sum of weighted values (not yet normalised), sum of weights and
    largest score.

    query [T, heads, HEAD]; keys, values: one layer of the cache [rows, kv_heads, positions, HEAD]; starts_B, counts_B:
    number of positions before the pass, and of valid new tokens, of each row. count: new tokens per row, including
    padding; GROUP: query heads per key head. Outputs, float32, for P (row, key head) pairs with M = count * GROUP
    queries each: sums [P, splits, M, HEAD], weights and maxima [P, M, splits].

    Every token attends to the positions before the pass. With HAS_BITS, it also attends to the new tokens of its row
    whose bits are set in bits_BJ; depths_BJ are the tokens' depths in the tree. Without HAS_BITS, it attends to the new
    tokens up to itself if IS_CAUSAL, or to all. HAS_WINDOW limits all this to a sliding window of `window` positions.

    scale: factor on the scores; cap: their soft cap. BLOCK_M: queries of a tile; BLOCK_N: positions read at a time;
    BLOCK_D: HEAD rounded up to a power of two. PRECISION: of the products; STAGES: pipeline stages of the loop;
    OVERLAPS: see `overlap`.
    """
    overlap(OVERLAPS)
    tile, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    pair = tl.program_id(2)
    row, kv_head = pair // kv_heads, pair % kv_heads
    start = tl.load(starts_B + row).to(tl.int32)
    end = start + tl.load(counts_B + row).to(tl.int32)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(start + 1 - window, 0)  # the first position that the first new token sees
    share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), splits) * BLOCK_N  # whole blocks; the last splits may be empty
    first = begin + split * share
    last = tl.minimum(first + share, end)

    channel = tl.arange(0, BLOCK_D)
    is_channel = channel < HEAD
    member = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_member = member < count * GROUP
    slot = member // GROUP
    token = row * count + slot
    query_at = token * query_stride + (kv_head * GROUP + member % GROUP) * query_head_stride
    query_MD = tl.load(query + query_at[:, None] + channel, mask=is_member[:, None] & is_channel, other=0.0)
    depth = slot
    if HAS_BITS:
        depth = tl.load(depths_BJ + token, mask=is_member, other=0).to(tl.int32)
        bits = tl.load(bits_BJ + token, mask=is_member, other=0).to(tl.int32)
    keys += row.to(tl.int64) * key_row_stride + kv_head * key_head_stride
    values += row.to(tl.int64) * value_row_stride + kv_head * value_head_stride

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    sum_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        at = block + tl.arange(0, BLOCK_N)
        is_key = at < last
        mask_ND = is_key[:, None] & is_channel
        key_ND = tl.load(keys + at[:, None] * key_stride + channel, mask=mask_ND, other=0.0)
        score_MN = tl.dot(query_MD, tl.trans(key_ND), input_precision=PRECISION) * scale
        if HAS_CAP:
            score_MN = cap * (2 * tl.sigmoid(score_MN * (2 / cap)) - 1)  # tanh
        score_MN *= LOG2_E
        place = at - start  # index among the row's new tokens, negative before them
        seen = is_key[None, :] & (member >= 0)[:, None]  # `member >= 0` always holds: it adds a dimension
        if HAS_BITS:
            bit = tl.minimum(tl.maximum(place, 0), 31)  # a valid shift, also for places before the pass
            seen &= (place < 0)[None, :] | (((bits[:, None] >> bit[None, :]) & 1) != 0)
        elif IS_CAUSAL:
            seen &= place[None, :] <= slot[:, None]
        if HAS_WINDOW:
            key_depth = place
            if HAS_BITS:
                is_own = (place >= 0) & (place < count)
                own_depth = tl.load(depths_BJ + row * count + place, mask=is_own, other=0).to(tl.int32)
                key_depth = tl.where(is_own, own_depth, place)
            distance = depth[:, None] - key_depth[None, :]
            seen &= (distance < window) & (distance > -window)
        score_MN = tl.where(seen, score_MN, float("-inf"))
        larger = tl.maximum(largest, tl.max(score_MN, 1))
        offset = tl.where(larger == float("-inf"), 0.0, larger)  # a member without a visible key yet
        weight_MN = tl.exp2(score_MN - offset[:, None])
        fade = tl.exp2(largest - offset)
        weight = weight * fade + tl.sum(weight_MN, 1)
        value_ND = tl.load(values + at[:, None] * value_stride + channel, mask=mask_ND, other=0.0)
        sum_MD = sum_MD * fade[:, None]
        sum_MD += tl.dot(weight_MN.to(value_ND.dtype), value_ND, input_precision=PRECISION)
        largest = larger

    total = count * GROUP
    one_at = (pair * total + member) * splits + split
    tl.store(maxima + one_at, largest, mask=is_member)
    tl.store(weights + one_at, weight, mask=is_member)
    if first < last:  # combine_splits does not read the sums of a split without keys
        sum_at = ((pair * splits + split) * total + member) * HEAD
        tl.store(sums + sum_at[:, None] + channel, sum_MD, mask=is_member[:, None] & is_channel)


@triton.jit(do_not_specialize=["count", "splits"])
def combine_splits(
    sums, weights, maxima, sinks_H, out, count, kv_heads, splits,
    GROUP: tl.constexpr, HEAD: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one query in each program: writes its attention output to out [T, heads, HEAD], zeros if
    the query attends to no position.

    sums, weights, maxima: outputs of `attend_split`; count, GROUP, HEAD and BLOCK_D: as there. splits: number of
    splits, of which CHUNK are read at a time. HAS_SINKS: each head has an attention sink with the logit in sinks_H.
    """
    overlap(OVERLAPS)
    member, pair = tl.program_id(0), tl.program_id(1)
    row, kv_head = pair // kv_heads, pair % kv_heads
    total = count * GROUP
    channel = tl.arange(0, BLOCK_D)
    is_channel = channel < HEAD
    largest = tl.full([], float("-inf"), tl.float32)
    weight = tl.full([], 0.0, tl.float32)
    sum_D = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, splits, CHUNK):
        split = first + tl.arange(0, CHUNK)
        one_at = (pair * total + member) * splits + split
        own_max = tl.load(maxima + one_at, mask=split < splits, other=float("-inf"))
        own_weight = tl.load(weights + one_at, mask=split < splits, other=0.0)
        larger = tl.maximum(largest, tl.max(own_max, 0))
        offset = tl.where(larger == float("-inf"), 0.0, larger)
        factor, fade = tl.exp2(own_max - offset), tl.exp2(largest - offset)
        sum_at = ((pair * splits + split) * total + member) * HEAD
        mask = (own_weight != 0)[:, None] & is_channel
        own_sum = tl.load(sums + sum_at[:, None] + channel, mask=mask, other=0.0)
        sum_D = sum_D * fade + tl.sum(own_sum * factor[:, None], 0)
        weight = weight * fade + tl.sum(own_weight * factor, 0)
        largest = larger
    head = kv_head * GROUP + member % GROUP
    if HAS_SINKS:
        sink = tl.load(sinks_H + head).to(tl.float32) * LOG2_E
        larger = tl.maximum(largest, sink)
        fade = tl.exp2(largest - larger)
        sum_D = sum_D * fade
        weight = weight * fade + tl.exp2(sink - larger)
    sum_D = sum_D / tl.where(weight == 0, 1.0, weight)
    token = row * count + member // GROUP
    out_at = (token * kv_heads * GROUP + head) * HEAD + channel
    tl.store(out + out_at, sum_D.to(out.dtype.element_ty), mask=is_channel)
