"""Trains one network in several processes: sums gradients and figures, divides the work, and synchronises decisions.

Every process plans the whole step and computes its own blocks; gradients and figures are summed, so the step equals
that of one process. `Replicated` holds the network in every process, one or many, and sums gradients during the
backward pass (buckets.py). `Sharded` (FSDP2) holds a part of weights, gradients and optimiser state in each, for
networks that do not fit otherwise. Checkpoints of both are the same. All processes start with the first one's tensors,
and compare hashes of them at every checkpoint (agreement.py). group.py manages the processes.

    torchrun --nproc-per-node 2 -m paceline train ... --parallel sharded
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.runs.ranks import Ranks
from paceline.train.learn.packs import Chosen, PackBudget, Trainable, split_into_packs
from paceline.train.processes.agreement import check_alike, give_first, mark_of, mark_of_text
from paceline.train.processes.buckets import GradientBuckets

AGAIN = "the last checkpoint is kept: start all processes again with the same command, on the same files"


@dataclass(frozen=True, slots=True)
class Piece:
    """One pack (batch) that a process computes: its blocks, and the factor on their loss. A factor of 0 marks a filler
    pack, computed only so that all processes compute equally many packs."""

    chosen: list[Chosen]
    weight: float = 1.0


class Replicated:
    """Data-parallel training: every process holds the whole network and computes its share of each step's blocks. All
    processes must call all methods in the same order; this also holds for the subclass `Sharded`."""

    _buckets: GradientBuckets | None = None

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device

    def prepare(self, drafter: Trainable, is_autocast: bool = False) -> None:
        """Prepares the network of `drafter` for summing gradients over all processes. Call it before an optimiser is
        created for the network. `is_autocast` has an effect only in `Sharded`."""
        if self.ranks.world > 1:
            self._buckets = GradientBuckets(each for each in drafter.network.parameters() if each.requires_grad)

    def agree(self, network: nn.Module, optimisers: Iterable[tuple[str, Tensor]], start: str) -> None:
        """Makes all processes begin in the same state: copies the weights, buffers and optimiser states of the first
        process to the others. `start`: text that describes the training state; it is only compared. Raises
        ProcessesError, which names the processes, if `start` or the tensors' shapes differ, or if tensors still differ
        after the copy."""
        if self.ranks.world == 1:
            return
        named = [*_held(network), *optimisers]
        self.check_alike("where it begins", lambda: start)
        shapes = [(name, tensor.dtype, *tensor.shape) for name, tensor in named]
        self.check_alike("its tensors' shapes", lambda: repr(shapes))
        plain = [(name, tensor) for name, tensor in named if self._is_replicated(tensor)]
        give_first(plain, self.device)
        self._check_alike([mark_of(tensor) for _, tensor in plain], [name for name, _ in plain])

    def check_alike(self, what: str, describe: Callable[[], str]) -> None:
        """Raises ProcessesError if processes differ in the text that `describe()`, given by the caller, returns.
        `what`: name of the compared thing in the message."""
        if self.ranks.world > 1:
            self._check_alike([mark_of_text(describe())], [what])

    def _check_alike(self, marks: list[int], names: list[str]) -> None:
        check_alike(marks, names, self.ranks.world, self.device, AGAIN)

    def pieces(self, chosen: list[Chosen], budget: PackBudget) -> list[Piece]:
        """Returns the packs (batches) that this process computes in a step. `chosen`: all blocks of the step, as
        (document number, anchor positions). `budget`: limit of one pack."""
        own = chosen[self.ranks.rank :: self.ranks.world]
        return [Piece(group) for group in split_into_packs(own, budget)]

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Adds the gradients of one pack's loss to those of the step; `is_last` marks the step's last pack."""
        if is_last and self._buckets:
            self._buckets.arm()
        loss.backward()

    def sum_gradients(self, network: nn.Module) -> None:
        """Sums the gradients over all processes. Call it after the last backward pass of a step, before any other
        method that communicates."""
        if self._buckets:
            self._buckets.finish()

    def clip(self, network: nn.Module, longest: float) -> float:
        """Scales the gradients to a total norm of at most `longest`; returns the norm before scaling."""
        norm = nn.utils.clip_grad_norm_(network.parameters(), longest)
        return float(self._whole(norm))

    def sum(self, numbers: Tensor) -> Tensor:
        """Returns `numbers` summed elementwise over the processes, on the CPU."""
        if self.ranks.world == 1:
            return numbers
        numbers = numbers.to(self.device)
        dist.all_reduce(numbers)
        return numbers.cpu()

    def most(self, number: float) -> float:
        """Returns, in every process, the largest of the numbers that the processes pass, so that all make the same
        decision."""
        if self.ranks.world == 1:
            return number
        value = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    def first(self, number: int) -> int:
        """Returns, in every process, the `number` (64 bits) that the first process passes."""
        value = torch.tensor([number], dtype=torch.int64)
        if self.ranks.world > 1:
            give_first([("", value)], self.device)
        return int(value)

    def whole(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Gathers complete tensors for a checkpoint. Returns name -> copy in main memory on the first process, an empty
        dict on the others. Tensors that are divided among processes are gathered one by one, so a device needs memory
        for only one. Raises ProcessesError if processes hold different tensors."""
        copies: dict[str, Tensor] = {}
        marks: dict[str, int] = {}
        for name, tensor in tensors:
            whole = self._whole(tensor).detach()
            if self.ranks.world > 1:
                marks[name] = mark_of(whole)
            if self.ranks.is_first:
                copies[name] = whole.cpu().clone()
        if marks:
            self._check_alike([*marks.values()], [*marks])
        return copies

    def weights(self, network: nn.Module) -> dict[str, Tensor]:
        """Returns the network's `state_dict` with whole tensors in main memory on the first process; an empty dict on
        the others."""
        with self._mixing():
            return self.whole(network.state_dict().items())

    def load(self, network: nn.Module, tensors: dict[str, Tensor]) -> None:
        """Loads tensors (name -> weight) into the network. Every process passes the whole tensors."""
        parameters = dict(network.named_parameters())
        with self._mixing():
            network.load_state_dict({name: self.laid_out(parameters[name], tensor) for name, tensor in tensors.items()})

    @staticmethod
    def _mixing() -> contextlib.AbstractContextManager[Any]:
        """Allows state_dict hooks to compute with DTensors and plain tensors (`train_in_scaled_units`)."""
        return contextlib.nullcontext()

    @staticmethod
    def laid_out(parameter: Tensor, tensor: Tensor) -> Tensor:
        """Returns the part of the complete tensor `tensor` that this process holds of `parameter`, on the parameter's
        device. In this class it is the complete tensor."""
        return tensor.to(parameter.device)

    @staticmethod
    def _is_replicated(tensor: Tensor) -> bool:
        """Returns True if every process holds the whole tensor."""
        return True

    @staticmethod
    def _whole(tensor: Tensor) -> Tensor:
        return tensor


class Sharded(Replicated):
    """Sharded data-parallel training (FSDP2): every process holds a part of every tensor, and the parts of a layer are
    gathered while the layer computes. All processes take part in each pass, so they must compute equally many packs."""

    _network: Any = None
    """The network as changed by FSDP2: its class is a new one, its parameters are DTensors."""

    def prepare(self, drafter: Trainable, is_autocast: bool = False) -> None:
        """Divides the network of `drafter` among all processes, in place, beginning with the first process's weights.
        Call it before an optimiser is created for the network.

        `is_autocast`: True to gather layers in bfloat16, which halves the bytes sent. Gradients are still summed in
        float32, and the optimiser updates float32 weights."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        first = [*_held(drafter.network)]
        give_first(first, self.device)
        self._check_alike([mark_of(tensor) for _, tensor in first], [name for name, _ in first])
        mesh = init_device_mesh(self.device.type, (self.ranks.world,))
        low = (torch.bfloat16, torch.float32) if is_autocast else (None, None)
        policy = MixedPrecisionPolicy(*low, cast_forward_inputs=False)
        for module in (*drafter.layers, drafter.network):
            # The root is resharded too, so that code between steps finds the shards.
            sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
            assert isinstance(sharded, FSDPModule)
            sharded.set_gradient_divide_factor(1.0)  # a sum, where FSDP2 would take the mean
            sharded.set_force_sum_reduction_for_comms(True)  # gloo supports no other
        self._network = drafter.network

    def pieces(self, chosen: list[Chosen], budget: PackBudget) -> list[Piece]:
        """Returns the packs that this process computes in a step, equally many in every process. Processes with fewer
        packs add filler packs of one block, whose loss is multiplied by 0."""
        world, own = self.ranks.world, super().pieces(chosen, budget)
        most = max(sum(1 for _ in split_into_packs(chosen[rank::world], budget)) for rank in range(world))
        filler = [Piece([(number, anchors_A[:1])], 0.0) for number, anchors_A in chosen[:1]]
        return own + filler * (most - len(own))

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Adds the gradients of one pack's loss to those of the step. With the step's last pack (`is_last`), they are
        summed over processes, and each process retains its part."""
        self._network.set_requires_gradient_sync(is_last)
        loss.backward()

    def sum_gradients(self, network: nn.Module) -> None:
        """Does nothing: the last call of `backward` sums the gradients."""

    @staticmethod
    def _mixing() -> contextlib.AbstractContextManager[Any]:
        from torch.distributed.tensor.experimental import implicit_replication

        return implicit_replication()

    @staticmethod
    def laid_out(parameter: Tensor, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        tensor = tensor.to(parameter.device)
        if not isinstance(parameter, DTensor):
            return tensor
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)

    @staticmethod
    def _is_replicated(tensor: Tensor) -> bool:
        from torch.distributed.tensor import DTensor

        return not isinstance(tensor, DTensor)

    @staticmethod
    def _whole(tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def make_parallel(way: str, ranks: Ranks, device: torch.device) -> Replicated:
    """Returns the object that distributes training over these processes. `way`: sharded, replicated, or auto
    (replicated). A single process always holds the whole network."""
    return (Sharded if way == "sharded" and ranks.world > 1 else Replicated)(ranks, device)


def recompute_layers(layers: Iterable[nn.Module]) -> None:
    """Turns on gradient checkpointing, which saves memory: a layer retains only its inputs, and the backward pass
    computes the layer again."""
    for layer in layers:
        # A layer has no randomness, so no generator state is needed.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _held(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers themselves; hooks may change those of `state_dict`."""
    yield from itertools.chain(network.named_parameters(), network.named_buffers())
