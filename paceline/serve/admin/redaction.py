"""Removes text that matches patterns from traces before they are written.

The rest must still be valid training data: the target's output after exactly these tokens. So an answer is cut before
its first match, and dropped if its prompt is redacted.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate
from string import ascii_letters
from typing import Any

from paceline.errors import ConfigError, reraised
from paceline.model.text.tokenizer import Tokenizer

PLACEHOLDER = "[redacted]"
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
Redacted = tuple[list[int], list[int]]
"""(prompt token ids, answer token ids) of a trace after redaction."""


class Redactor:
    """Removes matches of regular expressions from the texts and token ids of traces. The placeholder "[redacted]"
    replaces a match. Raises ConfigError for a pattern that is invalid, or that matches the empty string or the
    placeholder."""

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
        """Return the text with every match replaced by the placeholder "[redacted]". The result is then checked again,
        also with its backslash escapes resolved (\\u0041 becomes A). If it still has a match, the placeholder replaces
        the whole text."""
        for pattern in self._patterns:
            text = pattern.sub(PLACEHOLDER, text)
        plain, escaped = text, ""
        while plain != escaped:  # a JSON schema may contain an escaped pattern
            if any(pattern.search(plain) for pattern in self._patterns):
                return PLACEHOLDER
            plain, escaped = _unescaped(plain), plain
        return text

    def value(self, value: Any) -> Any:
        """Return a copy of a JSON value with every string in it redacted, except keys of objects."""
        if isinstance(value, dict):
            return {key: self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def tokens(self, prompt_ids: list[int], answer_ids: list[int]) -> Redacted | None:
        """Remove matches from the tokens of a trace; returns (prompt ids, answer ids). Returns None if a match could
        not be removed; the caller must then drop the trace.

        - If a match begins in the prompt, the placeholder replaces it. The answer becomes empty, because it does not
          belong to the changed prompt.
        - If matches begin only in the answer, the answer is cut before the first one.
        """
        if self._is_clean(prompt_ids, answer_ids):
            return prompt_ids, answer_ids
        redacted = self._cut(prompt_ids, answer_ids)
        return redacted if self._is_clean(*redacted) else None

    def _is_clean(self, prompt_ids: list[int], answer_ids: list[int]) -> bool:
        """Return True if nothing matches, with or without special tokens, in prompt and answer joined or separate."""
        parts = [prompt_ids + answer_ids, prompt_ids, answer_ids] if answer_ids else [prompt_ids]
        texts = [self._tokenizer.decode(ids, skip) for ids in parts for skip in (True, False)]
        return not any(pattern.search(text) for text in texts for pattern in self._patterns)

    def _cut(self, prompt_ids: list[int], answer_ids: list[int]) -> Redacted:
        ids, border = prompt_ids + answer_ids, len(prompt_ids)
        text, ends = self._ends(ids)
        matches = _merged(match.span() for pattern in self._patterns for match in pattern.finditer(text))
        places = [_tokens_of(span, ends) for span in matches]
        if not places:
            return prompt_ids, answer_ids  # it matches only without special tokens
        if places[0][0] >= border:
            return prompt_ids, ids[border : places[0][0]]
        redacted, at = list[int](), 0
        for begin, end in _merged(place for place in places if place[0] < border):
            first, last = ends[begin], ends[end]
            middle = text[first:last]
            for start, stop in reversed(matches):
                if start < last and stop > first:
                    middle = middle[: start - first] + PLACEHOLDER + middle[stop - first :]
            redacted += ids[at:begin] + self._tokenizer.encode(middle, add_special_tokens=False)
            at = end
        return redacted + ids[at:border], []

    def _ends(self, ids: list[int]) -> tuple[str, list[int]]:
        """Return the text with special tokens, and the character offset of each token and of the end."""
        stream = self._tokenizer.stream(False)
        pieces = [stream.push([token]) for token in ids]
        pieces.append(stream.flush())
        ends = [0, *accumulate(map(len, pieces))]
        ends[-2:] = [ends[-1]]  # the flushed text belongs to the last token
        return "".join(pieces), ends


def _unescaped(text: str) -> str:
    """Return the text with one level of backslash escapes resolved. Those of a control character or a class of
    characters, such as \\n and \\w, become spaces."""

    def plain(match: re.Match[str]) -> str:
        code, other = match[1] or match[2], match[3]
        return chr(int(code, 16)) if code else " " if other in ascii_letters else other

    return ESCAPE.sub(plain, text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _tokens_of(span: tuple[int, int], ends: list[int]) -> tuple[int, int]:
    """Return the range [begin, end) of tokens that may contain a part of the text's span.

    `ends[t]` is the number of characters that are final before token t. A token that ends within a character adds none
    and belongs to the next text.
    """
    begun = ends[bisect_right(ends, span[0]) - 1]
    return bisect_left(ends, begun), bisect_left(ends, span[1])


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the non-empty spans sorted, with overlapping ones merged."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if begin >= end:
            continue
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged
