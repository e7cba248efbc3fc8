"""How several processes train one network: what is summed, what is shared out, and when all do the same.

Every process plans the whole step and computes its own blocks; gradients and figures are summed, so that the step is the one
that a process alone would take. `Replicated` holds the network on every process, one or many, and adds up gradients while the
backward pass goes on (buckets.py). `Sharded` (FSDP2) holds a part of weights, gradients and optimiser state on each: for
networks that do not fit otherwise. Checkpoints are the same from both. All begin with the first process's tensors, and hashes
tell at every checkpoint whether they still hold the same (agreement.py). group.py has the processes themselves.

    torchrun --nproc-per-node 2 -m paceline train ... --parallel sharded
"""

from __future__ import annotations

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

AGAIN = "the last checkpoint stands: start all processes again with the same command, on the same files"


@dataclass(frozen=True, slots=True)
class Piece:
    """The blocks of one pack, and the weight of their loss: 1, or 0 where a process computes a block only because all processes
    must take the same number of pieces."""

    chosen: list[Chosen]
    weight: float = 1.0


class Replicated:
    """The whole network on every process, one or many. Its methods are the contract of `Sharded` too; all processes call all of
    them, in one order."""

    _buckets: GradientBuckets | None = None

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device

    def prepare(self, drafter: Trainable, is_autocast: bool = False) -> None:
        """Make the network ready for several processes, in place, before an optimiser takes its parameters.

        `is_autocast` says that matrix products are computed in bfloat16.
        """
        if self.ranks.world > 1:
            self._buckets = GradientBuckets(drafter.network.parameters())

    def agree(self, network: nn.Module, optimisers: Iterable[tuple[str, Tensor]], told: str) -> None:
        """Before the first step: give all processes the first one's weights, buffers and states of optimisers.

        `told` says where a process begins. Raises ProcessesError, with the processes that begin elsewhere, or that hold other
        tensors afterwards.
        """
        if self.ranks.world == 1:
            return
        named = [*_held(network), *optimisers]
        self.check_alike("where it begins", lambda: told)
        self.check_alike("its tensors' shapes", lambda: repr([(name, each.dtype, *each.shape) for name, each in named]))
        plain = [(name, tensor) for name, tensor in named if self._is_replicated(tensor)]
        give_first(plain, self.device)
        self._check_alike([mark_of(tensor) for _, tensor in plain], [name for name, _ in plain])

    def check_alike(self, what: str, told: Callable[[], str]) -> None:
        """Raises ProcessesError when processes tell different things; one alone is not asked."""
        if self.ranks.world > 1:
            self._check_alike([mark_of_text(told())], [what])

    def _check_alike(self, marks: list[int], names: list[str]) -> None:
        check_alike(marks, names, self.ranks.world, self.device, AGAIN)

    def pieces(self, chosen: list[Chosen], budget: PackBudget | int) -> list[Piece]:
        """This process's packs of a step's blocks."""
        own = chosen[self.ranks.rank :: self.ranks.world]
        return [Piece(group) for group in split_into_packs(own, budget)]

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradients of one piece to those of the step; `is_last` says that it was the step's last."""
        if is_last and self._buckets:
            self._buckets.arm()
        loss.backward()

    def sum_gradients(self, network: nn.Module) -> None:
        """After the last piece, and before anything else is sent: make the gradients those of all processes; one without blocks
        adds zeros."""
        if self._buckets:
            self._buckets.finish()

    def clip(self, network: nn.Module, longest: float) -> float:
        """Scale the gradients down to this norm; returns the norm before."""
        norm = nn.utils.clip_grad_norm_(network.parameters(), longest)
        return float(self._whole(norm))

    def sum(self, numbers: Tensor) -> Tensor:
        """Numbers added up over the processes, on CPU."""
        if self.ranks.world == 1:
            return numbers
        numbers = numbers.to(self.device)
        dist.all_reduce(numbers)
        return numbers.cpu()

    def most(self, number: float) -> float:
        """The largest of the processes' numbers, so that all of them decide alike."""
        if self.ranks.world == 1:
            return number
        value = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    def whole(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copies in main memory on the first process, nothing on the others; parts are gathered tensor by tensor, so that no
        device needs room for more than one. Raises ProcessesError when processes hold different ones."""
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
        """Its `state_dict`, as `whole` gives it."""
        return self.whole(network.state_dict().items())

    def load(self, network: nn.Module, tensors: dict[str, Tensor]) -> None:
        """Fill the network with whole tensors that every process has read."""
        parameters = dict(network.named_parameters())
        network.load_state_dict({name: self.laid_out(parameters[name], tensor) for name, tensor in tensors.items()})

    @staticmethod
    def laid_out(parameter: Tensor, tensor: Tensor) -> Tensor:
        """A whole tensor, laid out as the parameter is, on its device."""
        return tensor.to(parameter.device)

    @staticmethod
    def _is_replicated(tensor: Tensor) -> bool:
        """True if every process holds all of it."""
        return True

    @staticmethod
    def _whole(tensor: Tensor) -> Tensor:
        return tensor


class Sharded(Replicated):
    """A part of every tensor on each process; a layer is gathered while it computes.

    Every forward and backward is then a collective, so all processes take the same number of pieces. Methods import
    torch.distributed.tensor, which takes a second, so that processes without shards do not.
    """

    _network: Any = None
    """The network as FSDP2 made it: its class is a new one, its parameters are DTensors."""

    def prepare(self, drafter: Trainable, is_autocast: bool = False) -> None:
        """As Replicated.prepare. Each process's part is one of the first process's network.

        With `is_autocast` layers are gathered in bfloat16, half the bytes, and gradients are summed in float32; the parts that
        the optimiser has are float32. Autocast then finds weights that are bfloat16 already and casts inputs alone, so that the
        residual stream stays float32, as on one process: hence no `cast_forward_inputs`.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        first = [*_held(drafter.network)]
        give_first(first, self.device)
        self._check_alike([mark_of(tensor) for _, tensor in first], [name for name, _ in first])
        mesh = init_device_mesh(self.device.type, (self.ranks.world,))
        low = (torch.bfloat16, torch.float32) if is_autocast else (None, None)
        policy = MixedPrecisionPolicy(*low, cast_forward_inputs=False)
        for module in (*drafter.layers, drafter.network):
            # The root too is freed after its forward: what reads or writes weights between steps finds the shards.
            sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
            assert isinstance(sharded, FSDPModule)
            sharded.set_gradient_divide_factor(1.0)  # a sum, where FSDP2 would take the mean
            sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        self._network = drafter.network

    def pieces(self, chosen: list[Chosen], budget: PackBudget | int) -> list[Piece]:
        """As many as the process with the most; a single block without weight fills up."""
        world, own = self.ranks.world, super().pieces(chosen, budget)
        most = max(sum(1 for _ in split_into_packs(chosen[rank::world], budget)) for rank in range(world))
        filler = [Piece([(number, anchors_A[:1])], 0.0) for number, anchors_A in chosen[:1]]
        return own + filler * (most - len(own))

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Gradients are summed into shards with the last piece, and stay whole until then."""
        self._network.set_requires_gradient_sync(is_last)
        loss.backward()

    def sum_gradients(self, network: nn.Module) -> None:
        """Done by the last `backward`."""

    def weights(self, network: nn.Module) -> dict[str, Tensor]:
        """As Replicated.weights."""
        from torch.distributed.tensor.experimental import implicit_replication

        with implicit_replication():  # for state_dict hooks that compute with plain tensors (train_in_scaled_units)
            return super().weights(network)

    def load(self, network: nn.Module, tensors: dict[str, Tensor]) -> None:
        """As Replicated.load."""
        from torch.distributed.tensor.experimental import implicit_replication

        with implicit_replication():
            super().load(network, tensors)

    @staticmethod
    def laid_out(parameter: Tensor, tensor: Tensor) -> Tensor:
        """As Replicated.laid_out; every process cuts its part out, nothing is sent."""
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
    """`auto` replicates; a process without others holds the whole network whatever was asked for."""
    return (Sharded if way == "sharded" and ranks.world > 1 else Replicated)(ranks, device)


def recompute_layers(layers: Iterable[nn.Module]) -> None:
    """Keep only the inputs of each layer for the backward pass, and compute the rest there again."""
    for layer in layers:
        # Nothing in a layer is random: no generator state to keep.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _held(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers themselves, where `state_dict` may have hooks that change them."""
    yield from itertools.chain(network.named_parameters(), network.named_buffers())
