"""Catalogue of machines (machines.json) and models: JSON files in `catalogue/`, one per family; reads any config.json
too.

An entry holds "config" (the keys of its Hugging Face config.json, in addition to the family's "config"), "shape" (the
fields of `shapes.ModelShape`), or "unavailable", the reason why it cannot be predicted. `model_config.py` reads a
config.json. Its "aliases" are other names: hub ids of models of the same sizes, each with the keys of the config that
differ, and names of the same model, which have no owner.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, ModelNotFoundError, UnsupportedModelError, reraised
from paceline.hardware import Machine
from paceline.simulate.costs.model_config import shape_of
from paceline.simulate.costs.shapes import FORMATS, ModelShape, from_json
from paceline.simulate.files import read_json

if TYPE_CHECKING:
    from paceline.model.gguf.container import GGUFFile

HERE = Path(__file__).parent
_FAMILIES = json.loads((HERE.parents[1] / "model" / "config" / "families.json").read_text(encoding="utf-8"))["families"]
DECODED = frozenset(each["family"] for each in _FAMILIES.values())
"""Values of "model_type" in a config.json that paceline's own decoder runs."""
GGUF_SIZES = {
    "num_hidden_layers": "block_count", "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "max_position_embeddings": "context_length", "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "sliding_window": "attention.sliding_window",
}  # fmt: skip
"""Key of a config.json -> key of a GGUF header, after the name of the model family."""
GGUF_FAMILIES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
"""llama.cpp's name of a model family -> its name in Transformers, where they differ."""


def entries() -> dict[str, dict[str, Any]]:
    """Returns model name -> entry of the model catalogue. An entry has "source", "hub" (hub id), and one of:
    "config" (keys of its config.json), "shape" (fields of ModelShape), "unavailable" (why it cannot be predicted)."""
    models: dict[str, dict[str, Any]] = {}
    for file in sorted((HERE / "catalogue").glob("*.json")):
        family = json.loads(file.read_text(encoding="utf-8"))
        for entry in family["models"]:
            hub = {"hub": f"{family['owner']}/{entry['name']}"} if "owner" in family else {}
            models[entry["name"]] = model = {"source": family.get("source", ""), **hub, **entry}
            if "config" in entry:
                model["config"] = {**family.get("config", {}), **entry["config"]}
    return models


def machines() -> dict[str, Machine]:
    """Returns name -> machine for all known machines, from machines.json, which also has the sources of their
    figures."""
    known = json.loads((HERE / "machines.json").read_text(encoding="utf-8"))["machines"]
    return {entry["name"]: Machine(**entry) for entry in known}


def machine(name: str) -> Machine | None:
    """Returns the known machine with this name, or None. Case, spaces, hyphens, underscores and the maker's name
    "Apple" are ignored. The first word of a name is enough if only one machine's name begins with it: "laptop" finds
    "laptop CPU"."""
    known, wanted = machines(), re.sub(r"[\s_-]", "", name).lower()
    names = {each.replace(" ", "").lower(): each for each in known}
    names |= {each.removeprefix("apple"): full for each, full in names.items()}
    begun = [each for each in known if each.split()[0].lower() == wanted]
    match = names.get(wanted) or (begun[0] if len(begun) == 1 else None)
    return known[match] if match else None


def counted(option: str, written: str) -> tuple[int, str]:
    """Splits "8x H100", "8xH100" or "8 H100" into (8, "H100"); "H100" gives (1, "H100"). Raises ConfigError, which
    names `option`, for 0 machines."""
    match = re.fullmatch(r"([0-9]{1,9})(?:\s*[x×*]\s*|\s+)(\S.*)", written.strip(), re.IGNORECASE)
    if not match:
        return 1, written.strip()
    if int(match[1]) < 1:
        raise ConfigError(f"{option} {written!r}: give at least one machine")
    return int(match[1]), match[2]


def known_machine(option: str, name: str, remedy: str = "as in '8x H100'") -> Machine:
    """Returns the known machine with this name. Raises ConfigError, which names `option` and the known names and ends
    with `remedy`, for an unknown one."""
    if known := machine(name):
        return known
    raise ConfigError(f"{option} {name!r} is not known: choose from {', '.join(machines())}, {remedy}")


def all_shapes() -> dict[str, ModelShape]:
    """Returns model name -> shape for every model that can be predicted."""
    return {name: shape_of_entry(entry) for name, entry in entries().items() if "unavailable" not in entry}


def shape_of_entry(entry: dict[str, Any]) -> ModelShape:
    """Returns the model shape of a catalogue entry. Raises UnsupportedModelError if the entry is "unavailable", with
    its reason."""
    if "unavailable" in entry:
        raise UnsupportedModelError(f"{entry['name']}: {entry['unavailable']}")
    if "shape" in entry:
        common = {"name": entry["name"], "source": entry["source"], "note": entry.get("note", "")}
        return from_json({**common, **entry["shape"]})
    return replace(shape_of(entry["config"], entry["name"], entry["source"]), note=entry.get("note", ""))


def find(model: str) -> ModelShape:
    """Returns a model's shape. `model`: a catalogue name (case and hub owner are ignored), a config.json or its folder,
    a JSON file with the fields of ModelShape, or a GGUF file. Raises ModelNotFoundError for an unknown name or a
    missing file, UnsupportedModelError for a model whose sizes are not public or not in its config, ModelFileError for
    a damaged GGUF file."""
    path = Path(os.path.expanduser(model))
    is_folder = os.path.isdir(path)
    if path.suffix == ".json" or is_folder:
        return _from_file(path / "config.json" if is_folder else path)
    if path.suffix.lower() == ".gguf":
        return _from_gguf(path)
    return shape_of_entry(entry_of(model))


def config_of(model: str) -> dict[str, Any]:
    """Returns the content of the config.json of a catalogue model. Raises ModelNotFoundError for a model that is not in
    the catalogue, UnsupportedModelError if the catalogue has no config.json for it."""
    entry = entry_of(model)
    if "config" not in entry:
        reason = entry.get("unavailable", "the catalogue knows its size and not its config.json")
        raise UnsupportedModelError(f"{entry['name']}: {reason}: give the path of its config.json")
    return entry["config"]


def entry_of(model: str) -> dict[str, Any]:
    """Returns the catalogue entry of a model, as `entries` does; the "config" is that of the model, also if it is an
    alias. `model`: a name, an alias or a hub id; case and hub owner are ignored. Raises ModelNotFoundError for an
    unknown model."""
    known, wanted = entries(), model.rpartition("/")[2].lower()
    if match := _names(known).get(wanted):
        entry, _, changed = match
        return {**entry, "config": {**entry["config"], **changed}} if changed else entry
    available = [name for name, entry in known.items() if "unavailable" not in entry]
    near = get_close_matches(wanted, [name.lower() for name in available], n=3, cutoff=0.5)
    shown = ", ".join([name for name in available if name.lower() in near] or available)
    raise ModelNotFoundError(f"no model {model!r} in the catalogue: try {shown}, or give the path of a config.json")


def _names(known: dict[str, dict[str, Any]]) -> dict[str, tuple[dict[str, Any], str, dict[str, Any]]]:
    """Returns name in lower case, without owner -> (entry, hub id of the model with this name, keys of its config.json
    that differ from the entry's)."""
    rows = [
        (other, entry, other if "/" in other else entry["hub"], changed)
        for entry in known.values()
        for other, changed in {**entry.get("aliases", {}), entry["hub"]: {}, entry["name"]: {}}.items()
    ]
    return {name.rpartition("/")[2].lower(): (entry, hub, changed) for name, entry, hub, changed in rows}


def has_decoder(model: str) -> bool:
    """True if paceline's own decoder can run the model with this catalogue name. A name that is not in the catalogue
    also gives True, because nothing is known about its model."""
    entry = entries().get(model)
    config = {} if entry is None else entry.get("config", {})
    return entry is None or (config.get("model_type") in DECODED and not config.get("enable_moe_block"))


def served_name(model: str) -> str:
    """Returns the model name for a server's command line: the hub id of a model in the catalogue. An unknown model, or
    a hub id of another owner, such as a quantised copy, is returned unchanged."""
    _, hub, _ = _names(entries()).get(model.rpartition("/")[2].lower(), (None, model, None))
    return hub if "/" not in model or model.lower() == hub.lower() else model


def _from_file(file: Path) -> ModelShape:
    remedy = "give a config.json, a folder with one, or a catalogue name"
    config = read_json(file, remedy, ModelNotFoundError, UnsupportedModelError)
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{file} is no JSON object: give the model's config.json")
    if "attention" in config and "dense" in config:
        return from_json({"name": file.stem, "source": str(file), **config})
    return shape_of(config, str(config.get("_name_or_path") or file.parent.name or file.stem), str(file))


def _from_gguf(file: Path) -> ModelShape:
    """Reads the header of a GGUF file, or of all parts of a split one; weights get the format with the nearest mean
    bytes per weight."""
    if not file.is_file():
        raise ModelNotFoundError(f"there is no file {file}: check the path")
    from paceline.model.gguf.container import open_gguf  # here, since it needs NumPy and the package gguf

    opened = open_gguf(file)
    with reraised(UnsupportedModelError, f"{file} lacks a part of a model", "give the model's config.json", KeyError):
        config = _gguf_config(opened)
    stored = opened.tensors.values()
    num_bytes = sum(each.num_bytes for each in stored) / sum(math.prod(each.shape) for each in stored)
    nearest = min(FORMATS, key=lambda name: abs(FORMATS[name].num_bytes - num_bytes))
    shape = shape_of(config, file.stem, f"the header of {file.name}")
    return replace(shape, precisions=replace(shape.precisions, weights=nearest, experts=nearest))


def _gguf_config(file: GGUFFile) -> dict[str, Any]:
    metadata, tensors = file.metadata, file.tensors
    arch = metadata["general.architecture"]
    if arch == "gemma4":
        raise UnsupportedModelError(
            "GGUF headers of Gemma 4, whose layers differ, are not read: give the model's config.json"
        )
    sizes = {name: metadata.get(f"{arch}.{key}") for name, key in GGUF_SIZES.items()}
    config = {name: value for name, value in sizes.items() if isinstance(value, int) and value}
    vocab_size = tensors["token_embd.weight"].shape[0]
    config |= {"vocab_size": vocab_size, "tie_word_embeddings": "output.weight" not in tensors}
    return {"model_type": GGUF_FAMILIES.get(arch, arch), **config}
