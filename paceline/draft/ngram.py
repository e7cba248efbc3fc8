"""N-gram drafter (prompt lookup): drafts the tokens that followed an earlier occurrence of the text's last tokens.

A hash map leads from the last two tokens to the positions after their earlier occurrences in prompt or answer; the
longest match wins, the latest one on ties. The acceptance probability of a draft is estimated from the length of the
match and this sequence's history:

    chance = distrusted + (trusted - distrusted) * trust      MATCH_CLASSES, by the length of the match
    trust: share of drafts accepted, decayed by 0.85 per round, initially 0.8

All state is per row: outputs are batch-invariant. `PredictionDrafter` drafts from another text: the answer that a
request predicts (`SamplingParams.prediction`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from paceline.draft.base import Drafter, Observed, checked_num_drafted
from paceline.errors import ConfigError, SamplingError, refuse, shown
from paceline.model.text.tokenizer import Tokenizer
from paceline.types import LOOKUP, PREDICTION, Batch, DraftBlock, SamplingParams, Sequence

MATCH_CLASSES = ((1, 0.12, 0.6), (2, 0.4, 0.9), (4, 0.55, 0.95), (16, 0.9, 0.98))
"""Estimates by length of the match: (minimum matching tokens, acceptance probability at trust 0, the same at trust
1)."""
MOST_REACH = MATCH_CLASSES[-1][0]
MOST_DRAFTED = 16
MOST_MATCHES = 64
"""Number of latest earlier occurrences that are compared with the end of the text."""
_FADE, _FIRST_TRUST = 0.85, 0.8
PREDICTED_CLASSES = ((0, 0.02, 0.3), (1, 0.05, 0.45), (2, 0.2, 0.88), (4, 0.4, 0.96), (16, 0.8, 0.985))
"""The same estimates for drafts from a prediction. With 0 matching tokens the position in it is an assumption."""
NEAR = 64
"""Maximum distance, in tokens, at which a single matching token gives the position in a prediction."""
MOST_PREDICTED = 31
"""Maximum drafts per round from a prediction: with the anchor, a pass of 32 positions."""


@dataclass(slots=True)
class _Row:
    followers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """n-gram -> positions after its occurrences, without the one that ends the text."""
    num_indexed: int = 0
    trust: float = _FIRST_TRUST


class _TextDrafter(Drafter):
    """A drafter that copies tokens of a text, with a share of accepted drafts for each row."""

    is_instant = True

    def __init__(self, num_drafted: int) -> None:
        self.num_drafted = num_drafted
        self._rows: dict[int, Any] = {}
        """State of each row, with the field `trust`."""
        self._pending: dict[int, int] = {}
        """Number of drafts in the current round, by row."""

    def drop(self, seq: Sequence) -> None:
        self._rows.pop(seq.row, None)
        self._pending.pop(seq.row, None)

    def observe(self, observed: list[Observed]) -> None:
        """Update each row's share of accepted drafts."""
        for one in observed if self._pending else ():
            if num_pending := self._pending.pop(one.sequence.row, 0):
                row = self._rows[one.sequence.row]
                row.trust += (1 - _FADE) * ((one.count - 1) / num_pending - row.trust)


class NgramDrafter(_TextDrafter):
    """Prompt lookup: finds the longest earlier match of the text's last tokens, at least `min_match`, in prompt or
    answer, and drafts the tokens that follow it."""

    name = LOOKUP
    _rows: dict[int, _Row]

    def __init__(self, *, num_drafted: int | None = None, min_match: int = 1) -> None:
        """`num_drafted`: maximum tokens drafted per round; None: 16. Raises ConfigError if it is not between 0 and
        1024, or if `min_match` is below 1."""
        super().__init__(checked_num_drafted(MOST_DRAFTED if num_drafted is None else num_drafted))
        refuse(ConfigError, (min_match < 1, f"min_match must be at least 1, not {shown(min_match)}"))
        self._sizes = (2, 1) if min_match == 1 else (min_match,)

    def start(self, seq: Sequence) -> None:
        self._rows[seq.row] = _Row()

    def chance(self, seq: Sequence) -> float:
        row = self._rows[seq.row]
        reach, _ = self._find(row, seq.tokens)
        if not reach:
            return 0.0
        return _chance(MATCH_CLASSES, reach, row.trust)

    def propose(self, batch: Batch) -> DraftBlock:
        block = DraftBlock.certain([[] for _ in batch.sequences])
        for index, limit in enumerate(batch.draft_limits_B(self.num_drafted)):
            seq = batch.sequences[index]
            row = self._rows[seq.row]
            reach, follower = self._find(row, seq.tokens) if limit else (0, 0)
            if reach:
                self._pending[seq.row] = limit
                block.tokens_B[index] = _continuation(seq.tokens, follower, limit)
        return block

    def _index(self, row: _Row, tokens: list[int]) -> None:
        """Index every n-gram that has a following token."""
        for follower in range(row.num_indexed + 1, len(tokens)):
            for size in self._sizes:
                if follower >= size:
                    row.followers.setdefault(tuple(tokens[follower - size : follower]), []).append(follower)
        row.num_indexed = len(tokens) - 1

    def _find(self, row: _Row, tokens: list[int]) -> tuple[int, int]:
        """(length of the best match, position after it), or (0, 0) if too few tokens match."""
        self._index(row, tokens)
        for size in self._sizes:
            followers = row.followers.get(tuple(tokens[-size:]), ())
            if followers:
                latest = followers[-MOST_MATCHES:] if size > 1 else followers[-1:]
                return max((_reach(tokens, follower), follower) for follower in latest)
        return 0, 0


def _chance(classes: tuple[tuple[int, float, float], ...], reach: int, trust: float) -> float:
    _, distrusted, trusted = next(kind for kind in reversed(classes) if kind[0] <= reach)
    return distrusted + (trusted - distrusted) * trust


def _reach(tokens: list[int], follower: int, text: list[int] | None = None) -> int:
    """Number of tokens before `follower` that equal the end of `text` (None: of `tokens`), at most MOST_REACH."""
    text = tokens if text is None else text
    most = min(MOST_REACH, follower, len(text))
    return next((back for back in range(most) if tokens[follower - 1 - back] != text[-1 - back]), most)


def _continuation(tokens: list[int], follower: int, count: int) -> list[int]:
    """The tokens from `follower` on; past the end of the text the drafts themselves continue it, as in a loop."""
    drafts = tokens[follower : follower + count]
    period = len(tokens) - follower
    while len(drafts) < count:
        drafts.append(drafts[len(drafts) - period])
    return drafts


@dataclass(slots=True)
class _Place:
    """The position of one row's answer in its request's prediction."""

    tokens: list[int]
    """Token ids of the prediction."""
    num_read: int
    """Number of tokens of the sequence that were compared with the prediction, its prompt included."""
    next: int = 0
    """Position in `tokens` of the token that is expected next; their number if none is."""
    reach: int = 1
    """Number of tokens before `next` that equal the end of the text; 0 if the position is an assumption. The beginning
    of both counts like an equal token."""
    passed: int = 0
    """Position after the latest match of at least two tokens. The text before it is rarely repeated."""
    trust: float = _FIRST_TRUST
    followers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """n-gram of the prediction -> positions after its occurrences."""

    def __post_init__(self) -> None:
        for size in (2, 1):
            for end in range(size, len(self.tokens)):
                self.followers.setdefault(tuple(self.tokens[end - size : end]), []).append(end)

    def follow(self, text: list[int]) -> None:
        """Compare the new tokens of `text` with the prediction; find the position again if they differ."""
        first, self.num_read = self.num_read, len(text)
        for index in range(first, len(text)):
            if self.next == len(self.tokens) or text[index] != self.tokens[self.next]:
                self._resume(text, len(text) - index)
                return
            self.next, self.reach = self.next + 1, self.reach + 1

    def _resume(self, text: list[int], num_other: int) -> None:
        """Find the position after a text whose last `num_other` tokens are not the expected ones."""
        if self.reach > 1:
            self.passed = self.next
        followers = self.followers.get(tuple(text[-2:]), [])
        first = bisect_left(followers, self.passed)
        if near := followers[max(first - MOST_MATCHES, 0) : first + MOST_MATCHES]:
            # the longest match; of equal ones the nearest position ahead, else the nearest before it
            matches = ((_reach(self.tokens, at, text), at >= self.passed, -abs(at - self.passed), at) for at in near)
            self.reach, _, _, self.next = max(matches)
            return
        followers = self.followers.get(tuple(text[-1:]), [])
        first = bisect_left(followers, self.passed)
        if first < len(followers) and followers[first] - self.passed <= NEAR:
            self.reach, self.next = 1, followers[first]
        else:  # an answer that begins otherwise than its prediction rarely goes on with the prediction's beginning
            self.reach = 0
            self.next = min(self.next + num_other, len(self.tokens)) if self.passed else len(self.tokens)


class PredictionDrafter(_TextDrafter):
    """Drafts from the text that a request predicts as its answer (`Sequence.prediction`), from its first token on.

    When the answer differs from the prediction, drafting continues at another position of the prediction, which the
    first rule that applies determines:

    - after the longest match, of at least two tokens, with the end of the answer
    - after the next occurrence of the answer's last token, at most 64 tokens after the latest match
    - as many tokens further on as the answer has new tokens, as if each replaced one token of the prediction; only if
      there was an earlier match, of the answer's first token or of two tokens in a row

    If no rule applies, nothing is drafted.
    """

    name = PREDICTION
    _rows: dict[int, _Place]

    def __init__(self, *, num_drafted: int | None = None) -> None:
        """`num_drafted`: maximum tokens drafted per round, at most MOST_PREDICTED (31)."""
        super().__init__(MOST_PREDICTED if num_drafted is None else min(num_drafted, MOST_PREDICTED))

    def start(self, seq: Sequence) -> None:
        if seq.prediction:
            self._rows[seq.row] = _Place(seq.prediction, seq.prompt_len)

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        """Returns for each of at most `most` drafts the probability that it is accepted if all drafts before it are; ()
        if nothing would be drafted. The probabilities do not fall from one draft to the next, because each accepted
        draft makes the match longer."""
        if seq.row not in self._rows:
            return ()
        place = self._rows[seq.row]
        place.follow(seq.tokens)
        count = min(most, len(place.tokens) - place.next)
        return tuple(_chance(PREDICTED_CLASSES, place.reach + slot, place.trust) for slot in range(count))

    def propose(self, batch: Batch) -> DraftBlock:
        block = DraftBlock.certain([[] for _ in batch.sequences])
        for index, limit in enumerate(batch.draft_limits_B(self.num_drafted)):
            row = batch.sequences[index].row
            if limit and row in self._rows:
                place = self._rows[row]
                place.follow(batch.sequences[index].tokens)
                block.tokens_B[index] = place.tokens[place.next : place.next + limit]
                self._pending[row] = len(block.tokens_B[index])
        return block


def predicted_ids(tokenizer: Tokenizer, params: SamplingParams, vocab_size: int) -> list[int]:
    """Returns the token ids of the answer that the request predicts; [] without a prediction. Raises SamplingError for
    a token outside the vocabulary, and PromptError for invalid text."""
    prediction = params.prediction
    ids = tokenizer.encode(prediction, add_special_tokens=False) if isinstance(prediction, str) else list(prediction)
    if wrong := next((token for token in ids if not 0 <= token < vocab_size), None):
        raise SamplingError(f"prediction has token {shown(wrong)}, outside the vocabulary of {vocab_size}: remove it")
    return ids
