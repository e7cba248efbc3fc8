"""A tiny random model of every family that our decoder runs, written to a folder by Transformers' own classes.

`FAMILIES` is the table: the tests in `tests/families/` run every cell of it, and docs/reference/families.md lists its
names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from small_llm import write_tokenizer
from torch import Tensor

from paceline.config import EngineConfig
from paceline.model.backends import load_target
from paceline.model.target import Target

VOCAB = 258
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = 7
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.3],
    "long_factor": [1.7, 4.0],
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
GEMMA4: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 8.0,
}
UNIFIED = {key: value for key, value in GEMMA4.items() if key != "hidden_size_per_layer_input"}


@dataclass(frozen=True)
class Family:
    """A row of the table."""

    model: str
    """Transformers' class, as its ForCausalLM and its Config begin."""
    options: dict[str, Any] = field(default_factory=dict)
    embedding_std: float = 0.25
    """Standard deviation of the embedding's rows. With a larger one the text would hardly vary in models that multiply
    the rows by a large number and use them as the head, too."""
    config: str = ""
    """How the Config begins, where it begins otherwise."""
    std: float = 0.25
    """Standard deviation of the other matrices. With a larger one, norms in gated delta nets amplify sums near zero:
    Transformers' own two ways through such a layer then differ by more than 1e-4."""


FAMILIES = {
    "llama": Family("Llama", {"attention_bias": True}),
    "mistral": Family("Mistral", {"sliding_window": WINDOW}),
    "qwen2": Family("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": Family("Qwen3"),
    "smollm3": Family("SmolLM3"),
    "granite": Family(
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 0.5},
    ),
    "olmo2": Family("Olmo2"),
    "olmo3": Family("Olmo3", {"sliding_window": WINDOW}),
    "phi3": Family("Phi3", {"sliding_window": WINDOW}),
    "phi4-mini": Family("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "gemma2": Family(
        "Gemma2",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 8.0,
            "attn_implementation": "eager",
        },
        embedding_std=0.12,
    ),
    "gemma3": Family(
        "Gemma3",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 5,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
        embedding_std=0.12,
        config="Gemma3Text",
    ),
    "qwen3-moe": Family("Qwen3Moe", {**EXPERTS, "num_experts": 5, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "mixtral": Family("Mixtral", {"num_local_experts": 5}),
    "qwen3-next": Family(
        "Qwen3Next",
        {**EXPERTS, **DELTA, "num_experts": 5, "shared_expert_intermediate_size": 16, "mlp_only_layers": [1]},
        std=0.14,
    ),
    "qwen3.5": Family("Qwen3_5", {**DELTA, "tie_word_embeddings": True}, config="Qwen3_5Text", std=0.14),
    "qwen3.5-moe": Family(
        "Qwen3_5Moe",
        {**EXPERTS, **DELTA, "num_experts": 5, "shared_expert_intermediate_size": 16},
        config="Qwen3_5MoeText",
        std=0.14,
    ),
    "gpt-oss": Family("GptOss", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "gemma4": Family("Gemma4", {**GEMMA4, "attention_k_eq_v": True}, embedding_std=0.12, config="Gemma4Text"),
    "gemma4-unified": Family("Gemma4Unified", {**UNIFIED, "attention_k_eq_v": True}, 0.12, "Gemma4UnifiedText"),
    "gemma4-small": Family(
        "Gemma4",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        embedding_std=0.12,
        config="Gemma4Text",
    ),
}
IN_PYTORCH = ("gemma4", "gemma4-unified", "gemma4-small")
"""Rows that the native pass refuses."""


def transformers_model(family: Family, seed: int = 0) -> Any:
    """Random weights so loud that every part moves the logits; norms, biases and sinks away from their first values.
    States forget slowly, so that what was long ago is heard."""
    import transformers

    torch.manual_seed(seed)
    options = SIZES | family.options
    implementation = options.pop("attn_implementation", None)
    config: Any = getattr(transformers, f"{family.config or family.model}Config")(**options)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "bias" not in name:
                parameter.normal_(std=family.embedding_std if "embed_tokens" in name else family.std)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3 - (2.0 if name.endswith("A_log") else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model


def write_model(folder: Path, name: str) -> tuple[Path, Any]:
    """A folder with the model of a row, a byte-level tokenizer and a template; and the model in Transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = transformers_model(FAMILIES[name])
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder, model


Written = dict[str, tuple[Path, Any]]
"""By the names of rows: folder, and the model in Transformers."""


def model_of(name: str, written: Written, folders: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Cached `write_model`: each model is written once per test session."""
    if name not in written:
        written[name] = write_model(folders.mktemp("families") / name, name)
    return written[name]


def target_of(folder: Path, *, num_rows: int = 2, max_len: int = 64, **settings: Any) -> Target:
    return load_target(
        EngineConfig(str(folder), dtype="float32", device="cpu", max_batch=num_rows, max_len=max_len, **settings)
    )


@torch.no_grad()
def reference(model: Any, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits [T, V] of one pass of Transformers, and the hidden states [T, D] behind each layer."""
    out = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return out.logits[0], [hidden[0] for hidden in out.hidden_states[1:]]


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB - 2, (length,), generator=generator).tolist()
