"""Shape of a target model: parameters by part, attention by kind of layer, and the number format of each.

Shapes come from the catalogue or from any Hugging Face config.json (`catalogue.py`, `model_config.py`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.errors import ConfigError, UnsupportedModelError, reraised
from paceline.simulate.files import built, check_amounts

KINDS = ("gqa", "mla", "linear")
PARTS = ("weights", "experts", "attention", "kv", "indexer")


@dataclass(frozen=True, slots=True)
class Format:
    """A number format of weights, activations or cache entries, and the formats in which machines can compute with
    it."""

    num_bytes: float
    """Bytes of one value, including its share of the scales."""
    computes_as: tuple[str, ...]
    """Keys of `hardware.Machine.flops_per_s` that can compute with it, the fastest first."""


_TABLES = json.loads((Path(__file__).parent / "formats.json").read_text(encoding="utf-8"))
FORMATS = {name: Format(entry["num_bytes"], tuple(entry["computes_as"])) for name, entry in _TABLES["formats"].items()}
SHORT: dict[str, str] = _TABLES["short"]


def format_named(name: str) -> str:
    """Returns the full name of a number format; also accepts a short name (bf16, fp8, mxfp4). Raises ConfigError for an
    unknown name."""
    full = SHORT.get(name.strip().lower(), name.strip().lower())
    if full not in FORMATS:
        raise ConfigError(f"precision {name!r} is not known: choose from {', '.join(FORMATS)}")
    return full


def num_bytes(name: str) -> float:
    return FORMATS[name].num_bytes


def arithmetic(name: str, flops_per_s: dict[str, float]) -> str:
    """Returns the number format in which a machine computes with values that are stored in the format `name`: the
    fastest possible one. `flops_per_s`: FLOP/s by format, for the formats that the machine supports. Raises ConfigError
    if none of them can compute with such values."""
    for rate in FORMATS[name].computes_as:
        if flops_per_s.get(rate):
            return rate
    raise ConfigError(
        f"this machine has no known arithmetic rate for {name}: it needs one of {', '.join(FORMATS[name].computes_as)}"
    )


@dataclass(frozen=True, slots=True)
class Precisions:
    """Number format (bfloat16, float8, ...) of each part of a model."""

    weights: str = "bfloat16"
    """Number format of all weights except experts: projections, head and others."""
    experts: str = "bfloat16"
    attention: str = "bfloat16"
    """Number format in which attention is computed."""
    kv: str = "bfloat16"
    """Number format of cache entries (keys and values)."""
    indexer: str = "float8"
    """Number format of the indexer's arithmetic and cache; it selects the positions that sparse attention reads."""


def read_precisions(content: Any) -> Precisions:
    """Builds number formats from a JSON object. Raises TypeError for other keys than the fields of Precisions, and
    ValueError for an unknown format."""
    precisions = Precisions(**content)
    unknown = [name for name in asdict(precisions).values() if not isinstance(name, str) or name not in FORMATS]
    if unknown:
        raise ValueError(f"precision {unknown[0]!r:.40} is not known")
    return precisions


def with_precisions(known: Precisions, text: str | None) -> Precisions:
    """Returns the number formats `known`, changed by `text`: "fp8" (weights and experts), or by part, such as
    "weights=fp8,experts=fp4,kv=fp8"; None changes nothing. Raises ConfigError for an unknown part or format."""
    changed: dict[str, str] = {}
    for word in (text or "").split(","):
        part, equals, name = word.partition("=")
        if not word.strip():
            continue
        if not equals:
            changed |= {"weights": format_named(part), "experts": format_named(part)}
        elif part.strip() in PARTS:
            changed[part.strip()] = format_named(name)
        else:
            raise ConfigError(
                f"--precision {part.strip()!r} is no part: choose from {', '.join(PARTS)}, as in weights=fp8,kv=fp8"
            )
    if text and not changed:
        raise ConfigError(f"--precision {text!r} names no format: write fp8, or weights=fp8,kv=fp8")
    return replace(known, **changed)


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention sizes of a group of `layers` equal layers; all other sizes are those of one layer."""

    kind: Literal["gqa", "mla", "linear"]
    layers: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    latent: int = 0
    """Only mla: width of the compressed key and value."""
    rope: int = 0
    """Only mla: width of the rotary part of a key."""
    window: int | None = None
    """Maximum positions that a query reads; None: all. With `ratio`: the positions it reads uncompressed."""
    ratio: int | None = None
    """Only mla: positions per entry of the compressed history; None if there is no such history."""
    topk: int | None = None
    """Only mla: maximum history entries that a query reads, selected by the indexer; None: all."""
    indexer_heads: int = 0
    indexer_dim: int = 0
    shared: int = 0
    """Only gqa: 1 if these layers read the cache entries of earlier layers and store none; 0: they store their own."""
    state_bytes: float = 0.0
    """Only linear: bytes of one sequence's state in one layer, read and rewritten in each pass; there is no cache."""

    @property
    def entry_values(self) -> int:
        """Number of values in the cache entry of one token in one layer: keys and values of all key heads or, for mla,
        the compressed key and value and the rotary key."""
        return self.latent + self.rope if self.kind == "mla" else 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Experts:
    """Number of experts per layer and their parameters in a mixture-of-experts model. Parameters are summed over all
    layers with experts, which are assumed to be alike."""

    num_routed: int
    per_token: int
    active: float
    """Parameters used for a token: `per_token` routed experts and the shared ones."""
    resident: float
    """Parameters in memory: all routed experts and the shared ones."""

    @property
    def each(self) -> float:
        """Parameters of one routed expert, summed over all layers."""
        return (self.resident - self.active) / (self.num_routed - self.per_token)

    @property
    def shared(self) -> float:
        """Parameters of the shared experts, which every token uses, summed over all layers."""
        return self.active - self.per_token * self.each


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a target model that determine its costs."""

    name: str
    num_layers: int
    hidden_size: int
    dense: float
    """Parameters outside the experts that are used for every token, including the head."""
    attention: tuple[Attention, ...]
    precisions: Precisions
    experts: Experts | None = None
    embedding: float = 0.0
    """Parameters of the embedding table; 0 if it is shared with the head."""
    vocab_size: int = 0
    max_context: int = 0
    """Maximum context in tokens; 0 if unknown."""
    source: str = ""
    note: str = ""

    @property
    def num_parameters(self) -> float:
        return self.dense + self.embedding + (self.experts.resident if self.experts else 0.0)

    @property
    def num_active(self) -> float:
        """Number of parameters used for one token: those outside the experts, and those of the token's experts."""
        return self.dense + (self.experts.active if self.experts else 0.0)


def _check(shape: ModelShape) -> None:
    """Raises ValueError for invalid sizes."""
    for record in (shape, *shape.attention, *([shape.experts] if shape.experts else [])):
        check_amounts(record)
    experts = shape.experts
    if experts and not (0 < experts.per_token < experts.num_routed and experts.active < experts.resident):
        raise ValueError("experts must have 0 < per_token < num_routed and active < resident")
    if shape.dense == 0 or sum(group.layers for group in shape.attention) != shape.num_layers:
        raise ValueError("dense must be above 0, and the attention groups must have num_layers layers together")
    for group in shape.attention:
        if group.kind not in KINDS or (group.ratio is not None and group.ratio < 1):
            raise ValueError(
                f"attention kind {group.kind!r} with ratio {group.ratio!r}: choose from {', '.join(KINDS)}"
            )


def from_json(entry: dict[str, Any]) -> ModelShape:
    """Builds a shape from a JSON object with the fields of ModelShape. Raises UnsupportedModelError for unknown,
    missing or invalid fields."""
    what = f"{entry.get('name', 'a shape')}: the entry cannot be read"
    remedy = "see docs/explanation/prediction.md for its fields"
    with reraised(UnsupportedModelError, what, remedy, KeyError, TypeError, ValueError, AttributeError):
        precisions = Precisions(**{part: format_named(name) for part, name in entry.get("precisions", {}).items()})
        experts = built(Experts, entry["experts"]) if entry.get("experts") else None
        groups = tuple(built(Attention, group) for group in entry["attention"])
        shape = built(ModelShape, {**entry, "precisions": precisions, "experts": experts, "attention": groups})
        _check(shape)
    return shape
