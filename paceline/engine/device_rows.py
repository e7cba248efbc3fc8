"""The state of cache rows on the device, for `device_round.py`, what the host knows of it, and times within a region."""

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
    """One row: integers, then what is float64 on the device. All zeros: idle."""

    length: int = 0
    anchor: int = 0
    left: int = 0
    """Tokens that the request may still produce; 0: idle."""
    most: int = 0
    """Drafts of a round at most."""
    seed: int = 0
    top_k: int = 0
    inverse_temperature: float = 0.0
    """0: greedy."""
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
        """Drafts that the next round checks."""
        return max(min(self.most, self.left - 1), 0)

    @property
    def decisive(self) -> tuple[float, ...]:
        """What the next round depends on."""
        return (*self._replace(most=self.width),) if self.left > 0 else ()


_NUM_INTS = 6


@dataclass(slots=True)
class RowState:
    """Views [B] of the first rows' values."""

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
        """Commit these drafts and this token of each live row; a row whose token is none is idle from now on."""
        is_sound_B = bonus_B >= 0
        gained_B = (accepted_B + 1) * (self.is_live_B & is_sound_B)
        self.anchor_B.copy_(torch.where(gained_B > 0, bonus_B, self.anchor_B))
        self.length_B.add_(gained_B)
        self.left_B.copy_((self.left_B - gained_B) * is_sound_B)


class DeviceRows:
    """The values of all rows of a cache, on its device. They are copied there where they are not what the latest round
    left: a row that joined, left, drafts another number of tokens, or was cut short."""

    def __init__(self, num_rows: int, max_len: int, device: torch.device) -> None:
        self._max_len, is_cuda = max_len, device.type == "cuda"
        shape = len(RowValues._fields), num_rows
        self.values = torch.zeros(shape, dtype=torch.int64, device=device)
        """Values [9, R]; those behind the integers are bits of float64."""
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda)
        self._known = [RowValues()] * num_rows
        self._survivors_RS: Tensor | None = None
        self._mocked: dict[int, tuple[Rule, Sequence]] = {}

    def first(self, num_rows: int) -> RowState:
        """Those of the first rows."""
        ints, floats = self.values[:_NUM_INTS, :num_rows], self.values[_NUM_INTS:, :num_rows].view(torch.float64)
        length_B, anchor_B, left_B, most_B, seed_B, top_k_B = ints.unbind()
        return RowState(length_B, anchor_B, left_B, most_B, Draws(seed_B, top_k_B, *floats.unbind()))

    def clear(self) -> None:
        """All rows are idle from now on."""
        self.values.zero_()
        self._known = [RowValues()] * len(self._known)

    def set(self, sequences: list[Sequence], most_B: list[int]) -> None:
        """The next round is one of these rows, with so many drafts at most; all others are idle. Copies at most once,
        without waiting: the host waits for every round before it copies again."""
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
        """A round has ended so on the device."""
        known = self._known[row]
        if bonus < 0:
            self._known[row] = known._replace(left=0)
            return
        gained = num_accepted + 1
        self._known[row] = known._replace(length=known.length + gained, anchor=bonus, left=known.left - gained)

    def mock(self, rule: Rule, sequences: list[Sequence]) -> None:
        """From now on `survivors` is what the rule says of these requests."""
        assert rule.survives is not None
        if self._survivors_RS is None:
            self._survivors_RS = torch.zeros(len(self._known), self._max_len, dtype=torch.int64, device=self.values.device)
        for seq in sequences:
            if self._mocked.get(seq.row) == (rule, seq):
                continue
            own = [rule.survives(Uniforms(seq.seed, place)) for place in range(seq.cached_len, self._max_len)]
            self._survivors_RS[seq.row, seq.cached_len :] = torch.tensor(own, dtype=torch.int64)
            self._mocked[seq.row] = rule, seq

    def survivors(self, length_B: Tensor) -> Tensor:
        """How many drafts stand behind these lengths, of mocked rows: as many as there may be, if they are checked."""
        assert self._survivors_RS is not None
        return self._survivors_RS[: len(length_B)].gather(1, length_B.clamp(max=self._max_len - 1)[:, None])[:, 0]


class Marks:
    """Moments within a region: by events that its graph records on CUDA, elsewhere by the host's clock."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._times = [0.0] * count
        self._is_cuda = device.type == "cuda"
        events = count if self._is_cuda and can_time_graphs(device) else 0
        self._events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(events)]

    def set(self, index: int) -> None:
        """The region has come so far."""
        if self._events:
            self._events[index].record()
        elif not self._is_cuda:
            self._times[index] = time.perf_counter()

    def seconds(self) -> list[float] | None:
        """Between the marks of the latest run, which has ended; None where the device cannot tell."""
        if self._is_cuda:
            pairs = zip(self._events, self._events[1:], strict=False)
            return [1e-3 * first.elapsed_time(last) for first, last in pairs] or None
        return [last - first for first, last in zip(self._times, self._times[1:], strict=False)]


@functools.cache
def can_time_graphs(device: torch.device) -> bool:
    """Whether events that a graph records can be timed, which a tiny graph shows."""
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
