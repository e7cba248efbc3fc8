"""Rows for verification rules, from tensors of probabilities."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paceline.model.sampling.logits import sample
from paceline.verify.rules import CheckedRow, RowVerdict, Uniforms

Verify = Callable[[CheckedRow], RowVerdict]


def checked(
    drafts: list[int], draft_probs_KV: Tensor | None, target_probs_JV: Tensor, uniforms: Uniforms
) -> CheckedRow:
    return CheckedRow(
        drafts,
        draft_probs_KV,
        uniforms,
        draw=lambda slot: sample(target_probs_JV[slot], uniforms.noise(slot).uniform),
        target_probs=lambda: target_probs_JV,
    )


def judged(
    verify: Verify, drafts: list[int], draft_probs_KV: Tensor | None, target_probs_JV: Tensor, uniforms: Uniforms
) -> RowVerdict:
    """A rule's verdict on a row."""
    return verify(checked(drafts, draft_probs_KV, target_probs_JV, uniforms))
