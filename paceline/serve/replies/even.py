"""`serve --even-chunks`: streams whose chunks show network listeners neither accepted drafts nor lengths of tokens.

A stream is cut into frames: one token each, padded to one size with an SSE comment, which clients ignore. One frame
leaves per interval; a frame without a token (all padding) leaves when none is ready. The number of frames is a multiple
of `MULTIPLE`, so that it shows an answer's length only roughly. `docs/explanation/side-channels.md` has measurements.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace

from paceline.serve.worker.ticket import Event

FRAME = 512
"""Bytes of a frame: enough for one token's event. Longer events take several frames."""
LOGPROB = 128
"""Further bytes of a frame for each log-probability of a token."""
BODY = 4096
"""Lengths of JSON bodies are multiples of this, in bytes."""
MULTIPLE = 16
"""Numbers of frames are multiples of this."""
COMMENT = (b":", b"\n\n")
"""Beginning and end of an SSE comment, between which there may be spaces."""
START_S = 0.05
"""Interval until `FIRST` answers have been measured, in seconds."""
LEAST_S = 0.001
"""Shortest interval: a shorter one would keep the event loop busy with padding."""
FIRST, WINDOW = 8, 64
"""Answers before the first measured interval; answers of one measurement."""
KEPT = 0.9
"""Share of the measured answers that were at least as fast as the interval."""


class Pace:
    """Interval in seconds between two frames (chunks of equal size) of a streamed answer. It is either fixed or
    measured. A measured interval is `START_S` at first. It is then computed from the speed of finished answers: after
    the first 8 (FIRST), then after every 64 (WINDOW). Several answers are used together, so that the interval does not
    show the speed of a single one."""

    def __init__(self, fixed_s: float | None = None) -> None:
        self.interval_s = fixed_s or START_S
        self._is_fixed, self._due, self._measured = fixed_s is not None, FIRST, list[float]()

    def observe(self, token_s: Iterable[float]) -> None:
        """Record the mean seconds per token of each finished answer. Once there are enough new ones, computes the
        interval from them. Does nothing if the interval is fixed."""
        if self._is_fixed:
            return
        self._measured += token_s
        if len(self._measured) >= self._due:
            kept_s = sorted(self._measured)[int(KEPT * (len(self._measured) - 1))]
            self.interval_s = max(kept_s, LEAST_S)
            self._due, self._measured = WINDOW, []


def single(event: Event, token_text: Callable[[int], str]) -> Iterator[Event]:
    """Split an event into one event per token. Used for streams that are sent in frames of equal size at a steady rate
    (`paced`), because each token has a frame of its own. `token_text`: function that returns the text of a token id.
    Each token but the last gets as many characters of the event's text as its own text has. The last one gets the
    rest."""
    chunk, rest = event.chunk, event.chunk.text
    last = len(chunk.token_ids) - 1
    for place, token in enumerate(chunk.token_ids[:-1]):
        size = len(token_text(token))
        part = replace(chunk, token_ids=[token], text=rest[:size], finish_reason=None)
        rest = rest[size:]
        yield replace(
            event, chunk=part, num_accepted=int(place < event.num_accepted), logprobs=event.logprobs[place : place + 1]
        )
    part = replace(chunk, token_ids=chunk.token_ids[-1:], text=rest)
    accepted = int(0 <= last < event.num_accepted)
    yield replace(event, chunk=part, num_accepted=accepted, logprobs=event.logprobs[max(last, 0) :])


def frames(piece: bytes, size: int) -> list[bytes]:
    """Pad `piece`, one or more server-sent events, and cut it into frames of exactly `size` bytes; b"" gives one frame
    of padding. The padding is before the events: an SSE comment, which clients ignore."""
    opening, closing = COMMENT
    spaces = -(len(piece) + len(opening) + len(closing)) % size
    padded = opening + b" " * spaces + closing + piece
    return [padded[start : start + size] for start in range(0, len(padded), size)]


async def paced(pieces: AsyncIterator[bytes], size: int, interval_s: float) -> AsyncIterator[bytes]:
    """Yield a stream as frames of `size` bytes at a steady rate, so that network listeners cannot see when tokens were
    generated. The first frame is sent at once, then one every `interval_s` seconds. `pieces`: the encoded events of one
    token each; b"" for a token without text.

    - If no piece is ready when a frame is due, the frame contains only padding.
    - The total number of frames is a multiple of 16 (MULTIPLE), so that it shows the answer's length only roughly.
      Frames of padding are added, before the last piece if possible.
    - If a slow client delays a frame, later frames are not sent faster to catch up.
    """
    ready, sending = deque([frames(await anext(pieces), size)]), list[bytes]()
    (cover,) = frames(b"", size)
    loop, number = asyncio.get_running_loop(), 0

    async def fill() -> None:
        async for piece in pieces:
            ready.append(frames(piece, size))

    filling, due = asyncio.create_task(fill()), loop.time()
    try:
        while ready or sending or number % MULTIPLE or not filling.done():
            is_early = filling.done() and len(ready) == 1 and (number + len(ready[0])) % MULTIPLE
            if ready and not sending and not is_early:  # no frame may come between two of one event
                sending = ready.popleft()
            yield sending.pop(0) if sending else cover
            number, due = number + 1, max(due + interval_s, loop.time())
            if ready or sending or number % MULTIPLE or not filling.done():
                await asyncio.sleep(due - loop.time())
        await filling
    finally:
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
