"""Checks by hashes that all processes hold the same tensors, and copies the first process's tensors to all.

tensors -> 8 bytes of each one's sha256 -> gathered -> which processes differ from the first, and in which tensors
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ProcessesError


def mark_of(tensor: Tensor) -> int:
    """Returns a hash of a tensor's contents, by which processes compare tensors: the first 8 bytes of the SHA-256, as a
    signed integer that fits an int64 tensor."""
    return _mark(_bytes(tensor).cpu().numpy().data)


def mark_of_text(text: str) -> int:
    """Returns the first 8 bytes of the SHA-256 of a text, like `mark_of`."""
    return _mark(text.encode())


def check_alike(marks: Sequence[int], names: Sequence[str], world: int, device: torch.device, remedy: str) -> None:
    """Checks that all processes hold the same values, by comparing hashes of the values (`marks`). If a process has
    other hashes than the first one, raises ProcessesError in every process. All processes must pass the same number of
    hashes. `names`: the hashed values, for the message; `world`: number of processes; `device`: device of the tensors
    that are sent; `remedy`: advice for the message."""
    own = torch.tensor(marks, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(gathered, own)
    reference, *others = (marks.cpu() for marks in gathered)
    unlike = {rank: (marks != reference).nonzero().flatten().tolist() for rank, marks in enumerate(others, start=1)}
    unlike = {rank: numbers for rank, numbers in unlike.items() if numbers}
    if unlike:
        listed = "; ".join(
            f"process {rank} in {names[numbers[0]]}{f' and {len(numbers) - 1} more' * (len(numbers) > 1)}"
            for rank, numbers in unlike.items()
        )
        raise ProcessesError(f"processes (of {world}, counted from 0) differ from process 0: {listed}: {remedy}")


@torch.no_grad()
def give_first(tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Overwrites the contents of these tensors in every process by the first process's contents. All processes must
    pass tensors of the same shapes and dtypes, in the same order."""
    for _, tensor in tensors:
        sent = tensor.detach().to(device).contiguous()
        dist.broadcast(_bytes(sent), 0)
        tensor.detach().copy_(sent)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _mark(contents: bytes | memoryview) -> int:
    return int.from_bytes(hashlib.sha256(contents).digest()[:8], "little", signed=True)
