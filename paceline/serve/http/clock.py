"""Where the time of one HTTP request goes in this server, from its arrival to its last token: the answer's `timings`.

    body = {..., "return_timings": true}      # the answer's last chunk, or its body, then has `timings`, in seconds

All durations are of `time.perf_counter`, which never goes back, and they follow one another: together they are `total_s`. A
client that measures its own durations needs no clock in common with the server: what it saw, less `total_s`, is communication.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from starlette.types import Scope

from paceline.types import Sequence

ARRIVED = "paceline.arrived_s"
"""Key of a request's scope: when its body had arrived whole."""
BEFORE = ("parse", "dispatch", "template", "tokenizer", "grammar")
"""What is done before a request is handed to the engine: JSON and its checks; the way to another thread and back; the chat
template; the tokenizer; the grammar's compilation."""


class Clock:
    """Follows one request through its handler; each mark ends a part and begins the next."""

    def __init__(self, scope: Scope | None = None) -> None:
        now = time.perf_counter()
        self.arrived_s: float = (scope or {}).get(ARRIVED, now)
        self._last_s = self.arrived_s
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._first_byte_s: float | None = None
        self.mark("parse")

    def mark(self, part: str) -> None:
        """What was done since the last mark was `part`."""
        now = time.perf_counter()
        self._parts[part] += now - self._last_s
        self._last_s = now

    def answered(self) -> None:
        """The answer begins: its first byte is about to leave, and may be read before this thread goes on after sending it."""
        self._first_byte_s = time.perf_counter() - self.arrived_s

    def timings(self, sequences: Iterable[Sequence]) -> dict[str, float]:
        """Seconds of each part, for the answer that ended last. `other_s` is what no part explains.

        `queue_s`: for a row of the cache, and while the engine worked for others; `engine_s`: planning, bookkeeping and
        hand-over between its passes; `text_s`: tokens to text; `send_s`: from the end of the last round to the chunk that
        carries this.
        """
        seq = max(sequences, key=lambda each: each.timings.until_s)
        spent, total_s = seq.timings, time.perf_counter() - self.arrived_s
        told: dict[str, Any] = {f"{part}_s": self._parts[part] for part in BEFORE}
        told["queue_s"] = max(spent.arrival_s - self._last_s, 0.0) + spent.queue_s + spent.wait_s
        told["prefill_s"] = spent.prefill_s
        told["draft_s"], told["verify_s"] = spent.draft_s, spent.verify_s
        told["engine_s"] = max(spent.host_s + spent.between_s - spent.text_s, 0.0)
        told["text_s"] = spent.text_s
        told["send_s"] = self.arrived_s + total_s - spent.until_s if spent.until_s else 0.0  # another engine may not tell
        told["other_s"] = total_s - sum(told.values())
        return {**told, "first_byte_s": total_s if self._first_byte_s is None else self._first_byte_s, "total_s": total_s}
