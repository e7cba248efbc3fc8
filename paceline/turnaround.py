"""Where a request's time went in the engine. No PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Timings:
    """In seconds; `token_s` are stamps of each committed token, as `arrival_s` of time.perf_counter. `plain_s` is the part of
    its `num_plain` rounds in which no row of the batch checked a draft: what plain decoding takes here and now.

    queue_s, wait_s, prefill_s, draft_s, verify_s, host_s and between_s share out all the time from `arrival_s` to `until_s`.
    """

    arrival_s: float = 0.0
    queue_s: float = 0.0
    """Without a row of the cache."""
    wait_s: float = 0.0
    """With a row, while the engine worked for others alone: their prompts, or rounds before its own prompt was read."""
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0
    """Of its rounds what is neither drafting nor verifying: commitment, the drafter's observation, text."""
    between_s: float = 0.0
    """Between rounds: planning, and whatever the engine's caller does with what a step brought."""
    text_s: float = 0.0
    """Of the host's time the part in which tokens became text."""
    until_s: float = 0.0
    first_token_s: float = 0.0
    plain_s: float = 0.0
    num_plain: int = 0
    token_s: list[float] = field(default_factory=list)

    def waited(self, now: float) -> None:
        """The engine has worked for others up to `now`."""
        self.wait_s += now - self.until_s
        self.until_s = now

    def read(self, started: float, now: float) -> None:
        """From `started` to `now` a chunk of its prompt was run."""
        self.prefill_s += now - started
        self.between_s += started - self.until_s
        self.until_s = now

    def decoded(self, draft_s: float, verify_s: float, host_s: float, now: float) -> None:
        """A round that had these parts is over, and so is what had to be done with its tokens."""
        self.draft_s += draft_s
        self.verify_s += verify_s
        self.host_s += host_s
        self.between_s += now - self.until_s - (draft_s + verify_s + host_s)
        self.until_s = now
