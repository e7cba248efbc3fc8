"""`serve --mock`: load tests of the server with mocked acceptance, before a drafter is trained.

    engine = mocked_engine(EngineConfig(model="Qwen3-0.6B"), "survival:.77,.57,.42", scratch)

Models with a config but without weights get random weights. Everything else is real: HTTP, queue, tokenizer, prefill,
drafting, verification, cache, detokenisation. No answer is lossless.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline import hub
from paceline.config import EngineConfig, short_name
from paceline.draft import shipped
from paceline.errors import ConfigError, ModelNotFoundError, UnsupportedModelError, reraised
from paceline.model.config.decoder import FAMILIES
from paceline.plan.marginals import Marginals
from paceline.simulate.costs import catalogue
from paceline.simulate.files import read_json
from paceline.simulate.marginals import built_in, marginals_in, read_marginals
from paceline.simulate.speedup import read_acceptance
from paceline.types import LOOKUP, NONE

CURVE = "survival:"
REMEDY = (
    "give the mean tokens kept a round, such as 4, a survival curve such as .8,.6,.4, or a file: a JSON list of its "
    "shares, or "
    "whatever --acceptance of simulate reads; for trees marginals: greedy, sampled, or a JSON file that has some"
)
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
Mock = float | tuple[float, ...] | Marginals
"""Mocked acceptance: tokens per round; a survival curve (shares of rounds whose first 1, 2, ... drafts are accepted);
or marginals (acceptance by draft position and candidate rank)."""


def read_mock(text: str) -> Mock:
    """Parse the text of `serve --mock`, which sets how many drafts the mocked verification accepts. It is one of these:

    - A number, 1 or more: mean tokens per round, bonus token included.
    - A survival curve, the shares of rounds whose first 1, 2, ... drafts are accepted. It is written as .8,.6,.4 or
      survival:.8,.6,.4, or read from a file: a JSON list, alone or under the key "survival", or any other file that
      `paceline simulate --acceptance` reads.
    - Marginals, the acceptance by draft position and candidate rank. They are the built-in tables "greedy" and
      "sampled", or read from a JSON file: a list of lists, alone or under the key "marginals".

    Raises ConfigError for all other texts.
    """
    path = Path(os.path.expanduser(text))
    if text in built_in():
        return read_marginals(text)
    if text and os.path.exists(path):  # pathlib's raises for a name that is too long
        return _curve_of(path)
    with reraised(ConfigError, f"--mock {text!r} is no number, no curve and no file", REMEDY, ValueError):
        values = [float(part) for part in text.removeprefix(CURVE).split(",")]
    if len(values) == 1 and not text.startswith(CURVE):
        if not (math.isfinite(values[0]) and values[0] >= 1):
            raise ConfigError(
                f"--mock {text} counts the target's own token of every round, so it is 1 or more: {REMEDY}"
            )
        return values[0]
    return _checked(values)


def _curve_of(path: Path) -> tuple[float, ...] | Marginals:
    """Read a survival curve or marginals from a file. Raises ConfigError."""
    if path.suffix == ".json":
        content = read_json(path, REMEDY)
        is_nested = isinstance(content, list) and bool(content) and all(isinstance(row, list) for row in content)
        if is_nested or (isinstance(content, dict) and "marginals" in content):
            return marginals_in(content, f"--mock {path}")
        shares = content.get("survival") if isinstance(content, dict) else content
        if isinstance(shares, list):
            with reraised(ConfigError, f"--mock {path} holds no curve of numbers", REMEDY, TypeError, ValueError):
                return _checked([float(share) for share in shares])
    acceptance = read_acceptance(path)
    return tuple(acceptance.survival(acceptance.depth or 1))


def _checked(shares: list[float]) -> tuple[float, ...]:
    """Return the curve. Raises ConfigError if it is empty, rises, or leaves the range 0 to 1."""
    if not shares or not all(0 <= later <= sooner <= 1 for sooner, later in pairwise((1.0, *shares))):  # also NaN
        raise ConfigError(f"--mock: a survival curve has shares that fall, between 1 and 0, not {shares}: {REMEDY}")
    return tuple(shares)


def mocked_engine(engine: EngineConfig, mock: str, scratch: Path) -> EngineConfig:
    """Return the configuration `engine` with mocked acceptance. `mock`: the text of --mock, see `read_mock`. Also sets
    random weights for a model that is only a config. The field `model` of `engine` can be:

    - A folder: random weights if it contains no weights.
    - A JSON file: random weights; the file is the model's config.json.
    - Another file, a built-in model, or a hub id: weights unchanged.
    - Another name, or a hub id if `engine` already has random weights: random weights, and the config from the
      catalogue (`paceline simulate --list`).

    The config of a JSON file or of the catalogue is written to a folder in `scratch`. Raises ConfigError if `mock` or
    the config is invalid, ModelNotFoundError if the model is not found, UnsupportedModelError if its config is not a
    JSON object or the catalogue does not have it.
    """
    acceptance, path = read_mock(mock), Path(os.path.expanduser(engine.model))
    if isinstance(acceptance, Marginals):
        engine = replace(engine, mocked_marginals=acceptance.chances_KM)
    elif isinstance(acceptance, tuple):
        engine = replace(engine, mocked_survival=acceptance)
    else:
        engine = replace(engine, mocked_tokens_per_round=acceptance)
    if os.path.isdir(path):
        has_weights = any(True for pattern in WEIGHTS for _ in path.glob(pattern))
        return engine if has_weights else replace(engine, weights="random")
    if os.path.isfile(path) and path.suffix == ".json":
        config = read_json(path, "give a model's config.json", ModelNotFoundError)
        if not isinstance(config, dict):
            raise UnsupportedModelError(f"{path} is no JSON object: give the model's config.json")
        name = short_name(str(path.parent)) if path.name == "config.json" else path.stem
        return _with_config(engine, config, scratch / name)
    is_hub_id = hub.HUB_ID.fullmatch(engine.model) and engine.weights != "random"
    if os.path.isfile(path) or engine.model in hub.BUILTINS or is_hub_id:
        return engine
    return _with_config(engine, catalogue.config_of(engine.model), scratch / Path(engine.model).name)


def _with_config(engine: EngineConfig, config: dict[str, Any], folder: Path) -> EngineConfig:
    """Write the config to `folder`, with `architectures`, which the catalogue omits; returns settings for random
    weights."""
    by_family = {entry["family"]: architecture for architecture, entry in FAMILIES.items()}
    if "architectures" not in config and config.get("model_type") in by_family:
        config = {"architectures": [by_family[config["model_type"]]], **config}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return replace(engine, model=str(folder), weights="random")


def mocked_drafter(name: str, model: str, most_accepted: float) -> str:
    """Return the name of the drafter to load with mocked acceptance, normally `name` itself. For the name "default", if
    no drafter shipped for `model` is installed, it is "random-dflash", a drafter with random weights. It is good
    enough, because mocked acceptance ignores which tokens are drafted.

    Raises ConfigError for a drafter with too few drafts: "ngram", which does not draft in every round, and "none" if
    `most_accepted` is above 1. `most_accepted`: maximum tokens per round of the mocked acceptance, bonus token
    included.
    """
    if name == "default":
        return name if shipped.local(model) else "random-dflash"
    if name == LOOKUP or (name == NONE and most_accepted > 1):
        raise ConfigError(
            f"--drafter {name} does not draft in every round, so nothing could be kept as --mock says: leave --drafter "
            "out, or give a checkpoint or random-dflash"
        )
    return name


def check_yield(mock: Mock, num_drafted: int) -> None:
    """Raises ConfigError if the mocked acceptance needs more drafts per round than the drafter makes
    (`num_drafted`)."""
    mock = mock.survival if isinstance(mock, Marginals) else mock
    most = len(mock) + 1 if isinstance(mock, tuple) else mock
    if most > num_drafted + 1:
        what = f"a curve of {most - 1} drafts" if isinstance(mock, tuple) else f"{mock:g} tokens a round"
        raise ConfigError(
            f"--mock asks for {what}, and the drafter drafts {num_drafted}: ask for less, or raise --num-drafted and "
            "the block"
        )
