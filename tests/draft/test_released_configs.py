"""Configs of released drafters, as their trainers write them: what each is, or why it is refused. The keys are those of
the named releases; sizes that no reader depends on are small."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.draft.dflash.config import DFlashConfig, is_dflash
from paceline.draft.eagle3.checkpoint import is_eagle3
from paceline.draft.formats.inspection import kind_of
from paceline.draft.formats.speculators import to_z_lab
from paceline.errors import ModelFileError, UnsupportedModelError

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "files.md"
QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 5,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "vocab_size": 151936, "num_target_layers": 36,
}  # fmt: skip
NESTED = {name: value for name, value in QWEN3.items() if name != "rope_theta"} | {
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 4096, "use_sliding_window": True,
}  # fmt: skip
HEADS = {
    "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
DEEPSPEC: dict[str, Any] = {
    **QWEN3, **HEADS, "architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33], "num_anchors": 512, "tie_word_embeddings": False,
}  # fmt: skip
INNER = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
SPECFORGE: dict[str, Any] = {
    **QWEN3, **HEADS, "architectures": ["DSparkDraftModel"], "block_size": 7, "layer_types": ["full_attention"] * 5,
    "sliding_window": None, "use_sliding_window": False,
    "dflash_config": {**INNER, **HEADS, "projector_type": "dspark", "attention_mode": "gqa"},
}  # fmt: skip
SPECULATORS: dict[str, Any] = {
    "speculators_version": "0.9.0", "block_size": 8, "draft_vocab_size": 32000, "mask_token_id": 151669,
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "transformer_layer_config": {name: value for name, value in QWEN3.items() if name != "num_target_layers"},
}  # fmt: skip
GATED = {
    "partial_rotary_factor": 0.25, "attn_output_gate": True, "full_attention_interval": 4,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25,
                        "mrope_interleaved": True, "mrope_section": [11, 11, 10]},
}  # fmt: skip

READ: dict[str, tuple[dict[str, Any], str, int]] = {
    "z-lab/Qwen3-4B-DFlash-b16": (
        {**QWEN3, "architectures": ["DFlashDraftModel"], "block_size": 16, "dflash_config": INNER}, "DFlash v1", 15
    ),
    "z-lab/Qwen3.6-35B-A3B-DFlash": (
        {**NESTED, "architectures": ["DFlashDraftModel"], "dflash_config": {**INNER, "block_size": 16}}, "DFlash v1", 15
    ),
    "RedHatAI/DeepSeek-V4-Flash-speculator.dflash": (
        {**SPECULATORS, "speculators_model_type": "dflash", "max_anchors": 3072}, "DFlash v1", 7
    ),
    "makora-ai/gemma4-26b-a4b-dspark": (
        {**SPECULATORS, **HEADS, "speculators_model_type": "dspark", "block_size": 7}, "DSpark", 7
    ),
    "deepseek-ai/dspark_qwen3_8b_block7": (DEEPSPEC, "DSpark", 7),
    "satgeze/Qwen3.6-27B-DSpark": (DEEPSPEC | GATED | {"block_size": 15}, "DSpark", 15),
    "satgeze/Qwen3.5-0.8B-DSpark": (DEEPSPEC | GATED | {"model_type": "qwen3_5_text"}, "DSpark", 7),
    "Koopah/Qwen3.6-35B-A3B-NVFP4-DSPARK": (DEEPSPEC | {"block_size": 8}, "DSpark", 8),
    "RadixArk/Qwen3.8-27B-DSpark": (SPECFORGE, "DSpark", 6),
}  # fmt: skip
"""By release: config.json, kind, drafts a round."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Hikari07jp/DSpark-Gemma-4-31B-draft": (
        {**QWEN3, **HEADS, **INNER, "architectures": ["DFlashDraftModel"], "block_size": 16}, "markov_rank is of DSpark"
    ),
    "stanleyphoong/Ornith-1.0-9B-DSpark": (
        {**DEEPSPEC, "architectures": ["Qwen35DSparkModel"], "model_type": "qwen3_5"}, "Qwen35DSparkModel .* not implem"
    ),
    "LiquidAI/LFM2.5-2.6B-DSpark": (
        {**SPECFORGE, "architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}, "Lfm2DSparkDraftModel"
    ),
    "SpecForge, DSpark with MLA": (
        SPECFORGE | {"dflash_config": {**SPECFORGE["dflash_config"], "attention_mode": "mla"}}, "attention_mode 'mla'"
    ),
    "SpecForge, Domino as DFlash": (
        {**QWEN3, "architectures": ["DFlashDraftModel"], "block_size": 16,
         "dflash_config": {**INNER, "projector_type": "domino", "gru_hidden_dim": 1024}}, "projector_type 'domino'"
    ),
    "SpecForge, DFlash 2 with experts": (
        SPECFORGE | {"n_routed_experts": 64, "num_experts_per_tok": 6}, "n_routed_experts 64"
    ),
    "speculators, P-EAGLE": ({**SPECULATORS, "speculators_model_type": "peagle"}, "'peagle' are not implemented"),
}  # fmt: skip
"""By release: config.json, and what is said."""


def config_of(raw: dict[str, Any]) -> DFlashConfig:
    path = Path("config.json")
    return DFlashConfig.from_json(to_z_lab(raw, path) if "speculators_model_type" in raw else raw, path)


@pytest.mark.parametrize("name", READ)
def test_it_is_read_and_named(name: str) -> None:
    raw, kind, num_drafted = READ[name]
    config = config_of(raw)
    assert is_dflash(raw)
    assert (kind_of(config), config.num_slots) == (kind, num_drafted)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert config.shape.rotary_dim in (None, config.shape.head_dim), "whole heads are rotated"


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name: str) -> None:
    raw, message = REFUSED[name]
    with pytest.raises((UnsupportedModelError, ModelFileError), match=message):
        config_of(raw)


def test_eagle_3_of_specforge_and_speculators() -> None:
    """EAGLE-3's own tests read their files whole."""
    assert is_eagle3({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000})
    assert is_eagle3({"speculators_model_type": "eagle3"})
    assert not is_eagle3(DEEPSPEC)


def test_the_page_names_each_release() -> None:
    rows = re.findall(r"^\| `?([^`|]+?)`? \|", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {*READ, *REFUSED} <= {row.strip() for row in rows}
