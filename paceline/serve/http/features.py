"""Hidden states for training, over HTTP: what vLLM's hidden-state connector writes into files, for targets vLLM does not run.

    GET  /v1/features    {"model", "num_layers", "hidden_size", "dtype", "max_tokens", "max_bytes"}
    POST /v1/features    {"token_ids": [...], "layers": [1, 9, 17], "final": false} -> safetensors:
                         hidden_states [T, L, D], token_ids [T], and with `final` final [T, D]

`layers` count from 0, the first layer's output, in the order in which they are wanted. The states are those that drafting sees:
the last layer's, and `final`, come after the final norm. Only with --features, and only for who has an API key. A document is
computed between two steps of the engine: a server that answers people too makes them wait for it.
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
    """Whose hidden states, and of which layers."""

    token_ids: list[int] = Field(min_length=1, description="A document, as it stands: nothing is added.")
    layers: list[int] = Field(min_length=1, max_length=64, description="Layers, from 0; each once.")
    final: bool = Field(False, description="The final normed hidden states, too.")


def add_features(app: FastAPI, worker: EngineWorker[Any]) -> None:
    """Nothing, unless the server was started with --features."""
    config = worker.config
    if not config.features:
        return

    @app.get(PATH, summary="Which hidden states there are", tags=["training"])
    async def describe() -> Response:
        name, (num_layers, hidden_size, dtype) = worker.serving().name, await worker.call(_shape)
        told = {"model": name, "num_layers": num_layers, "hidden_size": hidden_size, "dtype": dtype}
        return json_response(told | {"max_tokens": worker.serving().max_len, "max_bytes": config.features_bytes})

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
    target: Target = llm.engine.target
    return target.num_layers, target.hidden_size, str(target.dtype).removeprefix("torch.")


def _check(body: FeaturesRequest, max_len: int, vocab_size: int, num_layers: int) -> None:
    """Raises RequestRefused."""
    if len(body.token_ids) > max_len:
        message = f"{len(body.token_ids)} tokens are more than the {max_len} that this server holds"
        raise RequestRefused(message, param="token_ids", code="context_length_exceeded")
    if not all(0 <= token < vocab_size for token in body.token_ids):
        raise RequestRefused(f"token ids are from 0 to {vocab_size - 1}", param="token_ids")
    if len({*body.layers}) < len(body.layers) or not all(0 <= layer < num_layers for layer in body.layers):
        raise RequestRefused(f"layers are from 0 to {num_layers - 1}, each once", param="layers")


def _compute(llm: Any, body: FeaturesRequest) -> bytes:
    """In the engine's thread: the engine finds taps and cache as they were."""
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
        # Of one layer `contiguous` gives a view, and safetensors saves no tensors that share memory.
        tensors["final"] = states_TLD[:, slot].clone(memory_format=torch.contiguous_format)
    return save(tensors)


def _run(target: Target, row: int, tokens: list[int]) -> Tensor:
    """Taps [T, F], on the CPU."""
    parts: list[Tensor] = []
    for start in range(0, len(tokens), POSITIONS_PER_PASS):
        piece = tokens[start : start + POSITIONS_PER_PASS]
        taps_TF = target.forward(ForwardBatch([row], [start], [len(piece)], piece, "none")).taps_TF
        assert taps_TF is not None
        parts.append(taps_TF.cpu().clone())
    return torch.cat(parts)
