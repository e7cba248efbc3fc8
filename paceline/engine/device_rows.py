"""State of cache rows on the device for `device_round.py`, the host's copy of it, and timing marks within a CUDA
graph."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.model.sampling.device_race import Draws
from paceline.model.sampling.logits import MIN_TEMPERATURE
from paceline.types import Sequence
from paceline.verify.rules import Rule, Uniforms


class RowValues(NamedTuple):
    """Decoding state and sampling parameters of one cache row. On the device, the fields up to `top_k` are integers,
    the later ones float64. A row with only zeros is idle (no request)."""

    length: int = 0
    """Number of tokens of the row in the cache."""
    anchor: int = 0
    """Id of the last committed token, which is not in the cache yet."""
    left: int = 0
    """Tokens that the request may still generate; 0: idle."""
    most: int = 0
    """Maximum drafts per round, by the planner."""
    seed: int = 0
    top_k: int = 0
    inverse_temperature: float = 0.0
    """1 / temperature; 0: greedy."""
    min_p: float = 0.0
    top_p: float = 0.0

    @classmethod
    def of(cls, seq: Sequence, most: int) -> RowValues:
        params = seq.params
        inverse_temperature = 0.0 if params.is_greedy else 1.0 / max(params.temperature, MIN_TEMPERATURE)
        filters = inverse_temperature, params.min_p, params.top_p
        return cls(seq.cached_len, seq.tokens[-1], seq.num_remaining, most, seq.seed, params.top_k, *filters)

    @property
    def width(self) -> int:
        """Maximum number of drafts that the next round verifies."""
        return max(min(self.most, self.left - 1), 0)

    @property
    def decisive(self) -> tuple[float, ...]:
        """The values on which the row's next round depends; empty for an idle row. The host writes rows to the device
        only if one of these values differs from the device's."""
        return (*self._replace(most=self.width),) if self.left > 0 else ()


_NUM_INTS = 6


@dataclass(slots=True)
class RowState:
    """State of the first B cache rows: the fields of `RowValues`, each as a device tensor [B]. Writing to a tensor
    changes the rows."""

    length_B: Tensor
    anchor_B: Tensor
    left_B: Tensor
    most_B: Tensor
    draws: Draws

    @property
    def is_live_B(self) -> Tensor:
        return self.left_B > 0

    @property
    def width_B(self) -> Tensor:
        return torch.minimum(self.most_B, self.left_B - 1).clamp(min=0)

    def move(self, accepted_B: Tensor, bonus_B: Tensor) -> None:
        """Commit the accepted drafts and the bonus token of each row. `accepted_B`: numbers of accepted drafts;
        `bonus_B`: token ids. A row with a negative bonus token becomes idle."""
        is_sound_B = bonus_B >= 0
        gained_B = (accepted_B + 1) * (self.is_live_B & is_sound_B)
        self.anchor_B.copy_(torch.where(gained_B > 0, bonus_B, self.anchor_B))
        self.length_B.add_(gained_B)
        self.left_B.copy_((self.left_B - gained_B) * is_sound_B)


class DeviceRows:
    """Decoding state and sampling parameters of all cache rows, stored on the device, where each round updates them.
    The host keeps a copy. It writes to the device only after a change that the device cannot know: a row joined or
    left, its number of drafts changed, or its answer was cut short."""

    def __init__(self, num_rows: int, max_len: int, device: torch.device) -> None:
        self._max_len, is_cuda = max_len, device.type == "cuda"
        shape = len(RowValues._fields), num_rows
        self.values = torch.zeros(shape, dtype=torch.int64, device=device)
        """Values [9, R], int64; from index 6 on they hold the bits of float64 numbers."""
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda)
        self._known = [RowValues()] * num_rows
        self._survivors_RS: Tensor | None = None
        self._mocked: dict[int, tuple[Rule, Sequence]] = {}

    def first(self, num_rows: int) -> RowState:
        """Returns the state of the first `num_rows` rows, as views of the device tensor."""
        ints, floats = self.values[:_NUM_INTS, :num_rows], self.values[_NUM_INTS:, :num_rows].view(torch.float64)
        length_B, anchor_B, left_B, most_B, seed_B, top_k_B = ints.unbind()
        return RowState(length_B, anchor_B, left_B, most_B, Draws(seed_B, top_k_B, *floats.unbind()))

    def clear(self) -> None:
        """Make all rows idle (without a request)."""
        self.values.zero_()
        self._known = [RowValues()] * len(self._known)

    def set(self, sequences: list[Sequence], most_B: list[int]) -> None:
        """Prepare the next round: the row of `sequences[i]` drafts at most `most_B[i]` tokens, and all other rows are
        idle. The values are copied to the device asynchronously, from a buffer that every call reuses. So call it only
        when the previous round has ended."""
        wanted = [RowValues()] * len(self._known)
        for seq, most in zip(sequences, most_B, strict=True):
            wanted[seq.row] = RowValues.of(seq, most)
        if all(one.decisive == other.decisive for one, other in zip(wanted, self._known, strict=True)):
            return
        self._host[:_NUM_INTS] = torch.tensor([row[:_NUM_INTS] for row in wanted]).T
        self._host[_NUM_INTS:] = (
            torch.tensor([row[_NUM_INTS:] for row in wanted], dtype=torch.float64).T.contiguous().view(torch.int64)
        )
        self.values.copy_(self._host, non_blocking=True)
        self._known = wanted

    def moved(self, row: int, num_accepted: int, bonus: int) -> None:
        """Update the host's copy of a row with the device's result. A negative bonus token makes the row idle."""
        known = self._known[row]
        if bonus < 0:
            self._known[row] = known._replace(left=0)
            return
        gained = num_accepted + 1
        self._known[row] = known._replace(length=known.length + gained, anchor=bonus, left=known.left - gained)

    def mock(self, rule: Rule, sequences: list[Sequence]) -> None:
        """Prepare mocked acceptance, in which `rule` decides by random numbers how many drafts a round accepts. For
        each request, stores this number for every position at which a later round may begin. `survivors` looks the
        numbers up."""
        assert rule.survives is not None
        if self._survivors_RS is None:
            self._survivors_RS = torch.zeros(
                len(self._known), self._max_len, dtype=torch.int64, device=self.values.device
            )
        for seq in sequences:
            if self._mocked.get(seq.row) == (rule, seq):
                continue
            own = [rule.survives(Uniforms(seq.seed, place)) for place in range(seq.cached_len, self._max_len)]
            self._survivors_RS[seq.row, seq.cached_len :] = torch.tensor(own, dtype=torch.int64)
            self._mocked[seq.row] = rule, seq

    def survivors(self, length_B: Tensor) -> Tensor:
        """Returns how many drafts [B] the mocked rule accepts in the next round of each of the first B rows. The number
        may be larger than the number of drafts that the row has. `length_B`: number of cached tokens of each row. Call
        `mock` first."""
        assert self._survivors_RS is not None
        return self._survivors_RS[: len(length_B)].gather(1, length_B.clamp(max=self._max_len - 1)[:, None])[:, 0]


class Marks:
    """Measures how long each part of a computation takes, also if the computation is captured as a CUDA graph. A mark
    is a point in time between two parts. It is recorded by an event in the CUDA graph or, without CUDA, from the host's
    clock."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._times = [0.0] * count
        self._is_cuda = device.type == "cuda"
        events = count if self._is_cuda and can_time_graphs(device) else 0
        self._events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(events)]

    def set(self, index: int) -> None:
        """Record the time of mark number `index`, counted from 0. If a CUDA graph is being captured, every replay
        records it anew."""
        if self._events:
            self._events[index].record()
        elif not self._is_cuda:
            self._times[index] = time.perf_counter()

    def seconds(self) -> list[float] | None:
        """Returns the seconds between consecutive marks of the latest run, which must have ended; None if the device
        cannot measure time within a graph."""
        if self._is_cuda:
            pairs = zip(self._events, self._events[1:], strict=False)
            return [1e-3 * first.elapsed_time(last) for first, last in pairs] or None
        return [last - first for first, last in zip(self._times, self._times[1:], strict=False)]


@functools.cache
def can_time_graphs(device: torch.device) -> bool:
    """True if events within a CUDA graph can measure time on this device; tests it with a tiny graph."""
    try:
        first, last = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        number, graph = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(torch.cuda.current_stream(device)), torch.cuda.graph(
            graph, stream=stream, capture_error_mode="thread_local"
        ):  # fmt: skip
            first.record()
            number.add_(1)
            last.record()
        graph.replay()
        torch.cuda.synchronize(device)
        return first.elapsed_time(last) >= 0
    except (RuntimeError, TypeError, ValueError):
        return False
