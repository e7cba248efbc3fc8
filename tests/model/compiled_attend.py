"""Compiles the attention kernels without a GPU, and prints what each uses: [name, limit, shared bytes, usage] as JSON.

    python tests/model/compiled_attend.py '[[4, 128, "bfloat16", 16, false, 90, 232448]]'

An entry: query heads of a key head, head size, dtype, tokens of a row, whether scores have window and cap,
the card's sm number and its bytes of shared memory for a program.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

import torch
from triton import compile as compile_kernel
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.model.torch.kernels.attend import CHUNK, Tiles
from paceline.model.torch.kernels.triton.attend import attend_split, combine_splits

POINTERS = {"torch.float32": "*fp32", "torch.bfloat16": "*bf16", "torch.float16": "*fp16"}


def compiled(
    kernel: Any, pointers: dict[str, str], constants: dict[str, Any], warps: int, arch: int
) -> tuple[int, str]:
    """Bytes of shared memory, and what cuobjdump says of registers and local memory."""
    kinds: dict[str, str] = {}
    for name in kernel.arg_names:
        number = "fp32" if name in ("scale", "cap") else "i32"
        kinds[name] = "constexpr" if name in constants else pointers.get(name, number)
    loaded = [name for name in kinds if kinds[name].startswith("*") and kinds[name] != "*i64"]
    aligned = [at for at, name in enumerate(kinds) if name in loaded or name.endswith("_stride")]
    source = ASTSource(kernel, kinds, constants, {(at,): [["tt.divisibility", 16]] for at in aligned})
    binary: Any = compile_kernel(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return binary.metadata.shared, usage


def both(group: int, head_dim: int, dtype: str, count: int, has_all: bool, arch: int, limit: int) -> list[Any]:
    """The split kernel and the combining one, for cards of sm_`arch` with `limit` bytes of shared memory."""
    kind = getattr(torch, dtype)
    tiles, pointer = Tiles.of(group, count, head_dim, kind, limit), POINTERS[str(kind)]
    shape = {"GROUP": group, "HEAD": head_dim, "BLOCK_D": tiles.channels, "OVERLAPS": arch >= 90}
    parts = dict.fromkeys(("sums", "weights", "maxima"), "*fp32")
    pointers = parts | dict.fromkeys(("query", "keys", "values"), pointer)
    pointers |= dict.fromkeys(("starts_B", "counts_B", "depths_BJ", "bits_BJ"), "*i64")
    constants = {
        **shape, "BLOCK_M": tiles.members, "BLOCK_N": tiles.keys, "HAS_BITS": True, "IS_CAUSAL": True,
        "HAS_WINDOW": has_all, "HAS_CAP": has_all, "PRECISION": "ieee", "STAGES": tiles.stages,
    }  # fmt: skip
    name = f"{group} heads of {head_dim}, {count} tokens in {dtype} on sm_{arch}"
    split = compiled(attend_split, pointers, constants, tiles.warps, arch)
    combined = compiled(
        combine_splits,
        parts | {"sinks_H": "*fp32", "out": pointer},
        {**shape, "CHUNK": CHUNK, "HAS_SINKS": True},
        4,
        arch,
    )
    return [(f"split, {name}", limit, *split), (f"combined, {name}", limit, *combined)]


if __name__ == "__main__":
    print(json.dumps([each for wanted in json.loads(sys.argv[1]) for each in both(*wanted)]))
