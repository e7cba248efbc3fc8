"""How trainers other than z-lab's package drafters of the DFlash family: read where it is only another spelling, and
refused where the network is another one, which would draft badly without an error.

    DeepSpec     Qwen3DSparkModel: DSpark with all keys at the top level; slot 0 drafts; the rest of a Qwen3.5 target's
                 config is copied in, but the drafter rotates whole heads and has no gates
    SpecForge    dflash_config.projector_type names the kind; attention_mode "mla" and experts are other networks
    LiquidAI     Lfm2DSparkDraftModel: rotates neighbouring channels (rope_is_neox_style false)

Facts of 2026-07 to 09, from the configs that programs which read them have in their tests and documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import UnsupportedModelError
from paceline.model.config.decoder import short

DEEPSPEC = "Qwen3DSparkModel"
"""Architecture of DSpark drafters in DeepSpec's files."""
INHERITED = ("partial_rotary_factor", "mrope_interleaved", "mrope_section")
"""Keys that DeepSpec's configs copy from the target, and that do not describe the drafter."""
KNOWN: dict[str, tuple[Any, ...]] = {
    "attention_mode": ("gqa", "mha"),
    "n_routed_experts": (0,),
    "num_experts": (0,),
    "rope_is_neox_style": (True,),
    "enable_qwen35_gated_q_proj": (False,),
}
"""Keys that say that the network is another one, unless they have one of these values."""


def unpacked(raw: dict[str, Any], architecture: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json of DeepSpec with z-lab's keys; any other unchanged. `architecture`: the name that the
    result has; `defaults`: values of keys that it lacks."""
    if DEEPSPEC not in (raw.get("architectures") or []):
        return raw
    own = {name: value for name, value in raw.items() if name not in INHERITED}
    rope = own.get("rope_parameters")
    if isinstance(rope, dict):
        own["rope_parameters"] = {name: value for name, value in rope.items() if name not in INHERITED}
    return {**defaults, "sample_from_anchor": True, **own, "architectures": [architecture], "model_type": "qwen3"}


def refuse_other_networks(own: Mapping[str, Any], projectors: Mapping[str, str], path: Path) -> None:
    """Raises UnsupportedModelError if a key says that the network is another one than the architecture's. `own`:
    config.json with the keys of dflash_config; `projectors`: architecture -> its projector_type."""
    names = own.get("architectures") or [*projectors][:1]
    expected = next((projectors[name] for name in names if name in projectors), None)
    known = {**KNOWN, **({} if expected is None else {"projector_type": (expected,)})}
    for name, values in known.items():
        value = own.get(name)
        if value is not None and value not in values:
            raise UnsupportedModelError(
                f"{path}: a drafter with {name} {short(value)} is not implemented: {names[0]} is read with "
                f"{' or '.join(map(str, values))}"
            )
