"""Records how long each phase of a request took in the engine. Imports no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Timings:
    """Durations and time stamps of one request, in seconds; stamps are values of time.perf_counter.

    The time from `arrival_s` to `until_s` is divided into phases without gaps; it is the sum of their durations:

    - `queue_s`: waiting for a row of the KV cache
    - `wait_s`: having a row, while the engine works for other requests only
    - `prefill_s`: prefill of the prompt
    - `draft_s`, `verify_s`, `host_s`: drafting, verification and other work in the request's rounds
    - `between_s`: time between rounds
    """

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
    """Duration of the request's plain rounds, in which no row of the batch verified a draft: the cost of plain
    decoding."""
    num_plain: int = 0
    """Number of the request's plain rounds."""
    token_s: list[float] = field(default_factory=list)
    """Stamp of each committed token."""

    def waited(self, now: float) -> None:
        """Add the time from the end of the latest phase (`until_s`) to `now` to `wait_s`, because the engine worked for
        other requests only. The latest phase then ends at `now`."""
        self.wait_s += now - self.until_s
        self.until_s = now

    def read(self, started: float, now: float) -> None:
        """Record a prefill from `started` to `now`: its duration is added to `prefill_s`, the gap between the latest
        phase (`until_s`) and `started` to `between_s`. The latest phase then ends at `now`."""
        self.prefill_s += now - started
        self.between_s += started - self.until_s
        self.until_s = now

    def decoded(self, draft_s: float, verify_s: float, host_s: float, now: float) -> None:
        """Record a decode round that ended at `now`: its durations are added to `draft_s`, `verify_s` and `host_s`, and
        the gap between the latest phase (`until_s`) and the round to `between_s`. The latest phase then ends at
        `now`."""
        self.draft_s += draft_s
        self.verify_s += verify_s
        self.host_s += host_s
        self.between_s += now - self.until_s - (draft_s + verify_s + host_s)
        self.until_s = now
