"""Measures the phases of one HTTP request in the server, from its arrival to its last token: the answer's `timings`.

    body = {..., "return_timings": true}      # adds `timings`, in seconds, to the answer or to its last chunk

Durations are measured with `time.perf_counter` and add up to `total_s`. A client needs no common clock with the server:
its own measured latency minus `total_s` is the time of communication.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from starlette.types import Scope

from paceline.types import Sequence

ARRIVED = "paceline.arrived_s"
"""Key in the ASGI scope: time at which the request's body had arrived completely."""
BEFORE = ("parse", "dispatch", "template", "tokenizer", "grammar")
"""Phases before a request is passed to the engine: JSON parsing and validation, switching threads, chat template,
tokenizer, grammar compilation."""


class Clock:
    """Measures the phases of one request in seconds; each call of `mark` ends a phase and starts the next."""

    def __init__(self, scope: Scope | None = None) -> None:
        now = time.perf_counter()
        self.arrived_s: float = (scope or {}).get(ARRIVED, now)
        self._last_s = self.arrived_s
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._first_byte_s: float | None = None
        self.mark("parse")

    def mark(self, part: str) -> None:
        """End the current phase: add the seconds since the previous `mark` to those of the phase `part`."""
        now = time.perf_counter()
        self._parts[part] += now - self._last_s
        self._last_s = now

    def answered(self) -> None:
        """Record the time of the response's first byte. Call it before sending, because the client may read the byte at
        once."""
        self._first_byte_s = time.perf_counter() - self.arrived_s

    def timings(self, sequences: Iterable[Sequence]) -> dict[str, float]:
        """Return name -> seconds for each phase of the request, for their sum `total_s`, and for `first_byte_s`, the
        time from the request's arrival to the response's first byte. `sequences`: the engine's records of the request's
        answers.

        - Before the engine: `parse_s`, `dispatch_s` (switching threads), `template_s`, `tokenizer_s`, `grammar_s`.
        - In the engine: `queue_s` (waiting for a row of the KV cache, or for other requests), `prefill_s`, `draft_s`,
          `verify_s`, `engine_s` (planning and bookkeeping), `text_s` (detokenisation). Of several answers, the one that
          ended last is measured.
        - After the engine: `send_s`, from the end of the last round to this call.
        - All other time: `other_s`.
        """
        seq = max(sequences, key=lambda each: each.timings.until_s)
        spent, total_s = seq.timings, time.perf_counter() - self.arrived_s
        phases: dict[str, Any] = {f"{part}_s": self._parts[part] for part in BEFORE}
        phases["queue_s"] = max(spent.arrival_s - self._last_s, 0.0) + spent.queue_s + spent.wait_s
        phases |= {"prefill_s": spent.prefill_s, "draft_s": spent.draft_s, "verify_s": spent.verify_s}
        phases["engine_s"] = max(spent.host_s + spent.between_s - spent.text_s, 0.0)
        phases["text_s"] = spent.text_s
        # 0 for engines without stamps
        phases["send_s"] = self.arrived_s + total_s - spent.until_s if spent.until_s else 0.0
        phases["other_s"] = total_s - sum(phases.values())
        return {
            **phases,
            "first_byte_s": total_s if self._first_byte_s is None else self._first_byte_s,
            "total_s": total_s,
        }
