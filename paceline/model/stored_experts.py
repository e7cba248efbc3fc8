"""Splits tensors that stack all experts of a layer into one tensor per expert; expands MXFP4 weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ModelFileError
from paceline.model.config.decoder import DecoderConfig
from paceline.model.gguf.blocks import AnyWeight

TOGETHER = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_bias|_blocks|_scales)?")
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""Absolute values of an FP4 number, by its three low bits; the fourth bit is the sign."""
SCALE_BIAS = 127


def taken_apart(
    config: DecoderConfig, tensors: Iterable[tuple[str, AnyWeight]], source: object
) -> Iterator[tuple[str, AnyWeight]]:
    """Yield (name, tensor) of a checkpoint, with stacks of all experts split into one tensor per expert, under names
    such as `mlp.experts.N.gate_proj.weight`. MXFP4 weights are expanded to bfloat16. Raises ModelFileError, naming
    `source`, for a stack with an invalid shape."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        match = TOGETHER.fullmatch(name) if config.num_experts else None
        if match is None or not isinstance(tensor, Tensor):
            yield name, tensor
            continue
        owner, which, kind = match[1], match[2], match[3] or ""
        if tensor.ndim != {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}[kind] or len(tensor) != config.num_experts:
            raise ModelFileError(
                f"{source}: tensor {name!r} has shape {tuple(tensor.shape)}, the config asks for {config.num_experts} "
                "experts: config and weights are of different models, fetch the model again"
            )
        if kind in ("_blocks", "_scales"):
            pair = waiting.setdefault(f"{owner}.{which}", {})
            pair[kind] = tensor
            if len(pair) < 2:
                continue
            tensor = expanded(pair["_blocks"], pair["_scales"], f"{source}: {owner}.{which}_proj")
            del waiting[f"{owner}.{which}"]
        elif kind == "" and config.has_expert_biases:
            tensor = tensor.transpose(1, 2)  # gpt-oss stores outputs in columns here, but in rows in MXFP4
        yield from _each(config, f"{owner}.", which, "bias" if kind == "_bias" else "weight", tensor)


def _each(config: DecoderConfig, owner: str, which: str, kind: str, tensor: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield each expert's tensors; gate and up are interleaved in gpt-oss, concatenated in other families."""
    for expert, rows in enumerate(tensor):
        if which == "down":
            yield f"{owner}{expert}.down_proj.{kind}", rows
        else:
            gate, up = (rows[::2], rows[1::2]) if config.has_expert_biases else rows.tensor_split(2)
            yield f"{owner}{expert}.gate_proj.{kind}", gate
            yield f"{owner}{expert}.up_proj.{kind}", up


def expanded(blocks: Tensor, scales: Tensor, name: str) -> Tensor:
    """Expand MXFP4 weights (OCP Microscaling Formats 1.0), G groups of 32 values, exactly to bfloat16 [..., 32 * G].

    blocks: uint8 [..., G, 16], two values per byte, the low four bits first. scales: uint8 [..., G], biased exponents
    of two. Raises ModelFileError, with the tensor's `name`, if they are not MXFP4.
    """
    if (
        blocks.dtype != torch.uint8
        or scales.dtype != torch.uint8
        or blocks.shape[:-1] != scales.shape
        or blocks.shape[-1] != 16
    ):
        raise ModelFileError(
            f"{name} is no MXFP4 ({tuple(blocks.shape)}, {tuple(scales.shape)}): fetch the model again"
        )
    table = torch.tensor([*FP4, *(-value for value in FP4)], dtype=torch.bfloat16)
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    return torch.ldexp(table[halves.int()], scales.int()[..., None] - SCALE_BIAS).to(torch.bfloat16).flatten(-2)
