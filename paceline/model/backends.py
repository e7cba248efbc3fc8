"""Selects and loads the implementation of a target model: the native CPU library, the PyTorch decoder, or
Transformers."""

from __future__ import annotations

import ctypes
import math
import sys
from dataclasses import dataclass, replace

import torch

from paceline import config as engine_config
from paceline.config import EngineConfig
from paceline.errors import ConfigError, NativeError, UnsupportedModelError
from paceline.hardware import memory_bytes
from paceline.hub import resolve
from paceline.model.adapter import MERGE_IT, is_adapter
from paceline.model.checkpoint import check_tensors, expected_shapes, load_config, load_tensors, random_tensors
from paceline.model.config.decoder import DecoderConfig
from paceline.model.gguf.blocks import BlockKind, quantise
from paceline.model.gguf.container import is_gguf
from paceline.model.native import library as native_lib
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import DEFAULT_MAX_LEN, Target
from paceline.model.torch.decoder import Decoder
from paceline.model.torch.recorded_pass import GraphDecoder


def settle(settings: EngineConfig) -> EngineConfig:
    """Choose a device and a dtype in place of "auto"; returns the settings with these values. Also selects the native
    library's instruction set, `settings.isa`, for the whole process.

    - Device: CUDA if PyTorch sees a GPU, else the CPU.
    - Dtype: bfloat16 if the device has instructions for it, else float32.
    - Exception: on a CPU without these instructions the dtype is also bfloat16 if the weights are quantised and the
      native library multiplies them in that form.

    Raises NativeError if the instruction set is unavailable, ConfigError if the device is missing or unsupported by the
    backend, and ModelNotFoundError, ModelFileError, DownloadError or CacheError if the model cannot be found or
    downloaded.
    """
    resolved = engine_config.resolve(settings)
    if settings.isa != "auto":
        native_lib.use(settings.isa)
    is_cpu_pass = resolved.device == "cpu" and resolved.backend != "torch"
    if settings.dtype != "auto" or not is_cpu_pass or resolved.weights == "random":
        return resolved
    in_blocks = resolved.weight_format in KINDS
    if not in_blocks and resolved.weight_format != "dense":
        in_blocks = is_gguf(resolve(resolved.model))
    takes_blocks = in_blocks and native_lib.load() is not None and native_lib.multiplies_blocks(torch.bfloat16)
    return replace(resolved, dtype="bfloat16") if takes_blocks else resolved


def load_target(settings: EngineConfig) -> Target:
    """Load the target model. Device and dtype in `settings` must not be "auto" (see `settle`).

    Raises ModelNotFoundError, ModelFileError, UnsupportedModelError, DownloadError or CacheError if the model cannot be
    loaded, NativeError if a required native library cannot run, and ConfigError for an adapter with `weight_format`
    "blocks".
    """
    dtype, device, weights = getattr(torch, settings.dtype), torch.device(settings.device), settings.weights
    # A memory budget is divided later, with the drafter's cache.
    num_rows = 1 if settings.kv_memory else settings.max_batch
    weight_format = settings.weight_format
    path = resolve(settings.model)
    keep_sums_in_float32(device)
    try:
        config = load_config(path)
    except UnsupportedModelError as error:
        if path.is_file():
            raise
        if is_adapter(path):
            raise UnsupportedModelError(f"{error}; adapters of such models are not added: {MERGE_IT}") from error
        if settings.backend == "native":
            raise NativeError(f"{error}; that has no native pass: leave --backend out") from error
        from paceline.model.hf.target import HFTarget  # imported here because Transformers takes seconds

        return HFTarget.from_path(
            path, dtype=dtype, device=device, num_rows=num_rows, max_len=settings.max_len, weights=weights
        )
    max_len = settings.max_len or min(config.max_position, DEFAULT_MAX_LEN)
    if weight_format == "blocks" and is_adapter(path):
        raise ConfigError(f"{path} is an adapter, which dense weights alone can be added to: leave --weight-format out")
    is_rounded = weight_format in KINDS
    backend = "native" if is_rounded and settings.backend == "auto" else settings.backend
    if _is_native(backend, config, dtype, device):
        if weights == "random":
            stored = random_tensors(config)
        elif not is_adapter(path) and _keeps_blocks(weight_format, config, dtype):
            stored = load_tensors(path, keep_blocks=True)
        else:
            stored = load_tensors(path)
        tensors = check_tensors(config, stored, path)
        if is_rounded:
            kind = KINDS[weight_format]
            tensors = ((name, each if name.endswith(ROUTERS) else quantise(each, kind)) for name, each in tensors)
        target: Target = NativeDecoder(config, tensors, num_rows=num_rows, max_len=max_len, dtype=dtype)
    else:
        if is_rounded:
            raise NativeError(
                f"weights in {weight_format} need the native pass: leave --backend or --weight-format out"
            )
        dense = random_tensors(config, 0, device, dtype) if weights == "random" else load_tensors(path)
        decoder = GraphDecoder if device.type == "cuda" else Decoder
        tensors = check_tensors(config, dense, path)
        target = decoder(config, tensors, num_rows=num_rows, max_len=max_len, dtype=dtype, device=device)
    _return_freed_memory()
    return target


def keep_sums_in_float32(device: torch.device) -> None:
    """Make cuBLAS accumulate half-precision matrix products in float32, for the whole process. No effect unless
    `device` is a CUDA device.

    By default cuBLAS may round partial sums to the input dtype, depending on the number of tokens in a pass. Plain
    decoding and verification would then round differently.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


KINDS: dict[str, BlockKind] = {"q8_0": "Q8_0", "q6_k": "Q6_K", "q5_k": "Q5_K", "q4_k": "Q4_K", "q4_1": "Q4_1"}
"""Value of `weight_format` -> the GGUF block type to which dense weights are quantised when they are loaded."""
ROUTERS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
"""Name endings of the small matrices that select experts; they are never quantised."""


def _keeps_blocks(weight_format: str, config: DecoderConfig, dtype: torch.dtype) -> bool:
    """True if a file's quantised blocks are used directly. With "auto" they are if products with blocks are faster, or
    if a dense copy would take more than half of the memory."""
    if weight_format != "auto":
        return weight_format != "dense"
    dense_bytes = dtype.itemsize * sum(map(math.prod, expected_shapes(config).values()))
    return native_lib.multiplies_blocks(dtype) or 2 * dense_bytes > memory_bytes()


def _is_native(backend: str, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """True if the native pass will run. Raises NativeError if it was requested and cannot."""
    if backend == "torch":
        return False
    obstacles = (
        (device.type != "cpu", f"runs on the CPU, not on {device.type}: use --device cpu, or leave --backend out"),
        (
            dtype not in native_lib.FORMATS,
            f"knows float32 and bfloat16, not {str(dtype).removeprefix('torch.')}: use --dtype, or leave --backend out",
        ),
        (config.layer_sizes is not None, "has no layers of different sizes, as Gemma 4's: leave --backend out"),
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
    """Description of how a target computes matrix products: backend, instruction set and weight format. Printed in
    reports, and recorded with measurements."""

    backend: str
    """"native" (the C++ library) or "torch"."""
    isa: str | None
    """Instruction set of the native library, such as avx2; None for torch."""
    weight_format: str
    """bfloat16, float32, or the block types of a GGUF file, such as Q4_1+Q8_0."""

    def __str__(self) -> str:
        return f"weights {self.weight_format}, {self.backend}" + (f" {self.isa}" if self.isa else "")


def form_of(target: Target) -> Form:
    if isinstance(target, NativeDecoder):
        return Form("native", native_lib.require().pn_in_use().decode(), target.weight_format)
    return Form("torch", None, str(target.dtype).removeprefix("torch."))


def _return_freed_memory() -> None:
    """Return freed heap memory to the system; packing leaves some 60 MB of holes for the built-in model (glibc
    only)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
