"""Packs weights into matrices of the native library; drafters of one target share equal ones (`model/sharing.py`)."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from paceline.model import sharing
from paceline.model.gguf.blocks import Blocks, Weight
from paceline.model.native.library import Matrix, padded_rows


def pack(weights: list[Weight], dtype: torch.dtype) -> Matrix:
    """Stack matrices [n_i, cols] into one; if there are several, each is padded to a multiple of 16 rows.

    `dtype`: dtype of products with the matrix. Weights are converted to it, except those that keep their format:
    quantised blocks, bfloat16 weights and, if `dtype` is float32, float16 weights.
    """
    sources = [weight.data if isinstance(weight, Blocks) else weight for weight in weights]
    forms = [_form(weight, dtype) for weight in weights]
    return sharing.matrix(lambda: _filled(weights, forms), sources, *forms, num_bytes=lambda matrix: matrix.num_bytes)


def _filled(weights: list[Weight], forms: list[str]) -> Matrix:
    counts = [padded_rows(weight.shape[0]) for weight in weights] if len(weights) > 1 else [weights[0].shape[0]]
    groups = groupby(zip(forms, counts, strict=True), itemgetter(0))
    matrix = Matrix([(sum(count for _, count in group), name) for name, group in groups], weights[0].shape[1])
    first = 0
    for weight, name, count in zip(weights, forms, counts, strict=True):
        if isinstance(weight, Blocks):
            matrix.fill(first, weight.data, name)
        else:
            matrix.fill(first, weight if str(weight.dtype).endswith(name) else weight.float())
        first += count
    return matrix


def _form(weight: Weight, dtype: torch.dtype) -> str:
    """Storage format of a weight. For bfloat16 products float16 weights become bfloat16."""
    if isinstance(weight, Blocks):
        return weight.kind
    if weight.dtype in (dtype, torch.bfloat16) or (weight.dtype == torch.float16 and dtype == torch.float32):
        return str(weight.dtype).removeprefix("torch.")
    return str(dtype).removeprefix("torch.")


def pack_vectors(vectors: list[Tensor | None]) -> Tensor | None:
    """Concatenate the biases of matrices that `pack` stacks, in float32, each padded with zeros to a multiple of 16
    numbers. Returns None if all are None."""
    if all(vector is None for vector in vectors):
        return None
    padded = []
    for vector in vectors:
        assert vector is not None, "all projections of a stack have a bias, or none"
        padded.append(torch.nn.functional.pad(vector.float(), (0, padded_rows(len(vector)) - len(vector))))
    return torch.cat(padded)
