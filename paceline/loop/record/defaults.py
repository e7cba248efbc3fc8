"""Finds the sampling settings that a server applies to fields which a request leaves out.

vLLM (`--generation-config auto`) and SGLang (`--sampling-defaults model`) take them from the model's
generation_config.json, field by field; otherwise they are neutral: temperature 1, no filter.
"""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ConfigError, SamplingError
from paceline.model.adapter import base_of
from paceline.model.checkpoint import read_json
from paceline.sampling import SamplingParams

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields with a default in both engines."""


def defaults_of(given: str, model: Path) -> dict[str, float] | None:
    """Returns the values that the recorded server uses for sampling fields which a request leaves out, as name ->
    value. A field that is not in the dict is neutral (temperature 1, no filter). Returns None if the values are
    unknown.

    `given`: the setting `RecordConfig.sampling_defaults`, one of

    - "none": the values are unknown; returns None;
    - "engine": all fields are neutral; returns {};
    - "model": reads generation_config.json in the folder `model`. Without this file returns {} if the folder contains
      config.json, else None (as for a GGUF file);
    - values, such as "temperature=0.6,top_k=20": returns these.

    Raises ConfigError for invalid values, ModelFileError for a damaged file."""
    if given == "none":
        return None
    if given == "engine":
        return {}
    if given != "model":
        return _checked(_parsed(given), "--sampling-defaults")
    model = base_of(model)
    file = model / "generation_config.json"
    if not file.is_file():
        return {} if (model / "config.json").is_file() else None
    config = read_json(file)
    return _checked({name: config[name] for name in FIELDS if config.get(name) is not None}, str(file))


def described(defaults: dict[str, float] | None) -> str:
    """Returns the server's default sampling settings as text, such as "temperature 0.6, top_p 0.95". `defaults`: name
    -> value; None if they are unknown."""
    if defaults is None:
        return "unknown sampling, as the server's defaults are (--sampling-defaults)"
    return ", ".join(f"{name} {value:g}" for name, value in ({"temperature": 1.0} | defaults).items())


def _parsed(text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for pair in text.split(","):
        name, _, number = pair.partition("=")
        try:
            values[name.strip()] = float(number)
        except ValueError:
            name = ""
        if name.strip() not in FIELDS:
            raise ConfigError(
                f"--sampling-defaults {text!r:.80}: write model, engine, none, or values such as "
                f"temperature=0.6,top_p=0.95,top_k=20 (of {', '.join(FIELDS)})"
            )
    return values


def _checked(values: dict[str, float], source: str) -> dict[str, float]:
    """Returns the values. Raises ConfigError naming `source` if one is impossible."""
    advice = "correct it, or give --sampling-defaults"
    if wrong := next((name for name, value in values.items() if type(value) not in (int, float)), None):
        raise ConfigError(f"{source}: {wrong} must be a number, not {values[wrong]!r:.40}: {advice}")
    try:
        if "top_k" in values:
            values["top_k"] = max(int(values["top_k"]), 0)  # -1 keeps all tokens, too
        SamplingParams(**values)  # pyright: ignore[reportArgumentType]
    except (SamplingError, ValueError, OverflowError) as error:
        raise ConfigError(f"{source}: {error}: {advice}") from error
    return values
