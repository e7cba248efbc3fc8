"""Tiny random models of every family, the same on every device, drafters for them, and texts of an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_day_stages.models import decoder, has_device_rounds, stand_in_tokenizer
from paceline.bench.passes import parting
from paceline.draft.base import Drafter, NoDrafter
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.dflash2.drafter import DFlash2Drafter
from paceline.draft.dspark.drafter import DSparkDrafter
from paceline.draft.eagle3.drafter import Eagle3Drafter
from paceline.draft.mtp.checkpoint import MtpLayer, one_layer
from paceline.draft.mtp.drafter import MtpDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.small_model import SmallModelDrafter
from paceline.engine.engine import Engine
from paceline.engine.round import RuleJudge
from paceline.model.checkpoint import expected_shapes
from paceline.model.config.decoder import DecoderConfig, decoder_config
from paceline.model.layout import LAYER_FACTOR, layer_shapes
from paceline.model.target import Target
from paceline.model.torch.decoder import Decoder
from paceline.plan.speculate import Speculation
from paceline.types import Batch, DraftBlock, SamplingParams
from paceline.verify.rules import RULES

Texts = list[list[int]]
VOCAB, HIDDEN, HEAD_DIM = 64, 32, 16
RAW = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 4, "rms_norm_eps": 1e-6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD_DIM, "max_position_embeddings": 512,
    "sliding_window": 7, "num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16, "linear_key_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "query_pre_attn_scalar": 5, "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 0.5, "global_head_dim": 32,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
"""Every key that any family reads: a tiny model of each, those to come included."""
LAYER_TYPES = {
    "global_head_dim": ["sliding_attention", "full_attention"] * 2,
    "linear_num_key_heads": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "rope_local_base_freq": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
NEAR_TIE = 1e-3
"""Two texts may part where the target's best two logits are no further apart."""


def tiny_config(architecture: str, defaults: dict[str, Any]) -> DecoderConfig:
    types = next((types for key, types in LAYER_TYPES.items() if key in defaults), None)
    own = {"layer_types": types} if types else {}
    return decoder_config({"architectures": [architecture], **RAW, **own}, Path(architecture))


def loud_tensors(config: DecoderConfig, seed: int = 0) -> list[tuple[str, Tensor]]:
    """Float32 on the CPU, so loud that every part moves the logits; states of delta nets forget slowly."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for name, size in expected_shapes(config).items():
        noise = torch.randn(size, generator=generator)
        if len(size) > 1:
            tensors.append((name, noise * (0.14 if config.delta else 0.25)))
        else:
            levels = {"norm.weight": 1.0 - config.norm_offset, "A_log": -2.0, LAYER_FACTOR: 1.0}
            level = next((value for end, value in levels.items() if name.endswith(end)), 0.0)
            tensors.append((name, level + 0.3 * noise))
    return tensors


def tiny_llama(vocab: int = VOCAB) -> DecoderConfig:
    return DecoderConfig("llama", vocab, HIDDEN, 48, 4, 4, 2, 8, 512)


class OracleDrafter(Drafter):
    """Drafts from known texts, every third block with a mistake, so that rounds accept, reject and roll back."""

    name, num_drafted = "oracle", 5

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts = texts

    def propose(self, batch: Batch) -> DraftBlock:
        drafts = []
        for seq, limit in zip(batch.sequences, batch.draft_limits_B(self.num_drafted), strict=True):
            at = len(seq.tokens)
            text = next((each for each in self._texts if each[: seq.prompt_len] == seq.tokens[: seq.prompt_len]), [])
            own = text[at : at + limit]
            if at % 3 == 0 and len(own) > 2:
                own[2] = (own[2] + 1) % VOCAB
            drafts.append(own)
        return DraftBlock.certain(drafts)


def drafters_for(
    target: Decoder, tensors: list[tuple[str, Tensor]], known: list[list[int]]
) -> dict[str, Callable[[], Drafter]]:
    """Every method of drafting, for a tiny target; `known` are texts with their prompts."""
    device, config = str(target.device), target.config
    sizes = {"head_dim": 8, "intermediate_size": 48}
    return {
        "none": NoDrafter,
        "oracle": lambda: OracleDrafter(known),
        "ngram": NgramDrafter,
        "dflash": lambda: DFlashDrafter.random(target, block_size=6, num_layers=2, **sizes),
        "dflash2": lambda: DFlash2Drafter.random(target, block_size=6, num_layers=2, **sizes),
        "dspark": lambda: DSparkDrafter.random(target, block_size=6, num_layers=2, **sizes),
        "eagle3": lambda: Eagle3Drafter.random(target, num_drafted=4, **sizes),
        "mtp": lambda: MtpDrafter(tiny_mtp(config), num_drafted=4),
        "small model": lambda: SmallModelDrafter(decoder(config, tensors, device, rows=target.cache.num_rows)),
    }


def tiny_mtp(config: DecoderConfig) -> MtpLayer:
    layer, generator = one_layer(config), torch.Generator().manual_seed(7)
    size = config.hidden_size
    shapes = {
        "fc.weight": (size, 2 * size),
        **{f"{name}_norm.weight": (size,) for name in ("embedding", "hidden", "final")},
    }
    shapes |= layer_shapes(layer, 0)
    level = 1.0 - config.norm_offset
    tensors = {
        name: 0.25 * torch.randn(shape, generator=generator) if len(shape) > 1 else torch.full(shape, level)
        for name, shape in shapes.items()
    }
    return MtpLayer(layer, tensors, config.delta is not None)


def texts(
    target: Target,
    drafter: Drafter | None,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    *,
    speculate: str = "full",
    rule: str = "auto",
    rounds: list[int] | None = None,
    device: bool = True,
    counts: dict[str, int] | None = None,
) -> list[list[int]]:
    """Answers of all prompts as one batch; `rounds` gets the tokens that each row of each round kept, `counts` the
    rounds by what made them: on the device, if that is wanted and possible."""
    engine = Engine(
        target, stand_in_tokenizer(target.vocab_size), drafter,
        judge=RuleJudge(RULES[rule]), planner=Speculation.of(speculate).planner(32), prefill_chunk=32,
        device_rounds=device and has_device_rounds(target),
    )  # fmt: skip
    each = params if isinstance(params, list) else [params] * len(prompts)
    ids = [engine.add(prompt, own) for prompt, own in zip(prompts, each, strict=True)]
    done: dict[int, list[int]] = {}
    while engine.has_work:
        for chunk in engine.step():
            if chunk.sequence.error:
                raise chunk.sequence.error
            if chunk.finish_reason:
                done[chunk.sequence.request_id] = chunk.sequence.output_ids
        if rounds is not None:
            rounds += [count + 1 for stats in engine.rounds for count in stats.num_accepted_B]
    if counts is not None:
        add_counts(counts, engine)
    return [done[request] for request in ids]


def add_counts(counts: dict[str, int], engine: Engine) -> None:
    """Adds the engine's rounds by what made them."""
    for kind, number in engine.device_rounds.counts.items() if engine.device_rounds else ():
        counts[kind] = counts.get(kind, 0) + number


def parted(target: Target, prompts: Texts, some: Texts, others: Texts) -> list[tuple[int, float]]:
    """Where texts part, and how near a tie the target is there: the gap of its best two logits."""
    parts = [parting(target, *row) for row in zip(prompts, others, some, strict=True)]
    return [each for each in parts if each is not None]


def are_same(parts: list[tuple[int, float]]) -> bool:
    """True if texts differ only after near-ties."""
    return all(gap < NEAR_TIE for _, gap in parts)
