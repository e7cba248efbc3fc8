"""What a decoder looks like, as numbers: read from a Hugging Face config.json or from GGUF metadata by `checkpoint.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a Llama-family decoder (Llama 2/3.x, Mistral, Qwen2, Qwen3)."""

    family: str
    """"llama", "mistral", "qwen2" or "qwen3"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Longest context the model was made for, in tokens."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    """The config's rope_scaling / rope_parameters with a "rope_type" (default, linear, llama3, yarn, ...), or None."""
    tie_embeddings: bool = False
    """The head is the embedding; no lm_head.weight in the checkpoint."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias on the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of each query and key head before rope (Qwen3)."""
    windows: tuple[int | None, ...] = ()
    """Per layer the sliding window in tokens, or None for full attention; empty means all full."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None
