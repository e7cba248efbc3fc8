"""HTTP endpoint for hidden states, used to train drafters for a remote target (like vLLM's hidden-state connector).

    GET  /v1/features    {"model", "num_layers", "hidden_size", "dtype", "max_tokens", "max_bytes"}
    POST /v1/features    {"token_ids": [...], "layers": [1, 9, 17], "final": false} -> safetensors:
                         hidden_states [T, L, D], token_ids [T], and with `final` final [T, D]

`layers` are numbered from 0 (the first layer's output), in any order. The states are those that drafters see: the last
layer's and `final` are taken after the final norm. The endpoint requires --features and an API key. A document is
computed between two engine steps, so it delays other requests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from fastapi import FastAPI
from pydantic import Field
from safetensors.torch import save
from starlette.responses import Response
from torch import Tensor

from paceline.model.target import ForwardBatch, Target
from paceline.serve.http.failures import ApiError, RequestRefused, json_response
from paceline.serve.requests.protocol import Closed
from paceline.serve.worker.worker import EngineWorker

PATH = "/v1/features"
POSITIONS_PER_PASS = 2048
BUSY_SECONDS = 2


class FeaturesRequest(Closed):
    """Request for the hidden states of a document (list of token ids) after each of the given layers."""

    token_ids: list[int] = Field(min_length=1, description="Token ids of a document; no special tokens are added.")
    layers: list[int] = Field(min_length=1, max_length=64, description="Layer numbers, from 0, without duplicates.")
    final: bool = Field(False, description="Also return the hidden states after the final norm.")


def add_features(app: FastAPI, worker: EngineWorker) -> None:
    """Add the endpoint /v1/features if the server was started with --features."""
    config = worker.config
    if not config.features:
        return

    @app.get(PATH, summary="Shape and limits of the hidden states", tags=["training"])
    async def describe() -> Response:
        name, (num_layers, hidden_size, dtype) = worker.serving().name, await worker.call(_shape)
        shape = {"model": name, "num_layers": num_layers, "hidden_size": hidden_size, "dtype": dtype}
        return json_response(shape | {"max_tokens": worker.serving().max_len, "max_bytes": config.features_bytes})

    @app.post(PATH, summary="Hidden states of a document, as safetensors", tags=["training"])
    async def features(body: FeaturesRequest) -> Response:
        model, (num_layers, hidden_size, dtype) = worker.serving(), await worker.call(_shape)
        _check(body, model.max_len, model.vocab_size, num_layers)
        num_bytes = len(body.token_ids) * (len(body.layers) + body.final) * hidden_size * getattr(torch, dtype).itemsize
        if num_bytes > config.features_bytes:
            message = f"these are {num_bytes} bytes, this server sends {config.features_bytes} at most: ask for less"
            raise RequestRefused(message, code="features_too_large", status=413)
        data = await worker.call(partial(_compute, body=body))
        return Response(data, media_type="application/vnd.safetensors")


def _shape(llm: Any) -> tuple[int, int, str]:
    """Return (number of layers, hidden size, dtype)."""
    target: Target = llm.engine.target
    return target.num_layers, target.hidden_size, str(target.dtype).removeprefix("torch.")


def _check(body: FeaturesRequest, max_len: int, vocab_size: int, num_layers: int) -> None:
    """Raises RequestRefused for too many or invalid token ids, and for invalid layers."""
    if len(body.token_ids) > max_len:
        message = f"{len(body.token_ids)} tokens are more than the {max_len} that this server holds"
        raise RequestRefused(message, param="token_ids", code="context_length_exceeded")
    if not all(0 <= token < vocab_size for token in body.token_ids):
        raise RequestRefused(f"token ids are from 0 to {vocab_size - 1}", param="token_ids")
    if len({*body.layers}) < len(body.layers) or not all(0 <= layer < num_layers for layer in body.layers):
        raise RequestRefused(f"layers are from 0 to {num_layers - 1}, each once", param="layers")


def _compute(llm: Any, body: FeaturesRequest) -> bytes:
    """Compute the hidden states in the engine's thread and return them as safetensors; restores taps and cache."""
    target: Target = llm.engine.target
    row, before = target.cache.allocate(), target.tap_layers
    if row is None:
        raise ApiError(
            503, "all rows of the cache are in use: try again", code="busy", headers={"retry-after": str(BUSY_SECONDS)}
        )
    last = target.num_layers - 1
    more = (last,) if body.final and last not in body.layers else ()
    try:
        target.set_taps((*body.layers, *more))
        states_TLD = _run(target, row, body.token_ids).unflatten(1, (len(body.layers) + len(more), -1))
    finally:
        target.set_taps(before)
        target.cache.free(row)
    tensors = {
        "hidden_states": states_TLD[:, : len(body.layers)].contiguous(),
        "token_ids": torch.tensor(body.token_ids),
    }
    if body.final:
        slot = len(body.layers) if more else body.layers.index(last)
        # With one layer, `contiguous` returns a view, and safetensors rejects tensors that share memory.
        tensors["final"] = states_TLD[:, slot].clone(memory_format=torch.contiguous_format)
    return save(tensors)


def _run(target: Target, row: int, tokens: list[int]) -> Tensor:
    """Return the tap features [T, F] of a document, on the CPU."""
    parts: list[Tensor] = []
    for start in range(0, len(tokens), POSITIONS_PER_PASS):
        piece = tokens[start : start + POSITIONS_PER_PASS]
        taps_TF = target.forward(ForwardBatch([row], [start], [len(piece)], piece, "none")).taps_TF
        assert taps_TF is not None
        parts.append(taps_TF.cpu().clone())
    return torch.cat(parts)
