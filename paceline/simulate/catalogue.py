"""Known targets: JSON files in `catalogue/`, one for each family; or any config.json by its path.

An entry holds "config" (the keys of its Hugging Face config.json), "shape" (the fields of `shapes.ModelShape`), or
"unavailable", the reason why nothing can be predicted of it.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from paceline.errors import ModelNotFoundError, UnsupportedModelError
from paceline.simulate.files import read_json
from paceline.simulate.hf_config import shape_of
from paceline.simulate.shapes import ModelShape, from_json

FOLDER = Path(__file__).parent / "catalogue"


def entries() -> dict[str, dict[str, Any]]:
    """Name -> entry, family by family; each with its "source" and its "hub" id, which may be None."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(FOLDER.glob("*.json")):
        family = json.loads(file.read_text(encoding="utf-8"))
        for entry in family["models"]:
            hub = f"{family['owner']}/{entry['name']}" if "owner" in family else None
            found[entry["name"]] = told = {"source": family.get("source", ""), "hub": hub, **entry}
            if "config" in entry:
                told["config"] = {**family.get("config", {}), **entry["config"]}
    return found


def all_shapes() -> dict[str, ModelShape]:
    """Every target that can be predicted, by its name."""
    return {name: shape_of_entry(entry) for name, entry in entries().items() if "unavailable" not in entry}


def shape_of_entry(entry: dict[str, Any]) -> ModelShape:
    """Raises UnsupportedModelError with the entry's own reason when its size is not public."""
    if "unavailable" in entry:
        raise UnsupportedModelError(f"{entry['name']}: {entry['unavailable']}")
    if "shape" in entry:
        told = {"name": entry["name"], "source": entry["source"], "note": entry.get("note", "")}
        return from_json({**told, **entry["shape"]})
    return replace(shape_of(entry["config"], entry["name"], entry["source"]), note=entry.get("note", ""))


def find(model: str) -> ModelShape:
    """A catalogue name (case and the owner of a hub id aside), a config.json, a folder with one, or a shape's JSON.

    Raises ModelNotFoundError with the nearest names, UnsupportedModelError when what is found cannot be read.
    """
    path, is_folder = Path(model).expanduser(), os.path.isdir(Path(model).expanduser())
    if path.suffix == ".json" or is_folder:
        return _from_file(path / "config.json" if is_folder else path)
    known, wanted = entries(), model.rpartition("/")[2].lower()
    by_name = {other.lower(): entry for entry in known.values() for other in entry.get("aliases", ())}
    by_name |= {name.lower(): entry for name, entry in known.items()}
    if entry := by_name.get(model.lower()) or by_name.get(wanted):
        return shape_of_entry(entry)
    available = [name for name, entry in known.items() if "unavailable" not in entry]
    near = get_close_matches(wanted, [name.lower() for name in available], n=3, cutoff=0.5)
    shown = ", ".join([name for name in available if name.lower() in near] or available)
    raise ModelNotFoundError(f"no model {model!r} in the catalogue: try {shown}, or give the path of a config.json")


def served_name(model: str) -> str:
    """What a server is told to load: the hub id of a catalogue name, anything else as it is."""
    entry = entries().get(model)
    return str(entry["hub"]) if entry and entry["hub"] else model


def _from_file(file: Path) -> ModelShape:
    remedy = "give a config.json, a folder with one, or a catalogue name"
    config = read_json(file, remedy, ModelNotFoundError, UnsupportedModelError)
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{file} is no JSON object: give the model's config.json")
    if "attention" in config and "dense" in config:
        return from_json({"name": file.stem, "source": str(file), **config})
    return shape_of(config, str(config.get("_name_or_path") or file.parent.name or file.stem), str(file))
