"""Which implementation stands behind a model's name: the native pass, our decoder in PyTorch, or Transformers."""

from __future__ import annotations

import ctypes
import math
import sys
from dataclasses import dataclass, replace

import torch

from paceline import config as engine_config
from paceline.config import EngineConfig
from paceline.errors import NativeError, UnsupportedModelError
from paceline.hardware import memory_bytes
from paceline.hub import resolve
from paceline.model.checkpoint import check_tensors, expected_shapes, load_config, load_tensors, random_tensors
from paceline.model.config.decoder import DecoderConfig
from paceline.model.gguf.blocks import BlockKind, quantise
from paceline.model.gguf.container import is_gguf
from paceline.model.native import library as native_lib
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import DEFAULT_MAX_LEN, Target
from paceline.model.torch.decoder import Decoder
from paceline.model.torch.graphs import GraphDecoder


def settle(settings: EngineConfig) -> EngineConfig:
    """`config.resolve`, and bfloat16 as "auto" where products take weights in blocks: those need no instructions for it.

    Chooses the instruction set too. Raises NativeError where it is missing, and what `config.resolve` and `hub.resolve` do.
    """
    settled = engine_config.resolve(settings)
    if settings.isa != "auto":
        native_lib.use(settings.isa)
    if settings.dtype != "auto" or settled.device != "cpu" or settled.weights == "random" or settled.backend == "torch":
        return settled
    in_blocks = settled.weight_format in KINDS or (settled.weight_format != "dense" and is_gguf(resolve(settled.model)))
    takes_blocks = in_blocks and native_lib.load() is not None and native_lib.multiplies_blocks(torch.bfloat16)
    return replace(settled, dtype="bfloat16") if takes_blocks else settled


def load_target(settings: EngineConfig) -> Target:
    """The target of settings whose device and dtype are settled.

    Raises ModelNotFoundError, ModelFileError, UnsupportedModelError, DownloadError, CacheError, or NativeError when the native
    pass was asked for and cannot run.
    """
    dtype, device, weights = getattr(torch, settings.dtype), torch.device(settings.device), settings.weights
    num_rows = 1 if settings.kv_memory else settings.max_batch  # a budget is shared out when the drafter is known, too
    weight_format = settings.weight_format
    path = resolve(settings.model)
    keep_sums_in_float32(device)
    try:
        config = load_config(path)
    except UnsupportedModelError as error:
        if path.is_file():
            raise
        if settings.backend == "native":
            raise NativeError(f"{error}; that has no native pass: leave --backend out") from error
        from paceline.model.hf.target import HFTarget  # only here: importing Transformers takes seconds

        return HFTarget.from_path(
            path, dtype=dtype, device=device, num_rows=num_rows, max_len=settings.max_len, weights=weights
        )
    max_len = settings.max_len or min(config.max_position, DEFAULT_MAX_LEN)
    is_rounded = weight_format in KINDS
    backend = "native" if is_rounded and settings.backend == "auto" else settings.backend
    if _is_native(backend, config, dtype, device):
        if weights == "random":
            stored = random_tensors(config)
        elif _keeps_blocks(weight_format, config, dtype):
            stored = load_tensors(path, keep_blocks=True)
        else:
            stored = load_tensors(path)
        tensors = check_tensors(config, stored, path)
        if is_rounded:
            tensors = (
                (name, weight if name.endswith(ROUTERS) else quantise(weight, KINDS[weight_format])) for name, weight in tensors
            )
        target: Target = NativeDecoder(config, tensors, num_rows=num_rows, max_len=max_len, dtype=dtype)
    else:
        if is_rounded:
            raise NativeError(f"weights in {weight_format} need the native pass: leave --backend or --weight-format out")
        dense = random_tensors(config, 0, device, dtype) if weights == "random" else load_tensors(path)
        decoder = GraphDecoder if device.type == "cuda" else Decoder
        tensors = check_tensors(config, dense, path)
        target = decoder(config, tensors, num_rows=num_rows, max_len=max_len, dtype=dtype, device=device)
    _return_freed_memory()
    return target


def keep_sums_in_float32(device: torch.device) -> None:
    """Partial sums of half-precision matrix products in float32 on CUDA, for the whole process.

    PyTorch lets cuBLAS round them to the inputs' type where a product is split along its inner dimension. Whether it
    is depends on how many positions a pass has: plain decoding and verification would differ by that rounding.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


KINDS: dict[str, BlockKind] = {"q8_0": "Q8_0", "q6_k": "Q6_K", "q5_k": "Q5_K", "q4_k": "Q4_K", "q4_1": "Q4_1"}
"""Weight formats that round; see `model/gguf/blocks.py`."""
ROUTERS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
"""Small matrices that choose among experts: never rounded."""


def _keeps_blocks(weight_format: str, config: DecoderConfig, dtype: torch.dtype) -> bool:
    """Whether a file's blocks stay as they are. "auto": where products take them so, which is then faster; elsewhere every
    pass would expand them, and they stay only if a dense copy took more than half of the memory."""
    if weight_format != "auto":
        return weight_format != "dense"
    dense_bytes = dtype.itemsize * sum(map(math.prod, expected_shapes(config).values()))
    return native_lib.multiplies_blocks(dtype) or 2 * dense_bytes > memory_bytes()


def _is_native(backend: str, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the native pass will run this. Raises NativeError when it was asked for and cannot."""
    if backend == "torch":
        return False
    obstacles = (
        (device.type != "cpu", f"runs on the CPU, not on {device.type}: use --device cpu, or leave --backend out"),
        (
            dtype not in native_lib.FORMATS,
            f"knows float32 and bfloat16, not {str(dtype).removeprefix('torch.')}: use --dtype, or leave --backend out",
        ),
        (config.head_dim > native_lib.MAX_HEAD_DIM, f"has no heads of {config.head_dim} numbers: leave --backend out"),
        (
            config.delta is not None and config.delta.kernel > native_lib.MAX_TAPS,
            "has no convolutions as long as this model's: leave --backend out",
        ),
    )
    obstacle = next((text for is_so, text in obstacles if is_so), None)
    if backend == "auto":
        return obstacle is None and native_lib.load() is not None
    if obstacle:
        raise NativeError(f"the native pass {obstacle}")
    native_lib.require()
    return True


@dataclass(frozen=True, slots=True)
class Form:
    """What multiplies a target's weights, and the form in which it reads them."""

    backend: str
    """native or torch."""
    isa: str | None
    """The native pass's instruction set, a name of `--isa`."""
    weight_format: str
    """bfloat16, float32, or the blocks of a GGUF file such as Q4_1+Q8_0."""

    def __str__(self) -> str:
        return f"weights {self.weight_format}, {self.backend}" + (f" {self.isa}" if self.isa else "")


def form_of(target: Target) -> Form:
    if isinstance(target, NativeDecoder):
        return Form("native", native_lib.require().pn_in_use().decode(), target.weight_format)
    return Form("torch", None, str(target.dtype).removeprefix("torch."))


def _return_freed_memory() -> None:
    """Packing leaves holes in the heap, some 60 MB for the built-in model; glibc gives them back when asked."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
