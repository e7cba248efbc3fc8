"""What a server writes down: metrics always, traces when it was asked to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from paceline.model.tokenizer import Tokenizer
from paceline.serve.metrics import Metrics, TraceCounts
from paceline.serve.ticket import Outcome
from paceline.types import Sequence

if TYPE_CHECKING:  # pyarrow is only needed where traces are
    from paceline.serve.traces import TraceWriter


class Traces:
    """A writer of traces that begins when the tokenizer is there."""

    def __init__(self, make: Callable[[Tokenizer], TraceWriter] | None = None) -> None:
        self._make = make
        self._writer: TraceWriter | None = None

    def begin(self, tokenizer: Tokenizer) -> None:
        """Start writing, once; nothing when no traces were asked for."""
        if self._make and self._writer is None:
            self._writer = self._make(tokenizer)

    def offer(self, sequence: Sequence, outcome: Outcome, tag: str | None) -> None:
        if self._writer:
            self._writer.offer(sequence, outcome, tag)

    def close(self) -> None:
        """Write what is queued."""
        if self._writer:
            self._writer.close()

    @property
    def written(self) -> int:
        return self._writer.written if self._writer else 0

    @property
    def dropped(self) -> Mapping[str, int]:
        return self._writer.dropped if self._writer else {}


class Recorder(Metrics):
    """Metrics, and a trace of each request that ends."""

    def __init__(self, model: str, traces: Traces | None = None) -> None:
        super().__init__(model, cast("TraceCounts | None", traces))
        self._traces = traces

    def finished(self, sequence: Sequence, outcome: Outcome, tag: str | None = None) -> None:
        super().finished(sequence, outcome, tag)
        if self._traces:
            self._traces.offer(sequence, outcome, tag)
