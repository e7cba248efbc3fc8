"""Gradients summed over processes while the backward pass goes on.

    backward -> a gradient is complete -> its bucket is -> one message, under way while earlier layers compute -> finish

Buckets hold the parameters in reverse order, about that of the backward pass, and are sent in this order by every process: one
that computes nothing in a step, or whose gradients come in another order, sends the same messages. So the sums have the same
bits however much of it overlaps.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20
"""Of one message: as PyTorch's DistributedDataParallel has it."""


class GradientBuckets:
    """Belongs to one network on every process; `arm`, the backward pass and `finish` once a step."""

    def __init__(self, parameters: Iterable[nn.Parameter], bucket_bytes: int | None = None) -> None:
        self.buckets = _split([*parameters][::-1], bucket_bytes or BUCKET_BYTES)
        self.num_overlapped = 0
        """Messages of the latest step that were under way before its backward pass was over."""
        self._is_armed = False
        self._missing: list[int] = []
        self._sent: list[tuple[Tensor, Any]] = []
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self._complete, number))

    def arm(self) -> None:
        """The next backward pass is the step's last: what it completes is sent."""
        self._missing, self._is_armed = [len(bucket) for bucket in self.buckets], True

    def finish(self) -> None:
        """Send what is left, zeros for parameters without a gradient, and put the sums into `grad`."""
        self.num_overlapped = len(self._sent)
        while len(self._sent) < len(self.buckets):
            self._send()
        for bucket, (flat, work) in zip(self.buckets, self._sent, strict=True):
            work.wait()
            for parameter, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)
        self._sent, self._is_armed = [], False

    def _complete(self, number: int, parameter: Tensor) -> None:
        if not self._is_armed:
            return
        self._missing[number] -= 1
        while len(self._sent) < len(self.buckets) and self._missing[len(self._sent)] == 0:
            self._send()

    def _send(self) -> None:
        """The next bucket."""
        bucket = self.buckets[len(self._sent)]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in bucket]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self._sent.append((flat, dist.all_reduce(flat, async_op=True)))


def _split(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Neighbours together, as many as fit; a larger parameter alone."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if size > room or not buckets:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(parameter)
        room -= size
    return buckets
