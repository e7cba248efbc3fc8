"""Recorded regions: work of fixed shape, captured in CUDA graphs before traffic; elsewhere computed eagerly.

A region computes outputs from inputs, all of them buffers at fixed addresses, by tensor operations alone, so that a
replay needs nothing of Python. Its shape is rounded up to a grid of few shapes. A shape that the grid does not cover,
or that was not recorded, is computed eagerly by the region's owner and counted: a capture takes tenths of a second
and has no place in traffic.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

Shape = tuple[int, ...]

_log = logging.getLogger(__name__)
_WARM_UPS = 2
_CAPTURING = threading.Lock()


class Region(ABC):
    """Work of one shape, from input buffers to output buffers."""

    kind = ""
    """Name under which its runs are counted."""
    replay: Callable[[], None]
    """Set by `Recorder.record`."""

    @abstractmethod
    def compute(self) -> None:
        """Compute the outputs by tensor operations on the device, without reading a value or copying from the host."""


class Recorder:
    """Captures regions of one device, all in one pool of memory, which regions that never run together share.

    Outputs must therefore lie in buffers outside the pool: one graph's memory is another's too. Not on CUDA a region is
    computed as it is, so that the same code is tested without a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.records_late = device.type != "cuda"
        """True if a shape that was not recorded beforehand is recorded at its first use, even in the middle of
        traffic."""
        self.seconds = 0.0
        """Seconds spent on recording so far."""
        self.num_recorded = 0
        """Regions recorded so far: CUDA graphs, on CUDA."""
        self.replayed, self.eager = Counter[str](), Counter[str]()
        """Runs by kind of region, and runs that were computed eagerly because no recorded region covered them."""
        self.failed = Counter[str]()
        """Regions by kind whose recording has failed: their work is computed eagerly."""
        self._memory: tuple[Any, torch.cuda.Stream] | None = None

    def record(self, region: Region) -> None:
        """Record it as its buffers are now; on CUDA it runs three times for that."""
        began = time.perf_counter()
        region.replay = self._capture(region) if self.device.type == "cuda" else region.compute
        self.num_recorded += 1
        self.seconds += time.perf_counter() - began

    def run(self, region: Region) -> None:
        """Compute the region's outputs from what its inputs hold now."""
        self.replayed[region.kind] += 1
        region.replay()

    def _capture(self, region: Region) -> Callable[[], None]:
        # The inner stream: a capture that fails leaves its own as the current one.
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream()):
            if self._memory is None:
                self._memory = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
            pool, stream = self._memory  # a pool is shared among captures of one stream
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):  # loads kernels and makes workspaces, which a capture may not
                    region.compute()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: what other threads pin, allocate or wait for meanwhile is none of this capture's business
            own = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
            with _no_garbage_collection(), torch.cuda.graph(graph, **own):
                region.compute()
        return graph.replay


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Recordings refer to their decoder and it to them: what the collector frees may be graphs of an earlier target,
    and CUDA ends a capture within which a graph is destroyed. The collector is the whole process's: one capture at a
    time."""
    with _CAPTURING:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


class Grid:
    """Shapes that are recorded: the product of some sizes in each dimension."""

    def __init__(self, *sizes: Sequence[int]) -> None:
        """`sizes`: ascending, by dimension."""
        self.sizes = sizes

    @property
    def shapes(self) -> list[Shape]:
        """Largest first, so that later captures fit into the memory of earlier ones."""
        return sorted(itertools.product(*self.sizes), key=lambda shape: (math.prod(shape), shape), reverse=True)

    def round_up(self, dimension: int, needed: int) -> int | None:
        """The least size of this dimension that is large enough; None when none is."""
        return next((size for size in self.sizes[dimension] if size >= needed), None)

    def cover(self, *needed: int) -> Shape | None:
        """The least shape that is large enough in every dimension."""
        shape = [self.round_up(dimension, size) for dimension, size in enumerate(needed)]
        return None if None in shape else tuple(size for size in shape if size is not None)


AnyRegion = TypeVar("AnyRegion", bound=Region)


class Recordings(Generic[AnyRegion]):
    """Regions of one kind, by shape."""

    def __init__(self, recorder: Recorder, kind: str, grid: Grid, make: Callable[..., AnyRegion]) -> None:
        """`make`: a region of the shape that it is given, one argument a dimension."""
        self._recorder, self._kind, self.grid, self.make = recorder, kind, grid, make
        self._regions: dict[Shape, AnyRegion | None] = {}
        """None where recording has failed."""

    @torch.inference_mode()
    def record(self) -> None:
        """Record every shape of the grid that is not recorded yet."""
        for shape in self.grid.shapes:
            if shape not in self._regions:
                self._add(shape)

    @torch.inference_mode()
    def find(self, *needed: int) -> AnyRegion | None:
        """A recorded region that is large enough in every dimension; None, counted as an eager run, without one."""
        shape = self.grid.cover(*needed)
        if shape is not None and shape not in self._regions and self._recorder.records_late:
            self._add(shape)
        region = None if shape is None else self._regions.get(shape)
        if region is None:
            self._recorder.eager[self._kind] += 1
        return region

    def _add(self, shape: Shape) -> None:
        """Record a region of this shape. Where that fails its work is computed eagerly."""
        self._regions[shape] = None
        try:
            region = self.make(*shape)
            self._recorder.record(region)
        except RuntimeError as error:
            if self._recorder.device.type != "cuda":
                raise
            self._recorder.failed[self._kind] += 1
            _log.warning("a %s of shape %s cannot be recorded and is computed eagerly: %s", self._kind, shape, error)
        else:
            self._regions[shape] = region


def row_sizes(num_rows: int) -> list[int]:
    """1, 2, 4, ... and `num_rows` itself."""
    return [*(1 << power for power in range((num_rows - 1).bit_length())), num_rows]
