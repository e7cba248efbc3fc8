"""Loads only the embedding and LM head of a target that runs on a server, for training, as drafters use both.

Only the checkpoint's safetensors files with these two matrices are read or downloaded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from paceline.config import EngineConfig
from paceline.errors import ModelFileError, UnsupportedModelError, reraised
from paceline.hub import HUB_ID, hub_folder, resolve
from paceline.model.adapter import is_adapter
from paceline.model.backends import keep_sums_in_float32, load_target
from paceline.model.checkpoint import check_header, load_config, read_json
from paceline.model.config.decoder import DecoderConfig
from paceline.model.gguf.container import is_gguf
from paceline.model.target import ForwardBatch, ForwardOutput, Target
from paceline.model.torch.decoder import end_scales

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
SCALED = ("embedding_multiplier", "scale_emb", "logits_scaling", "logit_scale", "final_logit_softcapping")
"""Keys of config.json that scale a model's embedding or head; rejected for families that the decoder does not know."""
LIGHT = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


class Ends(Target):
    """A `Target` without forward passes: only the embedding and LM head of a target that runs on a remote server."""

    def __init__(self, raw: dict[str, Any], embedding_VD: Tensor, head_VD: Tensor, max_position: int) -> None:
        self.embedding, self._head = embedding_VD, head_VD
        self.device, self.dtype = embedding_VD.device, embedding_VD.dtype
        self.vocab_size, self.hidden_size = embedding_VD.shape
        self.num_layers, self.max_position = int(raw["num_hidden_layers"]), max_position
        self.weight_bytes = embedding_VD.nbytes + (0 if head_VD is embedding_VD else head_VD.nbytes)

    def allocate_cache(self, num_rows: int, max_len: int) -> None:
        """No-op: passes cannot run."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Always raises UnsupportedModelError."""
        raise UnsupportedModelError("this target runs elsewhere: only its embedding and head are here")

    def matrix_embed(self, tokens_T: Tensor) -> Tensor:
        return F.embedding(tokens_T, self.embedding)

    def matrix_head(self, hidden_TD: Tensor) -> Tensor:
        return F.linear(hidden_TD, self._head)


def light_folder(model: str) -> Path:
    """Return the folder with a model's config and tokenizer; for a hub id these are downloaded, but not the weights.
    Raises ModelNotFoundError, ModelFileError (not a model), DownloadError or CacheError (the cache cannot be
    written)."""
    if os.path.exists(os.path.expanduser(model)) or not HUB_ID.fullmatch(model):
        return resolve(model)
    return hub_folder(model, LIGHT)


def load_ends(settings: EngineConfig) -> Target:
    """Load only the embedding and LM head of a target, as `Ends`; for a GGUF file or an adapter, the whole target.
    Device and dtype in `settings` must not be "auto".

    If the config ties embedding and head, the embedding is used as the head. A config of an unknown model family may
    not state this: the embedding is then used as the head if the checkpoint has no head.

    Raises ModelFileError if the embedding or an untied head is missing, UnsupportedModelError if a model of an unknown
    family scales its embedding or head.
    """
    folder = light_folder(settings.model)
    if is_gguf(folder) or is_adapter(folder):
        return load_target(settings)
    whole = read_json(folder / "config.json")
    raw = whole.get("text_config", whole)
    config: DecoderConfig | None = None
    with contextlib.suppress(UnsupportedModelError):  # another architecture: the new drafter gets its default shape
        config = load_config(folder)
    scaled = [key for key in SCALED if raw.get(key) not in (None, 1)]
    if config is None and (scaled or str(raw.get("model_type", "")).startswith("gemma")):
        what = scaled[0] if scaled else raw["model_type"]
        raise UnsupportedModelError(
            f"a target elsewhere with {what} is not implemented: its embedding or head is scaled"
        )
    if HUB_ID.fullmatch(settings.model) and not Path(settings.model).exists():
        folder = hub_folder(settings.model, (*LIGHT, *_files_of_ends(folder)))
    is_tied = {**raw, **whole}.get("tie_word_embeddings") if config is None else config.tie_embeddings
    tensors = dict(_read(folder, (EMBEDDING,) if is_tied else (EMBEDDING, HEAD)))
    for name in (EMBEDDING, HEAD) if is_tied is False else (EMBEDDING,):
        if name not in tensors:
            raise ModelFileError(f"{folder} holds no tensor that ends in {name}: give the target's own folder, whole")
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    keep_sums_in_float32(device)
    embedding = tensors[EMBEDDING].to(device, dtype)
    head = tensors[HEAD].to(device, dtype) if HEAD in tensors else embedding
    ends = Ends(raw, embedding, head, int(raw.get("max_position_embeddings", 2**31)))
    if config is not None:
        ends.config, ends.ends = config, end_scales(config, dtype)  # type: ignore[attr-defined]
    return ends


def _files_of_ends(folder: Path) -> tuple[str, ...]:
    """Names of the checkpoint's files that hold the embedding and the head."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ("model.safetensors",)
    with reraised(ModelFileError, f"{index} cannot be read", "fetch it again", KeyError, AttributeError):
        names = read_json(index)["weight_map"]
        return tuple({file for name, file in names.items() if name.endswith((EMBEDDING, HEAD))})


def _read(folder: Path, endings: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        check_header(file)
        damaged = reraised(ModelFileError, f"{file} cannot be read", "fetch it again", OSError, SafetensorError)
        with damaged, safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                ending = next((ending for ending in endings if name.endswith(ending)), None)
                if ending and "visual" not in name:
                    yield ending, tensors.get_tensor(name)
