"""Records how long each phase of a request took in the engine. Imports no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Timings:
    """Durations and time stamps of one request, in seconds; stamps are values of time.perf_counter. The durations from
    `queue_s` to `between_s`, in the order of the fields, add up to the time from `arrival_s` to `until_s`."""

    arrival_s: float = 0.0
    """Stamp: arrival at the engine."""
    queue_s: float = 0.0
    """Duration of waiting for a row of the KV cache."""
    wait_s: float = 0.0
    """Duration with a row while the engine worked for other requests only: their prefill, or rounds before its own
    prefill."""
    prefill_s: float = 0.0
    """Duration of the prefill of its prompt."""
    draft_s: float = 0.0
    """Duration of drafting in its rounds."""
    verify_s: float = 0.0
    """Duration of verification in its rounds."""
    host_s: float = 0.0
    """Duration of all other work in its rounds: commit, drafter update, detokenisation."""
    between_s: float = 0.0
    """Duration between rounds: planning, and the caller's work with the results of a step."""
    text_s: float = 0.0
    """Part of `host_s` spent on detokenisation."""
    until_s: float = 0.0
    """Stamp: end of the last phase that was added to the durations."""
    first_token_s: float = 0.0
    """Stamp: first token."""
    plain_s: float = 0.0
    """Duration of rounds in which no row of the batch verified a draft (plain rounds)."""
    num_plain: int = 0
    """Number of the request's plain rounds."""
    token_s: list[float] = field(default_factory=list)
    """Stamp of each committed token."""

    def waited(self, now: float) -> None:
        """Record that the request waited for others until `now`: add the time since its latest phase ended (`until_s`)
        to `wait_s`, and set `until_s` to `now`."""
        self.wait_s += now - self.until_s
        self.until_s = now

    def read(self, started: float, now: float) -> None:
        """Record a prefill from `started` to `now`. The time from the end of the previous phase (`until_s`) to
        `started` is added to `between_s`. Sets `until_s` to `now`."""
        self.prefill_s += now - started
        self.between_s += started - self.until_s
        self.until_s = now

    def decoded(self, draft_s: float, verify_s: float, host_s: float, now: float) -> None:
        """Record a decode round that ended at `now`, with the durations of its phases. The time from the end of the
        previous phase (`until_s`) to the beginning of the round is added to `between_s`. Sets `until_s` to `now`."""
        self.draft_s += draft_s
        self.verify_s += verify_s
        self.host_s += host_s
        self.between_s += now - self.until_s - (draft_s + verify_s + host_s)
        self.until_s = now
