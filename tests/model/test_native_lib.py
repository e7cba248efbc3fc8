"""The native library: matrices against numpy, what it refuses, and how it is found, left out, or not usable."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from native_models import BASE, ISAS, native_decoder, needs_library, quantised, random_weights, same_bits, use
from torch import Tensor

from paceline.errors import NativeError
from paceline.model.gguf.blocks import BLOCK_KINDS, BlockKind, Blocks
from paceline.model.native import library as native_lib
from paceline.model.native.library import Matrix
from paceline.model.target import ForwardBatch

pytestmark = needs_library
DTYPES = [torch.float32, torch.bfloat16]
KINDS = BLOCK_KINDS
ROOT = Path(__file__).parents[2]


def packed(weight: Tensor | Blocks) -> Matrix:
    is_blocks = isinstance(weight, Blocks)
    format = weight.kind if is_blocks else str(weight.dtype).removeprefix("torch.")
    matrix = Matrix([(weight.shape[0], format)], weight.shape[1])
    matrix.fill(0, weight.data if is_blocks else weight, format)
    return matrix


def width_of(kind: BlockKind) -> int:
    """Columns of a block in a file."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]


@cache
def weights_of(rows: int, cols: int) -> list[tuple[Tensor | Blocks, Tensor]]:
    """A random matrix in every format that its columns allow, and what it holds as float32."""
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * 1000 + cols))
    weights: list[tuple[Tensor | Blocks, Tensor]] = [
        (each, each.float()) for each in (values, values.bfloat16(), values.half())
    ]
    for blocks in [quantised(values, kind) for kind in KINDS if cols % width_of(kind) == 0]:
        weights.append((blocks, blocks.dense()))
    return weights


SIZES = [(1, 1), (4, 32), (5, 33), (66, 96), (18, 160), (19, 512)]


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_matrices_are_numpy_s(rows: int, cols: int, isa: str) -> None:
    rng = random.Random(rows)
    torch.manual_seed(rows)  # unseeded, the largest error once came to 0.004006 where the bound is 0.004
    for num_threads, (weight, dense) in enumerate(weights_of(rows, cols), start=1):
        use(isa, num_threads % 3 + 1)
        matrix, ids = packed(weight), [rng.randrange(rows) for _ in range(min(2 * rows, 19))]
        part = matrix.select(ids)
        for dtype in DTYPES:
            held = dense.to(dtype).float()
            assert torch.equal(matrix.rows_of(ids, dtype), held[ids].to(dtype))
            assert torch.equal(part.rows_of(list(range(len(ids))), dtype), held[ids].to(dtype))
            if matrix.formats == ["float32"] and dtype == torch.bfloat16:
                continue  # refused, see below
            for num_tokens in (1, 2, 7, 34):
                x_TD = torch.randn(num_tokens, cols)
                out = matrix.multiply(x_TD, dtype)
                in_planes = isinstance(weight, Blocks) and dtype == torch.bfloat16
                factors = (
                    dense if in_planes else held
                )  # planes: weights are not rounded, inputs to 2^-16 of a block's largest
                exact = x_TD.to(dtype).double().numpy() @ factors.double().numpy().T
                scale = np.linalg.norm(x_TD.numpy(), axis=1)[:, None] * np.linalg.norm(held.numpy(), axis=1) + 1e-30
                error = np.abs(out.numpy() - exact)
                assert error.max() < (4e-3 if in_planes else 1e-4) and (error / scale).max() < (
                    2e-5 if in_planes else 1e-6
                )
                assert same_bits(part.multiply(x_TD, dtype), out[:, ids])
                assert same_bits(matrix.multiply(x_TD[num_tokens // 2 :], dtype), out[num_tokens // 2 :])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_integer_products_at_their_limits(kind: BlockKind, isa: str) -> None:
    """All codes and inputs at the end of their range, nothing but one tiny input, nothing at all, and what is no
    number."""
    use(isa, 1)
    blocks = quantised(torch.full((16, 768), -1.0), kind)
    matrix, dense = packed(blocks), blocks.dense()
    assert dense.any()
    x_TD = torch.zeros(7, 768)
    x_TD[0], x_TD[1], x_TD[2, 5], x_TD[3, 0], x_TD[3, 1] = 3e38, -1e-25, 1e-36, 1.0, 2.0**-13
    x_TD[5, 40], x_TD[6, 700] = float("nan"), float("inf")
    out = matrix.multiply(x_TD, torch.bfloat16)
    expected = (x_TD.bfloat16().double() @ dense.double().T).float()
    torch.testing.assert_close(out[:2], expected[:2], rtol=1e-4, atol=0)
    assert (out[2] == 0).all() and (out[4] == 0).all()
    torch.testing.assert_close(out[3], expected[3], rtol=3e-5, atol=0)
    assert out[5].isnan().all() and not out[6].isfinite().any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "blocks"), [(16, 1), (37, 3), (130, 7)])
def test_integer_products_have_the_same_bits_on_every_instruction_set(kind: BlockKind, rows: int, blocks: int) -> None:
    cols = blocks * max(width_of(kind), 224)
    matrix = packed(quantised(torch.randn(rows, cols) * torch.logspace(-3, 3, rows)[:, None], kind))
    for num_tokens in (1, 2, 3, 4, 5, 7, 16, 33):
        x_TD = torch.randn(num_tokens, cols) * torch.logspace(-30, 20, cols)
        products = []
        for isa in ISAS:
            use(isa, 2)
            products.append(matrix.multiply(x_TD, torch.bfloat16))
        assert all(same_bits(product, products[0]) for product in products[1:])


def test_a_matrix_takes_the_other_dense_type() -> None:
    values = torch.randn(5, 40)
    rounding, widening, halves = (Matrix([(5, name)], 40) for name in ("bfloat16", "float32", "float32"))
    rounding.fill(0, values)
    widening.fill(0, values.bfloat16())
    halves.fill(0, values.half())
    for matrix in (rounding, widening):
        assert torch.equal(matrix.rows_of([4, 0, 3], torch.float32), values.bfloat16().float()[[4, 0, 3]])
    assert torch.equal(halves.rows_of([4, 0, 3], torch.float32), values.half().float()[[4, 0, 3]])


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
def test_a_matrix_of_several_formats_is_its_parts(isa: str) -> None:
    """Fused products of a file in mixed formats: blocks of 32 and of 256, with dense ones between them."""
    use(isa, 2)
    parts: list[Tensor | Blocks] = [
        quantised(torch.randn(32, 768), "Q4_K"),
        torch.randn(16, 768).bfloat16(),
        quantised(torch.randn(48, 768), "Q6_K"),
        quantised(torch.randn(7, 768), "Q5_0"),
    ]
    formats = ["Q4_K", "bfloat16", "Q6_K", "Q5_0"]
    stack = Matrix([(part.shape[0], format) for part, format in zip(parts, formats, strict=True)], 768)
    first = 0
    for part, format in zip(parts, formats, strict=True):
        stack.fill(first, part.data if isinstance(part, Blocks) else part, format)
        first += part.shape[0]
    assert stack.rows == 103 and stack.num_bytes >= sum(packed(part).num_bytes for part in parts)
    ids = [0, 31, 32, 47, 48, 95, 96, 102]
    for dtype in DTYPES:
        alone = torch.cat([packed(part).rows_of(list(range(part.shape[0])), dtype) for part in parts])
        assert torch.equal(stack.rows_of(ids, dtype), alone[ids])
        for num_tokens in (1, 5, 33):
            x_TD = torch.randn(num_tokens, 768)
            apart = torch.cat([packed(part).multiply(x_TD, dtype) for part in parts], dim=1)
            assert same_bits(stack.multiply(x_TD, dtype), apart)
    with pytest.raises(NativeError, match="one format"):
        stack.select([0])
    with pytest.raises(NativeError, match="whole groups of 16 rows"):
        Matrix([(8, "Q4_K"), (16, "Q6_K")], 768)


def test_nothing_in_is_nothing_out() -> None:
    matrix = packed(torch.randn(5, 7))
    assert matrix.multiply(torch.empty(0, 7), torch.float32).shape == (0, 5)
    assert matrix.rows_of([], torch.float32).shape == (0, 7)


def test_matrices_refuse() -> None:
    for rows, cols, format, message in (
        (0, 4, "float32", "at least one row"),
        (4, 0, "float32", "at least one row"),
        (-1, 4, "float32", "at least one row"),
        (4, 33, "Q8_0", "whole blocks of 32"),
        (4, 288, "Q4_K", "whole blocks of 256"),
    ):
        with pytest.raises(NativeError, match=f"{rows} x {cols}.*{message}"):
            Matrix([(rows, format)], cols)
    matrix = Matrix([(6, "float32")], 32)
    for first, rows in ((0, 9), (1, 8), (8, 1), (-1, 2)):
        with pytest.raises(NativeError, match="beyond the matrix"):
            matrix.fill(first, torch.randn(rows, 32))
    with pytest.raises(NativeError, match="does not fit the matrix's format"):
        Matrix([(4, "Q8_0")], 32).fill(0, torch.randn(4, 32))
    with pytest.raises(NativeError, match="float32 matrix cannot be multiplied in bfloat16"):
        matrix.multiply(torch.randn(1, 32), torch.bfloat16)
    for ids in ([0, 6], [-1]):
        with pytest.raises(NativeError, match="outside the matrix"):
            matrix.rows_of(ids, torch.float32)
        with pytest.raises(NativeError, match="outside the matrix"):
            matrix.select(ids)
    with pytest.raises(NativeError, match="at least one row"):
        matrix.select([])


@pytest.mark.slow
def test_a_model_of_the_wrong_shape_is_refused() -> None:
    config = replace(BASE, num_layers=1)
    weights = random_weights(config)
    weights["model.layers.0.self_attn.o_proj.weight"] = torch.randn(48, 44)
    with pytest.raises(NativeError, match="config's shape"):
        native_decoder(config, weights, torch.float32)
    for changes in ({"head_dim": 7}, {"head_dim": 1026}):
        odd = replace(config, **changes)
        with pytest.raises(NativeError, match="head dimension must be even and at most 1024"):
            native_decoder(odd, random_weights(odd), torch.float32)


def test_settings_are_refused() -> None:
    library = native_lib.require()
    for isa in (b"sse9", b"", b"AVX2"):
        with pytest.raises(NativeError, match="not available here"):
            native_lib.check(library.pn_use(isa))
    for number in (0, -1, 257):
        with pytest.raises(NativeError, match="between 1 and 256"):
            native_lib.set_threads(number)
    assert library.pn_in_use().decode() in ISAS and library.pn_num_threads() >= 1


def in_a_process(code: str, **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_NATIVE")} | environment
    command = [sys.executable, "-W", "always", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=60, check=True)
    return done.stdout + done.stderr


def test_the_library_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(native_lib.library_path())
    monkeypatch.setattr(native_lib, "load", native_lib.load.__wrapped__)
    monkeypatch.setenv("PACELINE_NATIVE_LIBRARY", path)
    assert native_lib.load() is not None
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    assert native_lib.load() is None
    with pytest.raises(NativeError, match="install a C\\+\\+ compiler"):
        native_lib.require()
    monkeypatch.delenv("PACELINE_NATIVE")
    monkeypatch.setenv("PACELINE_NATIVE_LIBRARY", "nowhere/at/all.so")
    assert native_lib.load() is None


def test_an_unusable_library_warns_and_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.so").write_bytes(b"not a library")
    monkeypatch.setattr(native_lib, "load", native_lib.load.__wrapped__)
    monkeypatch.setenv("PACELINE_NATIVE_LIBRARY", str(tmp_path / "broken.so"))
    with pytest.warns(UserWarning, match=r"broken\.so cannot be used .*running on PyTorch, slower; reinstall paceline"):
        assert native_lib.load() is None


def test_a_library_of_another_version_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE_LIBRARY", str(native_lib.library_path()))
    monkeypatch.setattr(native_lib, "load", native_lib.load.__wrapped__)
    monkeypatch.setattr(native_lib, "ABI_VERSION", native_lib.ABI_VERSION + 1)
    with pytest.warns(UserWarning, match="it is version"):
        assert native_lib.load() is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert native_lib.load() is None


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    native = native_decoder(BASE, random_weights(BASE), torch.float32)
    native_lib.set_threads(3)
    native.cache.allocate()

    def best() -> list[int] | None:
        native.cache.rollback([0], [0])
        return native.forward(ForwardBatch([0], [0], [9], list(range(9)))).argmax_T

    expected = best()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of a process with threads
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)  # which ends a child that waits for threads it does not have
        try:
            os._exit(0 if best() == expected else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert expected is not None and best() == expected


ONE_CORE = """
import os, time
import torch
from native_models import BASE, native_decoder, random_weights
from paceline.model.native import library as native_lib
from paceline.model.target import ForwardBatch

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
decoder = native_decoder(BASE, random_weights(BASE), torch.float32)
row = decoder.cache.allocate()

def least_s(num_threads):
    native_lib.set_threads(num_threads)
    taken = []
    for _ in range(20):
        began = time.process_time()  # a thread that spins uses it up, another program's turn does not count
        decoder.forward(ForwardBatch([row], [0], [1], [3], "all"))
        taken.append(time.process_time() - began)
        decoder.cache.rollback([row], [0])
    return min(taken)

alone = least_s(1)
two_s = least_s(2)
print("ratio:", two_s / alone)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind a process to a core")
def test_threads_that_share_a_core_give_it_to_each_other() -> None:
    """Two threads on one core: a waiting thread does not keep the other from working."""
    output = in_a_process(
        ONE_CORE, PACELINE_NATIVE_LIBRARY=str(native_lib.library_path()), PYTHONPATH=str(ROOT / "tests" / "support")
    )
    assert float(output.split("ratio:")[1].split()[0]) < 40


def test_threads_that_do_not_start_are_an_error() -> None:
    """The exception would otherwise cross the C interface and end the process, or leave the library locked."""
    script = """
import resource, torch
from paceline.errors import NativeError
from paceline.model.native import library
matrix = library.Matrix([(4, "float32")], 32)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
for number in (200, 1):
    library.set_threads(number)
    try:
        matrix.fill(0, torch.zeros(4, 32), "float32")
        print("filled by", number)
    except NativeError as error:
        print(error)
"""
    refused, filled = in_a_process(script).splitlines()
    assert "does not start as many threads" in refused and filled == "filled by 1"
