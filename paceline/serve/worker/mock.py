"""`serve --mock`: the production server under a load that no drafter exists for yet.

    engine = mocked_engine(EngineConfig(model="Qwen3-0.6B"), "survival:.77,.57,.42", scratch)

What acceptance is mocked, and models of which there is a config and no weights: those get random ones. Everything else is the
server's own: HTTP, queue, tokenizer, prefill, drafting, verify pass, cache, detokenising. No answer is lossless.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline import hub
from paceline.config import EngineConfig
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
    "give the mean tokens kept a round, such as 4, a survival curve such as .8,.6,.4, or a file: a JSON list of its shares, or "
    "whatever --acceptance of simulate reads; for trees marginals: greedy, sampled, or a JSON file that has some"
)
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


Mock = float | tuple[float, ...] | Marginals


def read_mock(text: str) -> Mock:
    """Tokens a round, a survival curve or marginals, of what a person wrote. Raises ConfigError.

    A number below 1 is none; a curve is written .8,.6,.4 (survival:.8,.6,.4 too), or read from a file: a JSON list, an object
    with a list "survival", or a run, a trace or a log as `paceline simulate --acceptance` takes them. Marginals are those built
    in, or a file: a JSON list of lists, or an object with "marginals".
    """
    path = Path(text).expanduser()
    if text in built_in():
        return read_marginals(text)
    if text and path.exists():
        return _curve_of(path)
    with reraised(ConfigError, f"--mock {text!r} is no number, no curve and no file", REMEDY, ValueError):
        values = [float(part) for part in text.removeprefix(CURVE).split(",")]
    if len(values) == 1 and not text.startswith(CURVE):
        if not (math.isfinite(values[0]) and values[0] >= 1):
            raise ConfigError(f"--mock {text} counts the target's own token of every round, so it is 1 or more: {REMEDY}")
        return values[0]
    return _checked(values)


def _curve_of(path: Path) -> tuple[float, ...] | Marginals:
    if path.suffix == ".json":
        told = read_json(path, REMEDY)
        is_nested = isinstance(told, list) and bool(told) and all(isinstance(own, list) for own in told)
        if is_nested or (isinstance(told, dict) and "marginals" in told):
            return marginals_in(told, f"--mock {path}")
        shares = told.get("survival") if isinstance(told, dict) else told
        if isinstance(shares, list):
            with reraised(ConfigError, f"--mock {path} holds no curve of numbers", REMEDY, TypeError, ValueError):
                return _checked([float(share) for share in shares])
    found = read_acceptance(path)
    return tuple(found.survival(found.depth or 1))


def _checked(shares: list[float]) -> tuple[float, ...]:
    """Raises ConfigError for what is empty, rises, or lies outside 0 to 1."""
    if not shares or not all(0 <= later <= sooner <= 1 for sooner, later in pairwise((1.0, *shares))):  # also NaN
        raise ConfigError(f"--mock: a survival curve has shares that fall, between 1 and 0, not {shares}: {REMEDY}")
    return tuple(shares)


def mocked_engine(engine: EngineConfig, mock: str, scratch: Path) -> EngineConfig:
    """The settings with this acceptance. Where there is only a config the weights are random, and a file or a catalogue's entry
    becomes a folder in `scratch`, called as the model. Raises ConfigError, ModelNotFoundError or UnsupportedModelError."""
    kept, path = read_mock(mock), Path(engine.model).expanduser()
    mocked: dict[str, Any] = {"mocked_survival": kept} if isinstance(kept, tuple) else {"mocked_tokens_per_round": kept}
    if isinstance(kept, Marginals):
        mocked = {"mocked_marginals": kept.chances_KM}
    engine = replace(engine, **mocked)
    if path.is_dir():
        has_weights = any(True for pattern in WEIGHTS for _ in path.glob(pattern))
        return engine if has_weights else replace(engine, weights="random")
    if path.is_file() and path.suffix == ".json":
        config = read_json(path, "give a model's config.json", ModelNotFoundError)
        if not isinstance(config, dict):
            raise UnsupportedModelError(f"{path} is no JSON object: give the model's config.json")
        name = path.absolute().parent.name if path.name == "config.json" else path.stem
        return _with_config(engine, config, scratch / name)
    if path.is_file() or engine.model in hub.BUILTINS or (hub.HUB_ID.fullmatch(engine.model) and engine.weights != "random"):
        return engine
    return _with_config(engine, catalogue.config_of(engine.model), scratch / Path(engine.model).name)


def _with_config(engine: EngineConfig, config: dict[str, Any], folder: Path) -> EngineConfig:
    """The catalogue leaves `architectures` out; without it only Transformers would know the model."""
    by_family = {told["family"]: architecture for architecture, told in FAMILIES.items()}
    if "architectures" not in config and config.get("model_type") in by_family:
        config = {"architectures": [by_family[config["model_type"]]], **config}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return replace(engine, model=str(folder), weights="random")


def mocked_drafter(name: str, model: str, most_kept: float) -> str:
    """The drafter `name` of a mocked server. "default" is what ships for the model, if that is on this machine, else
    random weights of a block drafter's size: the right cost. Raises ConfigError for one that does not draft in every
    round."""
    if name == "default":
        return name if shipped.local(model) else "random-dflash"
    if name == LOOKUP or (name == NONE and most_kept > 1):
        raise ConfigError(
            f"--drafter {name} does not draft in every round, so nothing could be kept as --mock says: leave --drafter out, or "
            "give a checkpoint or random-dflash"
        )
    return name


def check_yield(kept: Mock, num_drafted: int) -> None:
    """Raises ConfigError when a drafter of so many drafts cannot bring what is mocked."""
    kept = kept.survival if isinstance(kept, Marginals) else kept
    most = len(kept) + 1 if isinstance(kept, tuple) else kept
    if most > num_drafted + 1:
        what = f"a curve of {most - 1} drafts" if isinstance(kept, tuple) else f"{kept:g} tokens a round"
        raise ConfigError(
            f"--mock asks for {what}, and the drafter drafts {num_drafted}: ask for less, or raise --num-drafted and the block"
        )
