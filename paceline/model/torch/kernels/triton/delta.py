"""Triton kernels of gated delta nets, imported only when `model/torch/kernels/delta.py` launches them.

A row's pending window holds the positions after its state (`delta_cache.py`). Of these the first `gone` are committed
to the state, `held` remain, and `count` new ones follow. Layouts are those of `DeltaMemory`, row after row.
"""

import triton
import triton.language as tl


@triton.jit
def commit(
    states_ptr, keys_ptr, changes_ptr, decays_ptr, gone_ptr, held_ptr,
    ROOM: tl.constexpr, BLOCK_R: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Merges each row's oldest pending positions into its recurrent state. One program handles one row, value head and
    tile of values.

    The row's other pending positions move to the front of its window: this kernel moves their changes (values that a
    position adds to the state), `convolve` moves their inputs, keys and decays.

    states, keys, changes, decays: tensors of `DeltaMemory`, whose windows have ROOM positions per row. gone, held
    [rows]: number of positions to merge, and number still pending after that. NUM_KEY_HEADS, NUM_HEADS: key and value
    heads of KEY and VALUE channels. BLOCK_R, BLOCK_K: ROOM and KEY rounded up to powers of two; BLOCK_V: values per
    tile.
    """
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    gone = tl.load(gone_ptr + row).to(tl.int32)
    if gone > 0:
        held = tl.load(held_ptr + row).to(tl.int32)
        place, key = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
        value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        is_value, goes = value < VALUE, place < gone
        pending = row * ROOM + place
        decays = tl.load(decays_ptr + pending * NUM_HEADS + head, mask=goes, other=0.0)
        total = tl.sum(decays, 0)
        rest = tl.exp(total - tl.cumsum(decays, 0))  # what the positions after each one leave of it
        key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
        key_at = (pending * NUM_KEY_HEADS + key_head)[:, None] * KEY + key
        keys_RK = tl.load(keys_ptr + key_at, mask=goes[:, None] & (key < KEY), other=0.0) * rest[:, None]
        change_at = (pending * NUM_HEADS + head)[:, None] * VALUE + value
        changes_RV = tl.load(changes_ptr + change_at, mask=goes[:, None] & is_value, other=0.0)
        stays = (place < held)[:, None] & is_value
        moved_RV = tl.load(changes_ptr + change_at + gone * NUM_HEADS * VALUE, mask=stays, other=0.0)
        state_at = states_ptr + ((row * NUM_HEADS + head) * KEY + key)[:, None] * VALUE + value
        mask_KV = (key < KEY)[:, None] & is_value
        state_KV = tl.load(state_at, mask=mask_KV, other=0.0) * tl.exp(total)
        state_KV += tl.dot(tl.trans(keys_RK), changes_RV, input_precision="tf32x3")
        tl.store(state_at, state_KV, mask=mask_KV)
        tl.debug_barrier()  # all threads have read before anything is overwritten
        tl.store(changes_ptr + change_at, moved_RV, mask=stays)


@triton.jit(do_not_specialize=["num_columns"])
def convolve(
    fused_ptr, kernel_ptr, windows_ptr, inputs_ptr, keys_ptr, decays_ptr, query_ptr, value_ptr,
    gone_ptr, held_ptr, counts_ptr, depths_ptr, bits_ptr, num_columns, eps,
    ROOM: tl.constexpr, BLOCK_R: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, BLOCK_W: tl.constexpr,
    COUNT: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Computes the convolution of the new tokens, followed by SiLU, and normalises their queries and keys. One program
    handles one head's channels of one row.

    If `commit` has merged positions, the program first moves the inputs, keys and decays of the positions still pending
    to the front of the window (`commit` has already moved their changes). It then appends the new inputs and keys.

    fused [T, num_columns]: the convolution's inputs are its first columns; T = rows * COUNT tokens. kernel [TAPS,
    channels]: weights. windows, inputs, keys, decays: tensors of `DeltaMemory`. gone, held [rows]: numbers of merged
    and of still pending positions. counts [rows]: valid tokens. depths, bits [rows, COUNT]: depth of a token in its
    tree, and bit mask of its ancestors and itself. eps: of the normalisation. Outputs, float32: query [T, key heads,
    KEY], value [T, heads, VALUE].

    ROOM, NUM_KEY_HEADS, NUM_HEADS, KEY, VALUE: as in `commit`. BLOCK_R, BLOCK_W, BLOCK_J, BLOCK: ROOM, TAPS - 1, COUNT
    and the larger of KEY and VALUE, rounded up to powers of two.
    """
    head, row = tl.program_id(1), tl.program_id(0).to(tl.int64)
    channels: tl.constexpr = 2 * NUM_KEY_HEADS * KEY + NUM_HEADS * VALUE
    width: tl.constexpr = TAPS - 1
    is_key = (head >= NUM_KEY_HEADS) & (head < 2 * NUM_KEY_HEADS)
    is_value = head >= 2 * NUM_KEY_HEADS
    key_head, value_head = head - NUM_KEY_HEADS, head - 2 * NUM_KEY_HEADS
    size = tl.where(is_value, VALUE, KEY)
    at = tl.arange(0, BLOCK)
    is_own = at < size
    channel = tl.where(is_value, 2 * NUM_KEY_HEADS * KEY + value_head * VALUE, head * KEY) + at
    gone, held = tl.load(gone_ptr + row).to(tl.int32), tl.load(held_ptr + row).to(tl.int32)
    count = tl.load(counts_ptr + row).to(tl.int32)
    inputs_at, windows_at = inputs_ptr + row * ROOM * channels + channel, windows_ptr + row * width * channels + channel
    key_at = keys_ptr + (row * ROOM * NUM_KEY_HEADS + key_head) * KEY + at
    if gone > 0:
        place, tap = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_W)
        stays = place < held
        stays_RX = stays[:, None] & is_own
        moved_RX = tl.load(inputs_at + (place + gone)[:, None] * channels, mask=stays_RX, other=0.0)
        keys_RK = tl.load(
            key_at + (place + gone)[:, None] * (NUM_KEY_HEADS * KEY), mask=stays_RX & is_key, other=0.0
        )  # fmt: skip
        decay_at = decays_ptr + (row * ROOM + place) * NUM_HEADS + value_head
        decays = tl.load(decay_at + gone * NUM_HEADS, mask=stays & is_value, other=0.0)
        source = tap + gone  # index into the window followed by the pending inputs
        is_tap = (tap < width)[:, None] & is_own
        old_WX = tl.load(windows_at + source[:, None] * channels, mask=is_tap & (source < width)[:, None], other=0.0)
        new_WX = tl.load(
            inputs_at + (source - width)[:, None] * channels, mask=is_tap & (source >= width)[:, None], other=0.0
        )  # fmt: skip
        tl.debug_barrier()  # all threads have read before anything is overwritten
        tl.store(inputs_at + place[:, None] * channels, moved_RX, mask=stays_RX)
        tl.store(key_at + place[:, None] * (NUM_KEY_HEADS * KEY), keys_RK, mask=stays_RX & is_key)
        tl.store(decay_at, decays, mask=stays & is_value)
        tl.store(windows_at + tap[:, None] * channels, tl.where((source < width)[:, None], old_WX, new_WX), mask=is_tap)
        tl.debug_barrier()
    slot = tl.arange(0, BLOCK_J)
    is_live = slot < count
    depth = tl.load(depths_ptr + row * COUNT + slot, mask=slot < COUNT, other=0).to(tl.int32)
    bits = tl.load(bits_ptr + row * COUNT + slot, mask=slot < COUNT, other=0).to(tl.int32)
    is_seen = ((bits[:, None] >> slot) & 1) != 0
    fused_at = fused_ptr + row * COUNT * num_columns + channel
    sum_JX = tl.zeros([BLOCK_J, BLOCK], tl.float32)
    mask_JX = is_live[:, None] & is_own
    for back in tl.static_range(TAPS):
        wanted = depth - back
        # A token has one ancestor of each depth, itself included: the sum is its slot.
        ancestor = tl.sum(tl.where(is_seen & (depth == wanted[:, None]), slot, 0), 1)
        before = held + wanted  # if wanted < 0: place in the pending window; below 0, in the inputs before it
        is_before = wanted < 0
        own_JX = tl.load(fused_at + ancestor[:, None] * num_columns, mask=mask_JX & (~is_before)[:, None], other=0.0)
        trail_mask = mask_JX & (is_before & (before >= 0))[:, None]
        trail_JX = tl.load(inputs_at + before[:, None] * channels, mask=trail_mask, other=0.0)
        window_mask = mask_JX & (is_before & (before < 0))[:, None]
        window_JX = tl.load(windows_at + (width + before)[:, None] * channels, mask=window_mask, other=0.0)
        weight = tl.load(kernel_ptr + (width - back) * channels + channel, mask=is_own, other=0.0)
        sum_JX += (own_JX + trail_JX + window_JX).to(tl.float32) * weight
        if back == 0:
            tl.store(inputs_at + (held + slot)[:, None] * channels, own_JX, mask=mask_JX)
    dtype: tl.constexpr = fused_ptr.dtype.element_ty
    sum_JX = sum_JX.to(dtype).to(tl.float32)
    out_JX = (sum_JX / (1.0 + tl.exp(-sum_JX))).to(dtype).to(tl.float32)
    token = row * COUNT + slot
    if is_value:
        tl.store(value_ptr + (token * NUM_HEADS + value_head)[:, None] * VALUE + at, out_JX, mask=mask_JX)
    else:
        out_JX *= tl.rsqrt(tl.sum(out_JX * out_JX, 1) + eps)[:, None]
        if is_key:
            tl.store(key_at + (held + slot)[:, None] * (NUM_KEY_HEADS * KEY), out_JX, mask=mask_JX)
        else:
            scale: tl.constexpr = KEY**-0.5
            tl.store(query_ptr + (token * NUM_KEY_HEADS + head)[:, None] * KEY + at, out_JX * scale, mask=mask_JX)


@triton.jit(do_not_specialize=["num_columns"])
def recur(
    fused_ptr, rate_ptr, step_ptr, states_ptr, keys_ptr, changes_ptr, decays_ptr, query_ptr, value_ptr, out_ptr,
    held_ptr, counts_ptr, bits_ptr, num_columns,
    ROOM: tl.constexpr, BLOCK_R: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    COUNT: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Compute the layer's outputs for the new tokens; padding tokens yield zeros. Appends to the pending window each
    token's changes (values to add to the state) and decay (a logarithm). One program handles one row, value head and
    tile of values.

    fused [T, num_columns]: its last columns are, per head, the logit of beta (the update's weight), then the input of
    the decay's softplus. rate, step [heads]: factor of the decay, and bias in its softplus. states, keys, changes,
    decays: tensors of `DeltaMemory`. query, value: outputs of `convolve`; out [T, heads, VALUE]. BLOCK_K: key channels
    per product; BLOCK_V: values per tile. All other arguments: as in `convolve`.
    """
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    held, count = tl.load(held_ptr + row).to(tl.int32), tl.load(counts_ptr + row).to(tl.int32)
    slot, place = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_R)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_live, is_value, is_held = slot < count, value < VALUE, (place < held) & (count > 0)
    token, key_head = row * COUNT + slot, head // (NUM_HEADS // NUM_KEY_HEADS)

    first: tl.constexpr = 2 * NUM_KEY_HEADS * KEY + 2 * NUM_HEADS * VALUE
    raw_at = fused_ptr + token * num_columns + first + head
    raw = tl.load(raw_at, mask=is_live, other=0.0).to(tl.float32)
    beta = (1.0 / (1.0 + tl.exp(-raw))).to(fused_ptr.dtype.element_ty).to(tl.float32)
    step = tl.load(raw_at + NUM_HEADS, mask=is_live, other=0.0).to(tl.float32) + tl.load(step_ptr + head)
    # Linear above 20, as `F.softplus`.
    softplus = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    decay = tl.where(is_live, tl.load(rate_ptr + head) * softplus, 0.0)
    bits = tl.load(bits_ptr + token, mask=is_live, other=0).to(tl.int32)
    is_seen = (((bits[:, None] >> slot) & 1) != 0) & is_live[:, None] & is_live

    pending = row * ROOM + place
    old_decays = tl.load(decays_ptr + pending * NUM_HEADS + head, mask=is_held, other=0.0)
    old_sums, total = tl.cumsum(old_decays, 0), tl.sum(old_decays, 0)
    sums = total + tl.sum(tl.where(is_seen, decay[None, :], 0.0), 1)

    own_trail = row * ROOM + held + slot
    old_change_at = (pending * NUM_HEADS + head)[:, None] * VALUE + value
    old_RV = tl.load(changes_ptr + old_change_at, mask=is_held[:, None] & is_value, other=0.0)
    known_JV = tl.zeros([BLOCK_J, BLOCK_V], tl.float32)
    output_JV = tl.zeros([BLOCK_J, BLOCK_V], tl.float32)
    known_JR = tl.zeros([BLOCK_J, BLOCK_R], tl.float32)
    score_JR = tl.zeros([BLOCK_J, BLOCK_R], tl.float32)
    known_JJ = tl.zeros([BLOCK_J, BLOCK_J], tl.float32)
    score_JJ = tl.zeros([BLOCK_J, BLOCK_J], tl.float32)
    for begin in range(0, KEY, BLOCK_K):  # unrolled at once, ptxas would spill registers
        key = begin + tl.arange(0, BLOCK_K)
        is_key = key < KEY
        query_at = (token * NUM_KEY_HEADS + key_head)[:, None] * KEY + key
        query_JK = tl.load(query_ptr + query_at, mask=is_live[:, None] & is_key, other=0.0)
        key_at = (own_trail * NUM_KEY_HEADS + key_head)[:, None] * KEY + key
        # `convolve` has already appended the new keys to the window.
        key_JK = tl.load(keys_ptr + key_at, mask=is_live[:, None] & is_key, other=0.0)
        state_at = ((row * NUM_HEADS + head) * KEY + key)[:, None] * VALUE + value
        state_KV = tl.load(states_ptr + state_at, mask=is_key[:, None] & is_value & (count > 0), other=0.0)
        old_key_at = (pending * NUM_KEY_HEADS + key_head)[:, None] * KEY + key
        old_RK = tl.load(keys_ptr + old_key_at, mask=is_held[:, None] & is_key, other=0.0)
        known_JV += tl.dot(key_JK, state_KV, input_precision="tf32x3")
        output_JV += tl.dot(query_JK, state_KV, input_precision="tf32x3")
        known_JR += tl.dot(key_JK, tl.trans(old_RK), input_precision="tf32x3")
        score_JR += tl.dot(query_JK, tl.trans(old_RK), input_precision="tf32x3")
        known_JJ += tl.dot(key_JK, tl.trans(key_JK), input_precision="tf32x3")
        score_JJ += tl.dot(query_JK, tl.trans(key_JK), input_precision="tf32x3")
    fade_J1 = tl.exp(sums)[:, None]
    # No exponent is positive: decays are at most 0, and `sums` include all that `old_sums` do.
    fade_JR = tl.where(is_held[None, :], tl.exp(sums[:, None] - old_sums), 0.0)
    known_JV = known_JV * fade_J1 + tl.dot(known_JR * fade_JR, old_RV, input_precision="tf32x3")
    output_JV = output_JV * fade_J1 + tl.dot(score_JR * fade_JR, old_RV, input_precision="tf32x3")

    fade_JJ = tl.where(is_seen, tl.exp(tl.where(is_seen, sums[:, None] - sums, 0.0)), 0.0)
    system_JJ = known_JJ * fade_JJ * beta[:, None]
    system_JJ = tl.where(slot[:, None] == slot, 0.0, system_JJ)
    value_at = (token * NUM_HEADS + head)[:, None] * VALUE + value
    mask_JV = is_live[:, None] & is_value
    change_JV = beta[:, None] * (tl.load(value_ptr + value_at, mask=mask_JV, other=0.0) - known_JV)
    for solved in range(1, count):  # forward substitution: a token follows only earlier ones
        factors = tl.sum(tl.where((slot == solved)[:, None], system_JJ, 0.0), 0)
        correction = tl.sum(factors[:, None] * change_JV, 0)
        change_JV = tl.where((slot == solved)[:, None], change_JV - correction, change_JV)
    output_JV += tl.dot(score_JJ * fade_JJ, change_JV, input_precision="tf32x3")

    output_JV = tl.where(is_live[:, None], output_JV, 0.0)
    tl.store(out_ptr + value_at, output_JV.to(out_ptr.dtype.element_ty), mask=(slot < COUNT)[:, None] & is_value)
    tl.store(changes_ptr + (own_trail * NUM_HEADS + head)[:, None] * VALUE + value, change_JV, mask=mask_JV)
    # Equal in all tiles of values: the first one writes.
    tl.store(decays_ptr + own_trail * NUM_HEADS + head, decay, mask=is_live & (tl.program_id(0) == 0))


@triton.jit(do_not_specialize=["num_columns"])
def gated_norm(
    input_ptr, fused_ptr, weight_ptr, out_ptr, num_columns, first, eps,
    NUM_HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute out = norm(input) * weight * silu(gate) for one token and head in each program; norm is an RMSNorm over
    the head's VALUE channels.

    input: the output `out` of the kernel `recur`; input and out [T, NUM_HEADS, VALUE]. fused [T, num_columns]: gates
    from column `first` on. weight [VALUE], eps: of the norm. BLOCK: VALUE rounded up to a power of two.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    mask = at < VALUE
    own = (token * NUM_HEADS + head) * VALUE + at
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    output = tl.load(input_ptr + own, mask=mask, other=0.0).to(tl.float32)
    normed = (output * tl.rsqrt(tl.sum(output * output, 0) / VALUE + eps)).to(dtype).to(tl.float32)
    gate = tl.load(fused_ptr + token * num_columns + first + head * VALUE + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + own, (normed * weight * gate / (1.0 + tl.exp(-gate))).to(dtype), mask=mask)
