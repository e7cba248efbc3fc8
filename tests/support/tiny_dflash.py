"""A tiny DFlash drafter in all its variants, and the tiny target that it drafts for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle, islice
from typing import Any

import pytest
import torch

from paceline.draft.dflash.config import DFlashConfig, new_config
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork
from paceline.draft.dflash.paths import Drafts
from paceline.draft.dflash.reading import scale_logits
from paceline.model.checkpoint import expected_shapes
from paceline.model.config.decoder import DecoderConfig
from paceline.model.native import library as native_lib
from paceline.model.native.decoder import NativeDecoder
from paceline.model.torch.decoder import Decoder

VOCAB, HIDDEN, TARGET_LAYERS = 11, 32, 6
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
SLIDING = {"sliding_window": 6, "use_sliding_window": True}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "full-causal": {"is_causal": True},
    "sliding": {**SLIDING, "layer_types": MIXED},
    "sliding-both-ways": {**SLIDING, "layer_types": MIXED, "is_causal": False},
    "sliding-narrower-than-block": {
        "sliding_window": 3,
        "use_sliding_window": True,
        "layer_types": MIXED,
        "is_causal": False,
    },
    "sliding-unused": {"sliding_window": 6, "use_sliding_window": False, "layer_types": MIXED},
    "one-layer-one-feature": {"num_layers": 1, "block_size": 4},
    "scaled": {"input_embedding_scale": 2.5, "output_multiplier": 0.7, "final_logit_softcapping": 1.5},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "biased": {"attention_bias": True},
}


def raw_config(**keys: Any) -> dict[str, Any]:
    return new_config(HIDDEN, VOCAB, TARGET_LAYERS, head_dim=8, intermediate_size=48, **keys)


def loud_(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights large enough that every part moves the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        parameter.data = loud(name, parameter, generator)
    return module


def loud(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.empty_like(like).normal_(0, min(0.3, 1.7 * like.shape[-1] ** -0.5), generator=generator)
    return 1 + noise if "norm" in name else noise


def network(raw: dict[str, Any], seed: int = 0) -> DFlashNetwork:
    built = DFlashNetwork.random(DFlashConfig.from_json(raw))
    loud_(built, seed)
    return built


def targets(num_rows: int = 3, hidden: int = HIDDEN, vocab: int = VOCAB, kind: Any = Decoder) -> tuple[Any, Any]:
    """The same tiny Llama in Transformers and in our decoder: Decoder or NativeDecoder."""
    import transformers  # only here: most tests need our own, and it takes seconds to import

    shape = target_shape(hidden, vocab)
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=shape.intermediate_size,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-6,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(dict(target_weights(shape)))
    return model, tiny_target(num_rows, hidden, vocab, kind)


def tiny_target(
    num_rows: int = 3, hidden: int = HIDDEN, vocab: int = VOCAB, kind: Any = Decoder, dtype: torch.dtype = torch.float32
) -> Any:
    shape = target_shape(hidden, vocab)
    return kind(shape, target_weights(shape), num_rows=num_rows, max_len=256, dtype=dtype)


def target_shape(hidden: int, vocab: int) -> DecoderConfig:
    return DecoderConfig(
        "llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=48, num_layers=TARGET_LAYERS, num_heads=4,
        num_kv_heads=2, head_dim=hidden // 4, max_position=512, rms_norm_eps=1e-6,
    )  # fmt: skip


def target_weights(shape: DecoderConfig) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(name, loud(name, torch.empty(size), generator)) for name, size in expected_shapes(shape).items()]


needs_native = pytest.mark.skipif(native_lib.load() is None, reason="the native library is not built")
KINDS = [Decoder, pytest.param(NativeDecoder, marks=needs_native)]


def in_turns(names: Iterable[str], first: int = 0) -> list[Any]:
    """Parameters (name, kind): each name with one of KINDS, alternating, from the kind at `first` on."""
    kinds = islice(cycle([Decoder, NativeDecoder]), first, None)
    return [
        pytest.param(name, kind, marks=[needs_native] * (kind is NativeDecoder))
        for name, kind in zip(names, kinds, strict=False)
    ]


class Recording(DFlashDrafter):
    """Keeps every round's logits and drafts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logits: list[torch.Tensor] = []

    def _draft(self, rows: list[int], anchors: list[int], width: int, size: int, with_logits: bool) -> Drafts:
        drafts = super()._draft(rows, anchors, width, size, True)
        assert drafts.logits_BKV is not None
        self.logits += list(scale_logits(drafts.logits_BKV, self.config).clone())
        return drafts if with_logits else drafts._replace(logits_BKV=None)
