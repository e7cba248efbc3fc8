"""Greedy verification: the longest prefix of drafts that the target would have chosen itself, then its own token.

Exact at temperature 0: the text is plain greedy decoding's (Stern et al. 1811.03115, section 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.types import Verdict
from paceline.verify.rule import RowVerdict, Uniforms

if TYPE_CHECKING:
    from torch import Tensor


def verify_argmax(draft_tokens: list[int], argmax_J: list[int]) -> RowVerdict:
    """One row from the target's most likely tokens; `argmax_J` may be longer than the drafts + 1 (padding)."""
    num_accepted = 0
    for drafted, wanted in zip(draft_tokens, argmax_J, strict=False):
        if drafted != wanted:
            break
        num_accepted += 1
    return RowVerdict(num_accepted, argmax_J[num_accepted])


def verify_batch(draft_tokens_B: list[list[int]], argmax_BJ: list[list[int]]) -> Verdict:
    """All rows of a round; take `argmax_BJ` from `logits_BJV.argmax(-1).tolist()`, the round's one wait for the device."""
    rows_B = [verify_argmax(drafts, argmax_J) for drafts, argmax_J in zip(draft_tokens_B, argmax_BJ, strict=True)]
    return Verdict([row.num_accepted for row in rows_B], [row.next_token for row in rows_B])


def verify(draft_tokens: list[int], draft_probs_KV: Tensor | None, target_probs_JV: Tensor, uniforms: Uniforms) -> RowVerdict:
    """The common signature; `target_probs_JV` [J, V] may be probabilities or logits, the other arguments play no part."""
    return verify_argmax(draft_tokens, target_probs_JV.argmax(-1).tolist())
