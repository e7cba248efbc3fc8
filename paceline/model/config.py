"""What a decoder looks like, as numbers: read from a Hugging Face config.json or from GGUF metadata by `checkpoint.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ModelFileError

MAX_LAYERS = 4096
MAX_SIZE = 2**31 - 1
LARGEST = 1e18
"""What no model exceeds: in layers, in any other whole number, in any fraction. A file that asks for more is refused."""


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

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def check_heads(self, source: Path) -> None:
        """Raises ModelFileError when key heads do not divide query heads, or rope cannot halve a head."""
        if self.num_heads % self.num_kv_heads or self.head_dim % 2 or not self.head_dim:
            raise ModelFileError(
                f"{source}: {self.num_heads} heads of {self.head_dim} over {self.num_kv_heads} key heads do not divide evenly: "
                "correct the config, or fetch the model again"
            )
