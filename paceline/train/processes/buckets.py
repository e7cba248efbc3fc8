"""Sums gradients over processes during the backward pass.

    backward -> a gradient is complete -> its bucket is -> one message, in flight while earlier layers compute -> finish

Buckets hold the parameters in reverse order, about that of the backward pass, and every process sends them in this
order, even if it computes nothing in a step or its gradients come in another order. So the sums have the same bits in
every case.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20
"""Bytes per message, as in PyTorch's DistributedDataParallel."""


class GradientBuckets:
    """Sums one network's gradients over all processes (all-reduce). Messages (buckets) of several parameters are sent
    while the backward pass still computes others. Each training step calls `arm`, then its last backward pass, then
    `finish`."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.buckets = _split([*parameters][::-1], BUCKET_BYTES)
        self.num_overlapped = 0
        """Messages of the latest step that were in flight before its backward pass ended."""
        self._is_armed = False
        self._missing: list[int] = []
        self._sent: list[tuple[Tensor, Any]] = []
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self._complete, number))

    def arm(self) -> None:
        """Starts sending in the next backward pass: each bucket is sent as soon as its gradients are complete. Call it
        before the last backward pass of a step."""
        self._missing, self._is_armed = [len(bucket) for bucket in self.buckets], True

    def finish(self) -> None:
        """Sends the buckets that were not sent yet, waits for all, and stores the sums in the parameters' `grad`. A
        parameter without a gradient counts as zero."""
        self.num_overlapped = len(self._sent)
        while len(self._sent) < len(self.buckets):
            self._send()
        for bucket, (flat, work) in zip(self.buckets, self._sent, strict=True):
            work.wait()
            for parameter, part in zip(bucket, flat.split([parameter.numel() for parameter in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)
        self._sent, self._is_armed = [], False

    def _complete(self, number: int, parameter: Tensor) -> None:
        if not self._is_armed:
            return
        self._missing[number] -= 1
        while len(self._sent) < len(self.buckets) and self._missing[len(self._sent)] == 0:
            self._send()

    def _send(self) -> None:
        bucket = self.buckets[len(self._sent)]
        gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in bucket]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self._sent.append((flat, dist.all_reduce(flat, async_op=True)))


def _split(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Groups consecutive parameters up to the bucket size; a larger parameter gets its own bucket."""
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
