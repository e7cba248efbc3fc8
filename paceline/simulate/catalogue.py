"""Known targets: JSON files in `catalogue/`, one for each family; or any config.json by its path.

An entry holds "config" (the keys of its Hugging Face config.json), "shape" (as `shapes.as_json` writes one), or "unavailable",
the reason why nothing can be predicted of it.
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
    """Name -> entry, family by family."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(FOLDER.glob("*.json")):
        family = json.loads(file.read_text(encoding="utf-8"))
        for entry in family["models"]:
            shared = {**family.get("config", {}), **entry["config"]} if "config" in entry else None
            told = {"source": family.get("source", ""), "hub": _hub_id(family, entry), **entry}
            found[entry["name"]] = told | ({"config": shared} if shared else {})
    return found


def _hub_id(family: dict[str, Any], entry: dict[str, Any]) -> str | None:
    return f"{family['owner']}/{entry['name']}" if "owner" in family else None


def names() -> list[str]:
    """Targets that can be predicted."""
    return [name for name, entry in entries().items() if "unavailable" not in entry]


def all_shapes() -> dict[str, ModelShape]:
    """Every available target, resolved."""
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
    known = {name.lower(): entry for name, entry in entries().items()}
    entry = known.get(model.lower()) or known.get(model.rpartition("/")[2].lower()) or _named(model, known)
    if entry is None:
        raise ModelNotFoundError(_not_found(model, known))
    return shape_of_entry(entry)


def _named(model: str, known: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """By another name of it, such as the hub's."""
    wanted = model.rpartition("/")[2].lower()
    return next((entry for entry in known.values() if wanted in [name.lower() for name in entry.get("aliases", ())]), None)


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


def _not_found(model: str, known: dict[str, dict[str, Any]]) -> str:
    available = [entry["name"] for entry in known.values() if "unavailable" not in entry]
    near = get_close_matches(model.rpartition("/")[2].lower(), [name.lower() for name in available], n=3, cutoff=0.5)
    shown = [name for name in available if name.lower() in near] or available
    return f"no model {model!r} in the catalogue: try {', '.join(shown)}, or give the path of a config.json"
