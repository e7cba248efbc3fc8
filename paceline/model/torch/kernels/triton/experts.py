"""Triton kernels of a mixture of experts, imported only when `model/torch/kernels/experts.py` launches them.

A pair is one token with one of its experts; pair token * PER_TOKEN + k is the token with its k-th expert. All compute
in float32 and round to the tensors' dtype where the formulas of `model/torch/kernels/experts.py` do.
"""

import triton
import triton.language as tl


@triton.jit
def route(
    logits_ptr, live_ptr, weights_ptr, chosen_ptr, num_experts,
    PER_TOKEN: tl.constexpr, BLOCK_E: tl.constexpr, IS_NORMED: tl.constexpr, HAS_LIVE: tl.constexpr,
):  # fmt: skip
    """Select the PER_TOKEN experts with the largest logits of one token in each program. Writes their indices,
    ascending, and the weights of their outputs: the experts' probabilities, divided by their sum if IS_NORMED.

    logits [T, num_experts]; outputs: weights, chosen (indices) [T, PER_TOKEN]. HAS_LIVE: tokens with 0 in live [T] are
    padding, and get index -1. BLOCK_E: num_experts rounded up to a power of two.
    """
    token = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    is_expert = expert < num_experts
    logits = tl.load(logits_ptr + token * num_experts + expert, mask=is_expert, other=float("-inf")).to(tl.float32)
    powers = tl.exp(logits - tl.max(logits, 0))
    probs = powers / tl.sum(powers, 0)
    # NaN is chosen last, so that every index is valid; the token's weights are still NaN.
    left = tl.where(probs == probs, probs, 0.0)
    left = tl.where(is_expert, left, -1.0)
    is_chosen = expert < 0
    for _ in tl.static_range(PER_TOKEN):
        best = tl.argmax(left, 0)
        is_best = expert == best
        is_chosen |= is_best
        left = tl.where(is_best, -2.0, left)
    shares = tl.where(is_chosen, probs, 0.0)
    if IS_NORMED:
        shares = shares / tl.sum(shares, 0)
    at = token * PER_TOKEN + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    number = expert
    if HAS_LIVE:
        number = tl.where(tl.load(live_ptr + token) != 0, expert, -1)
    tl.store(weights_ptr + at, shares, mask=is_chosen)
    tl.store(chosen_ptr + at, number, mask=is_chosen)


@triton.jit(do_not_specialize=["num_tokens"])
def list_pairs(
    chosen_ptr, lists_ptr, counts_ptr, num_tokens,
    PER_TOKEN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """List the (token, expert) pairs of one expert in each program, in the order of tokens, so that `multiply` need not
    search for them.

    chosen [num_tokens, PER_TOKEN]: indices of experts. Outputs: lists [experts, num_tokens], the pairs as indices into
    chosen (flattened); counts [experts], the number of pairs. BLOCK_P: PER_TOKEN rounded up to a power of two; BLOCK_T:
    tokens read at a time.
    """
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK_P)
    count = 0
    for first in range(0, num_tokens, BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        pair_TP = token[:, None] * PER_TOKEN + place
        mask_TP = (token < num_tokens)[:, None] & (place < PER_TOKEN)
        is_own_TP = tl.load(chosen_ptr + pair_TP, mask=mask_TP, other=-1) == expert
        # A token has an expert at most once: the sums over its experts pick one pair, or none.
        own = tl.sum(is_own_TP.to(tl.int32), 1)
        pair = tl.sum(tl.where(is_own_TP, pair_TP, 0), 1)
        at = expert * num_tokens + count + tl.cumsum(own, 0) - 1
        tl.store(lists_ptr + at, pair, mask=own > 0)
        count += tl.sum(own, 0)
    tl.store(counts_ptr + expert, count)


@triton.jit
def _activated(gate, up, limit, alpha, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        return gate / (1.0 + tl.exp(-gate * alpha)) * up
    slope = gate
    if ACTIVATION == "gelu_tanh":  # 0.5 x (1 + tanh(z)) = x sigmoid(2 z)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (gate / (1.0 + tl.exp(-slope))).to(DTYPE).to(tl.float32) * up


@triton.jit(do_not_specialize=["num_tokens"])
def multiply(
    inputs_ptr, weight_ptr, bias_ptr, out_ptr, chosen_ptr, lists_ptr, counts_ptr, num_tokens, limit, alpha,
    PER_TOKEN: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, IS_UP: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_LISTS: tl.constexpr, IS_BY_PAIR: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply the inputs of all (token, expert) pairs by one matrix of their expert; writes out [pairs, OUT]. Each
    program computes BLOCK_N outputs of one expert for all its pairs, BLOCK_T tokens at a time.

    IS_UP: out is activation(gate) * up, from inputs [tokens, IN] and weight [experts, 2 * OUT, IN], gate first.
    Otherwise it is the product of inputs [pairs, IN] and weight [experts, OUT, IN]. HAS_BIAS: adds bias [experts, rows
    of weight] to the products. With ACTIVATION "clamped_swiglu", `limit` is the bound on gate and up, `alpha` the
    factor in the sigmoid.

    chosen [num_tokens, PER_TOKEN]: each token's experts. HAS_LISTS: an expert's pairs are read from lists and counts,
    the outputs of `list_pairs`; otherwise they are searched in `chosen`. IS_BY_PAIR: programs are launched for each
    pair instead of each expert, in passes with fewer pairs than experts. If several pairs have the same expert, the
    programs of the first one compute all of them, and the programs of the others do nothing.

    BLOCK_P: PER_TOKEN rounded up to a power of two; BLOCK_S: the number of pairs, likewise. BLOCK_K: inputs that are
    read at a time. STAGES: pipeline stages of the loop over inputs.
    """
    tile, slot = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    expert, count = slot, num_tokens
    if IS_BY_PAIR:
        expert = tl.load(chosen_ptr + slot)
        before = tl.arange(0, BLOCK_S)
        earlier = tl.load(chosen_ptr + before, mask=before < slot, other=-1)
        is_idle = (expert < 0) | (tl.sum((earlier == expert).to(tl.int32), 0) > 0)
        count = tl.where(is_idle, 0, num_tokens)  # an idle program skips the loop: no address of expert -1 is read
    if HAS_LISTS:
        count = tl.load(counts_ptr + slot)
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < OUT
    column = tl.arange(0, BLOCK_K)
    place = tl.arange(0, BLOCK_P)
    halves: tl.constexpr = 2 if IS_UP else 1
    matrix_ptr = weight_ptr + expert.to(tl.int64) * (halves * OUT * IN) + row[:, None] * IN
    for first in range(0, count, BLOCK_T):
        member = first + tl.arange(0, BLOCK_T)
        if HAS_LISTS:
            is_member = member < count
            pair = tl.load(lists_ptr + slot * num_tokens + member, mask=is_member, other=0)
        else:
            pair_TP = member[:, None] * PER_TOKEN + place
            mask_TP = (member < num_tokens)[:, None] & (place < PER_TOKEN)
            is_own_TP = tl.load(chosen_ptr + pair_TP, mask=mask_TP, other=-1) == expert
            is_member = tl.sum(is_own_TP.to(tl.int32), 1) > 0
            pair = tl.sum(tl.where(is_own_TP, pair_TP, 0), 1)
        source = pair // PER_TOKEN if IS_UP else pair
        own_ptr = inputs_ptr + source[:, None] * IN
        sum_NT = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        up_NT = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for begin in tl.range(0, IN, BLOCK_K, num_stages=STAGES):
            at = begin + column
            inputs_TK = tl.load(own_ptr + at, mask=is_member[:, None] & (at < IN), other=0.0)
            mask_NK = is_row[:, None] & (at < IN)
            weight_NK = tl.load(matrix_ptr + at, mask=mask_NK, other=0.0)
            sum_NT += tl.dot(weight_NK, tl.trans(inputs_TK), input_precision="ieee")
            if IS_UP:
                more_NK = tl.load(matrix_ptr + OUT * IN + at, mask=mask_NK, other=0.0)
                up_NT += tl.dot(more_NK, tl.trans(inputs_TK), input_precision="ieee")
        if HAS_BIAS:
            bias_at = bias_ptr + expert * (halves * OUT) + row
            sum_NT += tl.load(bias_at, mask=is_row, other=0.0).to(tl.float32)[:, None]
            if IS_UP:
                up_NT += tl.load(bias_at + OUT, mask=is_row, other=0.0).to(tl.float32)[:, None]
        if IS_UP:
            sum_NT = _activated(sum_NT, up_NT, limit, alpha, ACTIVATION, dtype)
        out_at = pair[None, :] * OUT + row[:, None]
        tl.store(out_ptr + out_at, sum_NT.to(dtype), mask=is_row[:, None] & is_member[None, :])


@triton.jit
def combine(
    outputs_ptr, weights_ptr, chosen_ptr, shared_ptr, gate_ptr, out_ptr,
    SIZE: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr, HAS_SHARED: tl.constexpr,
):  # fmt: skip
    """Compute each token's weighted sum of its experts' outputs. One program handles one token and BLOCK of columns; it
    adds in the order of `chosen`.

    outputs [T * PER_TOKEN, SIZE]; weights, chosen [T, PER_TOKEN], where index -1 adds zeros; out [T, SIZE]. HAS_SHARED:
    adds the shared expert's output, shared [T, SIZE], times the sigmoid of the token's gate [T].
    """
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    summed = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + k
        is_live = tl.load(chosen_ptr + pair) >= 0
        outputs = tl.load(outputs_ptr + pair.to(tl.int64) * SIZE + at, mask=(at < SIZE) & is_live, other=0.0).to(
            tl.float32
        )
        summed += outputs * tl.where(is_live, tl.load(weights_ptr + pair), 0.0)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    own_at = token.to(tl.int64) * SIZE + at
    if HAS_SHARED:
        gate = 1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + token).to(tl.float32)))
        shared = tl.load(shared_ptr + own_at, mask=at < SIZE, other=0.0).to(tl.float32)
        shared = (shared * gate.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        summed = summed.to(dtype).to(tl.float32) + shared
    tl.store(out_ptr + own_at, summed.to(dtype), mask=at < SIZE)
