"""What must not be kept, taken out of text and tokens.

What the patterns match never reaches the disk, and what is kept is still sound to learn from. A drafter learns what its target
says after exactly these tokens. So a redacted answer is not patched but ends before the first match, and when the prompt itself
is redacted the answer, which was given to something else, is left out whole.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from paceline.errors import ConfigError, reraised
from paceline.model.text.tokenizer import Tokenizer

PLACEHOLDER = "[redacted]"
Redacted = tuple[list[int], list[int]]
"""A trace's tokens of prompt and answer without what was matched."""


class Redactor:
    """Takes what any of the patterns matches out of text and tokens.

    Raises ConfigError on a pattern that is no regular expression, or that matches nothing at all or the placeholder.
    """

    def __init__(self, patterns: Iterable[str], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._patterns = list[re.Pattern[str]]()
        for pattern in patterns:
            what = f"the redaction pattern {pattern!r}"
            with reraised(ConfigError, f"{what} is no regular expression", "correct it", re.error):
                compiled = re.compile(pattern)
            if compiled.search("") or compiled.search(PLACEHOLDER):
                raise ConfigError(f"{what} matches even {PLACEHOLDER!r} or nothing: make it narrower")
            self._patterns.append(compiled)

    def text(self, text: str) -> str:
        """The text with a placeholder for every match."""
        for pattern in self._patterns:
            text = pattern.sub(PLACEHOLDER, text)
        return text

    def value(self, value: Any) -> Any:
        """The same with every text in it redacted: stop strings, a grammar."""
        if isinstance(value, dict):
            return {key: self.value(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        return self.text(value) if isinstance(value, str) else value

    def tokens(self, prompt_ids: list[int], answer_ids: list[int]) -> Redacted | None:
        """The same lists when nothing matches; None when a match remains in what could be kept: then keep nothing."""
        if self._is_clean(prompt_ids, answer_ids):
            return prompt_ids, answer_ids
        redacted = self._cut(prompt_ids, answer_ids)
        return redacted if self._is_clean(*redacted) else None

    def _is_clean(self, prompt_ids: list[int], answer_ids: list[int]) -> bool:
        """With special tokens and without, together and apart: a reader may decode either way."""
        parts = [prompt_ids + answer_ids, prompt_ids, answer_ids] if answer_ids else [prompt_ids]
        texts = [self._tokenizer.decode(ids, skip) for ids in parts for skip in (True, False)]
        return not any(pattern.search(text) for text in texts for pattern in self._patterns)

    def _cut(self, prompt_ids: list[int], answer_ids: list[int]) -> Redacted:
        ids, border = prompt_ids + answer_ids, len(prompt_ids)
        text, ends = self._ends(ids)
        matches = _merged(match.span() for pattern in self._patterns for match in pattern.finditer(text))
        places = [_tokens_of(span, ends) for span in matches]
        if not places:
            return prompt_ids, answer_ids  # it matches only where special tokens are left out
        if places[0][0] >= border:
            return prompt_ids, ids[border : places[0][0]]
        kept, at = list[int](), 0
        for begin, end in _merged(place for place in places if place[0] < border):
            first, last = ends[begin], ends[end]
            middle = text[first:last]
            for start, stop in reversed(matches):
                if start < last and stop > first:
                    middle = middle[: start - first] + PLACEHOLDER + middle[stop - first :]
            kept += ids[at:begin] + self._tokenizer.encode(middle, add_special_tokens=False)
            at = end
        return kept + ids[at:border], []

    def _ends(self, ids: list[int]) -> tuple[str, list[int]]:
        """The text, special tokens spelled out, and where in it each token begins; one place more for the end."""
        stream = self._tokenizer.stream(False)
        pieces = [stream.push([token]) for token in ids]
        pieces.append(stream.flush())
        ends = [0, *accumulate(map(len, pieces))]
        ends[-2:] = [ends[-1]]  # what the flush gave belongs to the last token
        return "".join(pieces), ends


def _tokens_of(span: tuple[int, int], ends: list[int]) -> tuple[int, int]:
    """The tokens [begin, end) that may hold a part of the text's span.

    `ends[t]` is how much text was final before token t. Tokens that made nothing final wait for their character's rest, so
    they belong to what came next.
    """
    begun = ends[bisect_right(ends, span[0]) - 1]
    return bisect_left(ends, begun), bisect_left(ends, span[1])


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, and those that overlap as one."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if begin >= end:
            continue
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged
