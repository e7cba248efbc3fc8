"""Adapts the config.json of other trainers to z-lab's keys, and refuses networks that would load, but draft badly
without an error.

    DeepSpec     Qwen3DSparkModel: DSpark with all keys at the top level; position 0 drafts; a Qwen3.5 target's
                 config is copied in, but the drafter rotates whole heads and has no gates
    SpecForge    dflash_config.projector_type names the kind; attention_mode "mla" and experts are other networks
    LiquidAI     Lfm2DSparkDraftModel: rotates neighbouring channels (rope_is_neox_style false)

Taken in July to September 2026 from the configs in tests and documentation of programs that load these drafters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import UnsupportedModelError
from paceline.model.config.decoder import short

DEEPSPEC = "Qwen3DSparkModel"
"""Architecture of DSpark drafters in DeepSpec's files."""
INHERITED = ("partial_rotary_factor", "mrope_interleaved", "mrope_section", "num_experts")
"""Keys that DeepSpec's configs copy from the target, and that do not describe the drafter."""
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_mode": ("gqa", "mha"),
    "n_routed_experts": (0,),
    "num_experts": (0,),
    "rope_is_neox_style": (True,),
    "enable_qwen35_gated_q_proj": (False,),
}
"""Key -> values that are supported; any other value means another network."""


def unpacked(raw: dict[str, Any], architecture: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a config.json (`raw`) from DeepSpec's format to z-lab's; returns a config in another format unchanged.
    `architecture`: architecture name in the result. `defaults`: values for keys that DeepSpec's format does not
    have."""
    names = raw.get("architectures")
    if not isinstance(names, list) or DEEPSPEC not in names:
        return raw
    own = {name: value for name, value in raw.items() if name not in INHERITED and value is not None}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := own.get(key), dict):
            own[key] = {name: value for name, value in rope.items() if name not in INHERITED}
    return {**defaults, "sample_from_anchor": True, **own, "architectures": [architecture], "model_type": "qwen3"}


def refuse_other_networks(own: Mapping[str, Any], projectors: Mapping[str, str], path: Path) -> None:
    """Raises UnsupportedModelError if a config describes a network that paceline would load without error, but run
    wrongly, such as one with MLA attention or experts.

    `own`: config.json, with the keys of its dflash_config at the top level. `projectors`: architecture -> the only
    supported value of the key `projector_type`. `path`: the config's name in the error message.
    """
    names = own.get("architectures") or [*projectors][:1]
    expected = next((projectors[name] for name in names if name in projectors), None)
    known = {**SUPPORTED, **({} if expected is None else {"projector_type": (expected,)})}
    for name, values in known.items():
        value = own.get(name)
        if value is not None and value not in values:
            raise UnsupportedModelError(
                f"{path}: a drafter with {name} {short(value)} is not implemented: {names[0]} is read with "
                f"{' or '.join(map(str, values))}"
            )
