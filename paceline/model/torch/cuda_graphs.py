"""Captures work of fixed shape as CUDA graphs before serving, and then replays it; on other devices computes it
directly.

The work of one graph is called a region: a part of a pass, a pass or a whole decode round. It computes outputs from
inputs, all buffers at fixed addresses, with tensor operations only. Shapes are rounded up to a grid. Work of a shape
that was not captured is computed eagerly and counted: a capture takes tenths of a second, too long while requests wait.
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
    """Work of one fixed shape that can be captured as one CUDA graph, such as a target pass of 4 rows with 8 tokens
    each."""

    kind = ""
    """Name of this type of work, such as "target"; runs are counted under it."""
    replay: Callable[[], None]
    """Runs the work on the current inputs; set by `Recorder.record`."""

    @abstractmethod
    def compute(self) -> None:
        """Compute the outputs by tensor operations, without copies between host and device."""


class Recorder:
    """Captures regions (work of one fixed shape, such as a pass) as CUDA graphs on one device.

    All graphs share one memory pool. Regions must therefore never run concurrently, and their outputs must be in
    buffers outside the pool. On devices other than CUDA, regions are computed directly.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.records_late = device.type != "cuda"
        """True if a shape may also be captured on its first use while requests are running."""
        self.seconds = 0.0
        """Seconds spent on capturing so far."""
        self.num_recorded = 0
        """Number of captured regions; on CUDA each is one CUDA graph."""
        self.replayed, self.eager = Counter[str](), Counter[str]()
        """Numbers of runs by `Region.kind`: replays, and eager runs for which no captured region was large enough."""
        self.failed = Counter[str]()
        """Number of failed captures by `Region.kind`; that work is computed eagerly."""
        self._memory: tuple[Any, torch.cuda.Stream] | None = None

    def record(self, region: Region) -> None:
        """Capture a region with its current buffers, and set `region.replay` to the function that replays it. On CUDA
        the region first runs twice, as a warm-up; on other devices `replay` is `compute`."""
        began = time.perf_counter()
        region.replay = self._capture(region) if self.device.type == "cuda" else region.compute
        self.num_recorded += 1
        self.seconds += time.perf_counter() - began

    def run(self, region: Region) -> None:
        """Replay a captured region on the current contents of its input buffers."""
        self.replayed[region.kind] += 1
        region.replay()

    def _capture(self, region: Region) -> Callable[[], None]:
        # The inner stream context: a failed capture leaves its own stream as the current one.
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream()):
            if self._memory is None:
                self._memory = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
            pool, stream = self._memory  # captures can share a pool only on one stream
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):  # loads kernels and allocates workspaces, impossible during capture
                    region.compute()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: allocations and synchronisations of other threads must not fail this capture
            own = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
            with _no_garbage_collection(), torch.cuda.graph(graph, **own):
                region.compute()
        return graph.replay


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, which could free older CUDA graphs: destroying a graph ends a capture. Captures run
    one at a time, as the collector belongs to the process."""
    with _CAPTURING:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


class Grid:
    """The fixed shapes, such as (rows, tokens per row), for which work is captured: all combinations of the dimensions'
    sizes."""

    def __init__(self, *sizes: Sequence[int]) -> None:
        """`sizes`: for each dimension its sizes, ascending."""
        self.sizes = sizes

    @property
    def shapes(self) -> list[Shape]:
        """All shapes of the grid, largest first, so that later captures reuse the memory of earlier ones."""
        return sorted(itertools.product(*self.sizes), key=lambda shape: (math.prod(shape), shape), reverse=True)

    def round_up(self, dimension: int, needed: int) -> int | None:
        """Return the dimension's smallest size that is at least `needed`, or None if all are smaller."""
        return next((size for size in self.sizes[dimension] if size >= needed), None)

    def cover(self, *needed: int) -> Shape | None:
        """Return the smallest shape with at least the needed size in every dimension, or None."""
        shape = [self.round_up(dimension, size) for dimension, size in enumerate(needed)]
        return None if None in shape else tuple(size for size in shape if size is not None)


AnyRegion = TypeVar("AnyRegion", bound=Region)


class Recordings(Generic[AnyRegion]):
    """The captured regions of one type of work, such as target passes: one for each shape of a grid."""

    def __init__(self, recorder: Recorder, kind: str, grid: Grid, make: Callable[..., AnyRegion]) -> None:
        """`kind`: name of the work, for counts. `make`: creates a region from the shape, one argument per dimension."""
        self._recorder, self._kind, self.grid, self.make = recorder, kind, grid, make
        self._regions: dict[Shape, AnyRegion | None] = {}
        """Shape -> region, or None if its capture failed."""

    @torch.inference_mode()
    def record(self) -> None:
        """Capture a region for every shape of the grid that has no region yet. Failed captures are not repeated."""
        for shape in self.grid.shapes:
            if shape not in self._regions:
                self._add(shape)

    @torch.inference_mode()
    def find(self, *needed: int) -> AnyRegion | None:
        """Return the captured region for work of size `needed` in each dimension, such as (rows, tokens per row): that
        of the smallest shape of the grid that is large enough.

        If `Recorder.records_late` is True, a shape without a region is captured now. Returns None if there is no
        region, and counts this in `Recorder.eager`; the caller then computes the work without a graph.
        """
        shape = self.grid.cover(*needed)
        if shape is not None and shape not in self._regions and self._recorder.records_late:
            self._add(shape)
        region = None if shape is None else self._regions.get(shape)
        if region is None:
            self._recorder.eager[self._kind] += 1
        return region

    def _add(self, shape: Shape) -> None:
        """Capture a region of this shape; if that fails, log it, and its work is computed eagerly."""
        self._regions[shape] = None  # stays if the capture fails: it is not tried again
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
    """Return the numbers of rows for which passes are captured: 1, 2, 4, ... and the maximum `num_rows` itself."""
    return [*(1 << power for power in range((num_rows - 1).bit_length())), num_rows]
