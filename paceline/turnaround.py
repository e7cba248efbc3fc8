"""Records how long each phase of a request took in the engine. Imports no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Timings:
    """Durations and time stamps of one request, in seconds; stamps are of time.perf_counter.

    queue_s + wait_s + prefill_s + draft_s + verify_s + host_s + between_s = until_s - arrival_s.
    """

    arrival_s: float = 0.0
    """Stamp: arrival at the engine."""
    queue_s: float = 0.0
    """Duration without a cache row."""
    wait_s: float = 0.0
    """Duration with a row while the engine worked for other requests only: their prefill, or rounds before its own
    prefill."""
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0
    """Duration of its rounds without drafting and verifying: commit, drafter update, detokenisation."""
    between_s: float = 0.0
    """Duration between rounds: planning, and the caller's work with the results of a step."""
    text_s: float = 0.0
    """Part of `host_s` spent on detokenisation."""
    until_s: float = 0.0
    """Stamp: end of the time accounted for so far."""
    first_token_s: float = 0.0
    """Stamp: first token."""
    plain_s: float = 0.0
    """Duration of its `num_plain` rounds in which no row of the batch verified a draft: the cost of plain decoding."""
    num_plain: int = 0
    token_s: list[float] = field(default_factory=list)
    """Stamp of each committed token."""

    def waited(self, now: float) -> None:
        """Count the time up to `now` as work for other requests."""
        self.wait_s += now - self.until_s
        self.until_s = now

    def read(self, started: float, now: float) -> None:
        """Count `started` to `now` as prefill of its prompt."""
        self.prefill_s += now - started
        self.between_s += started - self.until_s
        self.until_s = now

    def decoded(self, draft_s: float, verify_s: float, host_s: float, now: float) -> None:
        """Count a round with these durations, which ended at `now`."""
        self.draft_s += draft_s
        self.verify_s += verify_s
        self.host_s += host_s
        self.between_s += now - self.until_s - (draft_s + verify_s + host_s)
        self.until_s = now
