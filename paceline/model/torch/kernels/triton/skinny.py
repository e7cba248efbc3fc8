"""Triton kernel of `model/torch/kernels/skinny.py`: a product of few tokens with a matrix, as fast as reading it.

A program loads its first rows before it waits for the previous kernel (`overlap`), on which the matrix does not depend.
"""

import triton
import triton.language as tl

from paceline.model.torch.kernels.triton.overlap import overlap


@triton.jit
def _product(
    inputs_ptr, at_T, is_token, weight_RC, at, INNER: tl.constexpr, IS_ONE: tl.constexpr, PRECISION: tl.constexpr, sums
):
    """Add the product of a tile of the matrix with the same columns of the inputs to `sums`."""
    if IS_ONE:
        input_C = tl.load(inputs_ptr + at).to(tl.float32)
        sums += weight_RC.to(tl.float32) * input_C[None, :]
    else:
        input_TC = tl.load(inputs_ptr + at_T[:, None] * INNER + at[None, :], mask=is_token[:, None], other=0.0)
        sums = tl.dot(input_TC, tl.trans(weight_RC), sums, input_precision=PRECISION)
    return sums


@triton.jit
def _rounded(sums, bias_ptr, row, IS_ONE: tl.constexpr, HAS_BIAS: tl.constexpr, dtype: tl.constexpr):
    """Final sums plus bias, [1, rows] or [tokens, rows], rounded to `dtype`, in float32."""
    result = tl.sum(sums, 1)[None, :] if IS_ONE else sums
    if HAS_BIAS:
        result += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    return result.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])
def skinny(
    inputs_ptr, weight_ptr, bias_ptr, out_ptr, num_tokens, size,
    INNER: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS of the `size` outputs in each program, for all tokens, from COLUMNS columns of the matrix at a time.

    GATE 0: out [tokens, size] = inputs [tokens, INNER] times the matrix [size, INNER], plus the bias [size] if
    HAS_BIAS. GATE 1 (SiLU) or 2 (GELU by tanh): matrix and bias have `size` rows of gate, then `size` rows of up, and
    out = activation(gate) * up.

    TOKENS: 1 for one token, else the smallest power of two, at least 16, that is not below num_tokens. COLUMNS divides
    INNER, ROWS divides size. PRECISION: of the products; STAGES: pipeline stages of the loop.
    """
    IS_ONE: tl.constexpr = TOKENS == 1
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at_T = tl.arange(0, TOKENS)
    is_token = at_T < num_tokens
    weight_at = weight_ptr + row.to(tl.int64)[:, None] * INNER + column[None, :]
    partner_at = weight_at + size.to(tl.int64) * INNER
    weight_RC = tl.load(weight_at)
    if GATE > 0:
        partner_RC = tl.load(partner_at)
    overlap(OVERLAPS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    sums = tl.zeros([ROWS, COLUMNS] if IS_ONE else [TOKENS, ROWS], tl.float32)
    sums = _product(inputs_ptr, at_T, is_token, weight_RC, column, INNER, IS_ONE, PRECISION, sums)
    if GATE > 0:
        partner_sums = tl.zeros([ROWS, COLUMNS] if IS_ONE else [TOKENS, ROWS], tl.float32)
        partner_sums = _product(inputs_ptr, at_T, is_token, partner_RC, column, INNER, IS_ONE, PRECISION, partner_sums)
    for first in tl.range(COLUMNS, INNER, COLUMNS, num_stages=STAGES):
        at = first + column
        weight_RC = tl.load(weight_at + first)
        sums = _product(inputs_ptr, at_T, is_token, weight_RC, at, INNER, IS_ONE, PRECISION, sums)
        if GATE > 0:
            partner_RC = tl.load(partner_at + first)
            partner_sums = _product(inputs_ptr, at_T, is_token, partner_RC, at, INNER, IS_ONE, PRECISION, partner_sums)
    result = _rounded(sums, bias_ptr, row, IS_ONE, HAS_BIAS, dtype)
    if GATE > 0:
        partner = _rounded(partner_sums, bias_ptr + size, row, IS_ONE, HAS_BIAS, dtype)
        slope = result
        if GATE == 2:  # 0.5 x (1 + tanh(z)) = x sigmoid(2 z)
            slope = 1.5957691216057308 * (result + 0.044715 * result * result * result)
        result = (result / (1.0 + tl.exp(-slope))).to(dtype).to(tl.float32) * partner
    out_at = out_ptr + at_T[:, None] * size + row[None, :]
    tl.store(out_at, result.to(dtype), mask=is_token[:, None])
