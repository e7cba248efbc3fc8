"""Compiles Triton's kernels for cards that are not there, and counts what they use.

Triton chooses its interpreter when it is imported: `in_a_process` calls a test's function in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a program may use on an H100."""
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32", torch.bool: "*i1",
}  # fmt: skip
"""Triton's notation of pointers."""


def in_a_process(file: str, call: str, **environment: str) -> Any:
    """Result of a call, as JSON, in a process that has imported all names of a file of tests/model."""
    paths = [ROOT, ROOT / "tests" / "model", ROOT / "tests", ROOT / "experiments", *sys.path]
    code = f"import json; from {Path(file).stem} import *; print(json.dumps({call}))"
    variables = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(map(str, paths))} | environment
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def compiled(
    kernel: Any,
    kinds: dict[str, str],
    constants: dict[str, Any],
    num_warps: int,
    aligned: Iterable[int],
    arch: int = 90,
) -> Any:
    """A kernel's binary for cards of sm_`arch`. `kinds`: types of its arguments but the constants; `aligned`: places of
    those that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    hints = {(at,): [["tt.divisibility", 16]] for at in aligned}
    source = ASTSource(kernel, kinds | dict.fromkeys(constants, "constexpr"), values, hints)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps})


def usage(binary: Any) -> dict[str, int]:
    """Bytes of stack of each thread, which spilled registers go to, and of shared memory."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        words = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack, local = re.findall(r"(?:STACK|LOCAL):(\d+)", words)
    return {"stack": int(stack) + int(local), "shared": binary.metadata.shared}


def compiling(
    module: Any, used: dict[str, dict[str, int]], *, aligns: bool = True, **always: Any
) -> Callable[..., None]:
    """Takes the place of a function that launches kernels of a module: compiles each for an H100, and adds to `used`
    what it needs. `aligns`: tensors begin at multiples of 16 bytes. `always`: constants of every kernel."""

    def launch(name: str, grid: tuple[int, ...], args: list[Any], num_warps: int = 4, **constants: Any) -> None:
        kernel = getattr(module, name)
        constants |= always
        kinds = [
            POINTERS[each.dtype] if isinstance(each, Tensor) else "fp32" if isinstance(each, float) else "i32"
            for each in args
        ]
        aligned = [at for at, each in enumerate(args) if aligns and isinstance(each, Tensor)]
        named = dict(zip(kernel.arg_names, kinds, strict=False))
        used[f"{name} {constants}"] = usage(compiled(kernel, named, constants, num_warps, aligned))

    return launch
