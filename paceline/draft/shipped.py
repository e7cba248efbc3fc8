"""Finds the drafters that ship with paceline, by their target's name. Their weights are a separate Python package.

`find(name)` searches in this order:

    installed    the distribution `paceline-drafters`, import package paceline_drafters
    checkout     drafters/ next to the package, if paceline runs from a checkout (an editable installation)
    hub          the repository REPO, downloaded into the cache; every file is checked by its SHA-256 in `shipped.json`

`local(name)` searches without a network. A missing drafter is an error that names the command to install it; `default`
(`draft/registry.py`) prints that error once and drafts by prompt lookup.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

from paceline import hub
from paceline.errors import CacheError, DownloadError
from paceline.hub import HubFile

DISTRIBUTION = "paceline_drafters"
"""Name of the Python package with the drafters; it has one folder per target."""
CHECKOUT = Path(__file__).parents[2] / "drafters" / DISTRIBUTION
"""Path of the same folders in a source checkout of paceline."""
REPO = "paceline/drafters"
INSTALL = "run `pip install ./drafters` in a checkout of paceline"
TABLE = Path(__file__).with_name("shipped.json")
SHIPPED: dict[str, dict[str, dict[str, Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))
"""For each target name: file name -> its size (num_bytes) and sha256."""


def local(name: str) -> Path | None:
    """Returns the folder of the drafter that ships for the built-in model `name`; None if none ships or it is not on
    this machine. Uses no network."""
    if name not in SHIPPED:
        return None
    cached = hub.fetched_folder(name, _files(name))
    candidates = [each for each in (_installed(), CHECKOUT) if each is not None]
    return next((each / name for each in candidates if (each / name / "config.json").is_file()), cached)


def find(name: str) -> Path:
    """Returns the folder of the drafter that ships for the built-in model `name`, a key of SHIPPED; downloads it if
    necessary. Raises DownloadError or CacheError if the download fails; the message has the command that installs the
    drafter."""
    if (folder := local(name)) is not None:
        return folder
    try:
        return hub.fetch_folder(name, _files(name))
    except (DownloadError, CacheError) as error:
        raise type(error)(
            f"the drafter of {name} is not installed, and the hub does not give it ({error}): {INSTALL}"
        ) from error


@functools.cache
def find_or_report(name: str) -> Path | None:
    """Returns the folder of the drafter that ships for `name`, as `find` does; if the download fails, prints the error
    and returns None. Results are cached: later calls with the same name neither print nor try again."""
    try:
        return find(name)
    except (DownloadError, CacheError) as error:
        hub.notice(f"{error}; until then lookups (ngram) draft for {name}")
        return None


def _installed() -> Path | None:
    spec = importlib.util.find_spec(DISTRIBUTION)
    return Path(spec.origin).parent if spec and spec.origin else None


def _files(name: str) -> tuple[HubFile, ...]:
    return tuple(HubFile(REPO, f"{name}/{file}", **expected) for file, expected in SHIPPED[name].items())
