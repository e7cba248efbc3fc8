"""Masks logits for `min_tokens` (no end token before it) and `bad_words`, in addition to bias and penalties.

Row j of the J = K+1 verified positions is masked as if draft[:j] were already in the answer, so speculation stays
exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.model.text.tokenizer import Tokenizer
from paceline.types import SamplingParams, Sequence


def forbidden_ids(tokenizer: Tokenizer, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of the request's bad words. Each word has up to two encodings: as at the beginning of a
    text, and as after a space."""
    spelled: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        first = tuple(tokenizer.encode(word.lstrip(" "), add_special_tokens=False))
        later = tuple(tokenizer.encode(f" {word.lstrip(' ')}", add_special_tokens=False))
        spelled |= dict.fromkeys(ids for ids in (first, later) if ids)
    return tuple(spelled)


def shape(seq: Sequence, logits_JV: Tensor, draft_tokens: list[int]) -> Tensor:
    """Applies the request's bad words and minimum length: returns a copy of the logits [J, V] with forbidden tokens at
    -inf, or the same tensor if the request has neither setting. Position 0 follows the committed tokens; each later one
    follows one more of the J - 1 tokens `draft_tokens`."""
    if not seq.shapes_logits:
        return logits_JV
    logits_JV, num_vocab = logits_JV.clone(), logits_JV.shape[-1]
    num_early = min(max(seq.params.min_tokens - seq.num_output, 0), len(logits_JV))
    ends = [token for token in seq.eos_token_ids if token < num_vocab]
    if num_early and ends:
        logits_JV[:num_early, ends] = float("-inf")
    words = [word for word in seq.forbidden if word[-1] < num_vocab]
    if alone := [word[0] for word in words if len(word) == 1]:
        logits_JV.index_fill_(-1, torch.tensor(alone, device=logits_JV.device), float("-inf"))
    if len(alone) == len(words):
        return logits_JV
    # No word looks back further than this: a long answer costs no more than a short one.
    num_back = max(map(len, words)) - 1
    answer = [*seq.tokens[max(seq.prompt_len, len(seq.tokens) - num_back) :], *draft_tokens]
    num_kept = len(answer) - len(draft_tokens)
    for *before, last in words:
        for place in range(len(logits_JV)) if before else ():
            end = num_kept + place
            if end >= len(before) and answer[end - len(before) : end] == before:
                logits_JV[place, last] = float("-inf")
    return logits_JV
