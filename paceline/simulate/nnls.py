"""Least squares without negative solutions: Lawson and Hanson, "Solving Least Squares Problems" (1974), chapter 23."""

from __future__ import annotations

import numpy as np

Matrix = np.ndarray


def nnls(columns: Matrix, wanted: Matrix, tolerance: float = 1e-12) -> Matrix:
    """The x >= 0 that makes |columns @ x - wanted| least. `columns` [n, k], `wanted` [n]; returns [k].

    Columns are scaled to unit length first, so that seconds and counts weigh alike; one of zeros gets 0.
    """
    lengths = np.linalg.norm(columns, axis=0)
    scale = np.where(lengths > 0, lengths, 1.0)
    scaled = columns / scale
    solution = np.zeros(columns.shape[1])
    is_used = np.zeros(columns.shape[1], dtype=bool)
    for _ in range(10 * columns.shape[1]):
        gradient = scaled.T @ (wanted - scaled @ solution)
        gradient[is_used] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance * max(float(np.linalg.norm(wanted)), 1e-300):
            break
        is_used[best] = True
        solution = _inner(scaled, wanted, solution, is_used)
    return solution / scale


def _inner(scaled: Matrix, wanted: Matrix, solution: Matrix, is_used: Matrix) -> Matrix:
    """Least squares over the used columns; those that would turn negative get 0 and leave `is_used`."""
    while True:
        trial = np.zeros_like(solution)
        trial[is_used] = np.linalg.lstsq(scaled[:, is_used], wanted, rcond=None)[0]
        low = is_used & (trial <= 0)
        if not low.any():
            return trial
        step = np.min(solution[low] / np.maximum(solution[low] - trial[low], 1e-300))
        solution = solution + step * (trial - solution)
        is_used &= solution > 1e-14
        solution[~is_used] = 0.0
