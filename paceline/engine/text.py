"""From committed tokens to text that may be shown: decoded incrementally, stopped at the first stop string.

Text that might still turn out to be the beginning of a stop string is held back until the next tokens decide.
"""

from __future__ import annotations

from paceline.model.tokenizer import IncrementalDetokenizer


class TextStream:
    """The text of one answer as it grows."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._longest = max((len(text) for text in stop), default=0)
        self._held = ""

    def push(self, tokens: list[int]) -> tuple[str, int | None]:
        """Feed tokens; returns the text now final, and how many of the tokens stand when a stop string ended it."""
        if not self._stop:
            return self._detokenizer.push(tokens), None
        shown = ""
        for taken, token in enumerate(tokens, start=1):
            self._held += self._detokenizer.push([token])
            at = self._first_stop()
            if at is not None:
                shown, self._held = shown + self._held[:at], ""
                return shown, taken
            safe = len(self._held) - self._num_undecided()
            shown, self._held = shown + self._held[:safe], self._held[safe:]
        return shown, None

    def finish(self) -> str:
        """No more tokens: whatever was held back is text after all."""
        self._held += self._detokenizer.flush()
        return self._held[: self._first_stop()]

    def _first_stop(self) -> int | None:
        ends = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        return min(ends) if ends else None

    def _num_undecided(self) -> int:
        """Length of the longest tail that some stop string starts with."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
