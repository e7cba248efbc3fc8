"""A tiny EAGLE-3 drafter in all its variants, and its formulas written once more, plainly and slowly."""

from __future__ import annotations

from typing import Any

import torch
from tiny_dflash import HIDDEN, TARGET_LAYERS, VOCAB, loud_
from torch import Tensor
from torch.nn.functional import silu, softmax

from paceline.draft.eagle3.checkpoint import Eagle3Config, new_config
from paceline.draft.eagle3.drafter import Eagle3Drafter, Eagle3Network

IDS = torch.tensor([1, 2, 4, 5, 7, 8, 9])
"""A draft vocabulary of seven tokens out of eleven."""
VARIANTS: dict[str, dict[str, Any]] = {
    "3.1": {},
    "3": {"version": "3"},
    "residual-of-normed": {"version": "3", "norm_before_residual": True},
    "one-norm-before-fc": {"version": "3", "norm_before_fc": True},
    "norm-output": {"version": "3", "norm_output": True},
    "draft-vocabulary": {"draft_vocab_size": len(IDS)},
    "two-layers": {"num_hidden_layers": 2},
    "qwen3": {"model_type": "qwen3"},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "sliding": {"num_hidden_layers": 2, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "own-embedding": {"hidden_size": 24, "target_hidden_size": HIDDEN},
    "one-tap": {"tap_layers": [2]},
}


def raw_eagle3(**keys: Any) -> dict[str, Any]:
    sizes = {name: keys.pop(name) for name in ("hidden_size", "vocab_size") if name in keys}
    return {**new_config(HIDDEN, VOCAB, TARGET_LAYERS, head_dim=8, intermediate_size=48, **keys), **sizes}


def loud_network(raw: dict[str, Any], seed: int = 0) -> Eagle3Network:
    config = Eagle3Config.from_json(raw)
    built = Eagle3Network(config, has_embedding=config.shape.hidden_size != HIDDEN)
    loud_(built, seed)
    return built


def drafter_of(network: Eagle3Network, **options: Any) -> Eagle3Drafter:
    return Eagle3Drafter(network, ids=IDS if network.config.draft_vocab_size == len(IDS) else None, **options)


def eagle3_for(target: Any, *, ids: list[int] | None = None, num_drafted: int = 4, **keys: Any) -> Eagle3Drafter:
    """A drafter for this target, with a draft vocabulary `ids` or all tokens."""
    size = None if ids is None else len(ids)
    raw = new_config(
        target.hidden_size, target.vocab_size, target.num_layers, head_dim=8, intermediate_size=48,
        draft_vocab_size=size, **keys,
    )  # fmt: skip
    own = None if ids is None else torch.tensor(ids)
    return Eagle3Drafter(loud_network(raw), ids=own, num_drafted=num_drafted)


class Formulas:
    """The whole text again for every draft: no cache, no packing, one loop a head."""

    def __init__(self, network: Eagle3Network, embedding_VD: Tensor) -> None:
        self.weights = {name: tensor.detach().double() for name, tensor in network.state_dict().items()}
        self.config, self.embedding_VD = network.config, self.weights.get("embed_tokens.weight", embedding_VD.double())

    def norm(self, name: str, inputs: Tensor) -> Tensor:
        scale = (inputs.square().mean(-1, keepdim=True) + self.config.shape.rms_norm_eps).rsqrt()
        return inputs * scale * self.weights[name]

    def linear(self, name: str, inputs: Tensor) -> Tensor:
        return inputs @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def features(self, taps_NF: Tensor) -> Tensor:
        taps_NF = taps_NF.double()
        if self.config.norm_before_fc:
            taps_NF = self.norm("input_norm.weight", taps_NF)
        if self.config.fc_norm:
            parts = taps_NF.split(self.config.target_hidden_size, dim=-1)
            taps_NF = torch.cat(
                [self.norm(f"fc_norm.{index}.weight", part) for index, part in enumerate(parts)], dim=-1
            )
        return self.linear("fc", taps_NF)

    def rotated(self, head: Tensor, position: int) -> Tensor:
        half, theta = len(head) // 2, self.config.shape.rope_theta
        angles = torch.tensor(
            [position * theta ** (-2 * index / len(head)) for index in range(half)], dtype=torch.float64
        )
        first, second = head[:half], head[half:]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])

    def attention(self, layer: int, inputs: Tensor) -> Tensor:
        name, shape = f"layers.{layer}.self_attn", self.config.shape
        heads = [self.linear(f"{name}.{which}_proj", inputs).unflatten(-1, (-1, shape.head_dim)) for which in "qkv"]
        if shape.qk_norm:
            heads[:2] = [
                self.norm(f"{name}.{which}_norm.weight", each) for which, each in zip("qk", heads, strict=False)
            ]
        window, out = shape.window(layer), []
        turned = [[self.rotated(head, at + 1) for head in row] for at, row in enumerate(heads[1])]
        for at in range(len(inputs)):
            rows = []
            for number in range(shape.num_heads):
                shared = number * shape.num_kv_heads // shape.num_heads
                first = 0 if window is None else max(0, at - window + 1)
                query = self.rotated(heads[0][at, number], at + 1)
                keys = torch.stack([turned[other][shared] for other in range(first, at + 1)])
                weights = softmax(keys @ query / shape.head_dim**0.5, dim=-1)
                rows.append(weights @ heads[2][first : at + 1, shared])
            out.append(torch.cat(rows))
        return self.linear(f"{name}.o_proj", torch.stack(out))

    def run(self, tokens: list[int], hidden_TD: Tensor) -> Tensor:
        """Hidden states before the last norm, of tokens that stand at positions 1, 2, ... and what is told to each."""
        embedded = self.embedding_VD[tokens]
        for layer in range(self.config.shape.num_layers):
            name = f"layers.{layer}"
            if layer == 0:
                normed = self.norm(f"{name}.hidden_norm.weight", hidden_TD)
                inputs = torch.cat([self.norm(f"{name}.input_layernorm.weight", embedded), normed], dim=-1)
                hidden_TD = normed if self.config.norm_before_residual else hidden_TD
            else:
                inputs = self.norm(f"{name}.input_layernorm.weight", hidden_TD)
            hidden_TD = hidden_TD + self.attention(layer, inputs)
            normed = self.norm(f"{name}.post_attention_layernorm.weight", hidden_TD)
            gate, up = self.linear(f"{name}.mlp.gate_proj", normed), self.linear(f"{name}.mlp.up_proj", normed)
            hidden_TD = hidden_TD + self.linear(f"{name}.mlp.down_proj", silu(gate) * up)
        return hidden_TD

    def chain(self, tokens: list[int], taps_NF: Tensor, drafts: list[int]) -> list[Tensor]:
        """Logits of each of these drafts behind `tokens`, of which all but the last have features."""
        text, features, logits = list(tokens[1:]), self.features(taps_NF), []
        for draft in drafts:
            hidden = self.run(text, features)[-1]
            normed = self.norm("norm.weight", hidden)
            logits.append(self.linear("lm_head", normed))
            features = torch.cat([features, (normed if self.config.norm_output else hidden)[None]])
            text.append(draft)
        return logits
