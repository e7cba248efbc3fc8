"""Decides whether a run may resume: its settings must be the same, or extended.

More prompts, a higher limit, more self-written prompts, more temperatures or more samples add conversations. Any other
change would alter existing answers, so it is rejected with a list of the differences.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from paceline.errors import ConfigError, reraised
from paceline.model.adapter import MARK, identity_of
from paceline.model.backends import settle
from paceline.model.checkpoint import read_json
from paceline.runs.folder import RunFolder, plain
from paceline.runs.ranks import Ranks
from paceline.train.config import RegenerateConfig, TrainConfig
from paceline.train.learn.checkpoint import check_same


def identity(config: RegenerateConfig, engine: EngineConfig, ranks: Ranks) -> dict[str, Any]:
    """Returns the settings (name -> value) that determine the answers: target, prompts and sampling. A resumed run must
    repeat them; it may only add prompts, temperatures or samples. `engine`: the target's engine settings. `ranks`: the
    run's processes. If the target writes the prompts, the number of processes is one of the settings, since each
    process writes its own prompts."""
    prompts, engine = config.prompting, settle(engine)
    settings = {
        "target": identity_of(engine.model),
        "weights": engine.weights,
        "dtype": engine.dtype,
        **asdict(replace(prompts, self_written=prompts.num_self_written)),
        **{name: value for name, value in asdict(config.answering).items() if value not in (None, ())},
    }
    del settings["strict"]
    for name, usual in (("samples", 1), ("top_k", 0), ("raw", False), ("tags", ())):
        if settings[name] == usual:
            del settings[name]  # runs of earlier versions do not have it
    if prompts.num_self_written:
        settings["processes"] = ranks.world  # each writes prompts of its own
    return plain(settings)


def check_same_training(config: TrainConfig) -> None:
    """Checks that the run in `config.out` can be resumed with `config`. Raises ConfigError if the run has a checkpoint
    and began with another target, `init` (drafter to continue) or `max_len`. Only settings that the run has stored are
    compared; a `max_len` of None fits any. Before the first checkpoint these settings may change, but not from or to a
    target that is an adapter (fine-tuned weights on a base model)."""
    file, has_steps = config.out / "config.json", any((config.out / "checkpoints").glob("step-*"))
    stored = read_json(file) if file.is_file() else {}
    now = {"init": config.init, "max_len": stored.get("max_len") if config.max_len is None else config.max_len}
    if config.scale == "default":  # the target of a tiny run is in its own folder
        now["target"] = identity_of(config.target.model)
    for name, value in now.items():
        before, option = stored.get(name, value), f"--{name.replace('_', '-')}"
        if before != value and (has_steps or MARK in f"{before}{value}"):
            raise ConfigError(
                f"{config.out} was begun with {option} {before or 'none'}, not {value or 'none'}: choose another --out"
            )


def check_same_run(out: Path, kind: str, settings: dict[str, Any]) -> bool:
    """Checks that the run in the folder `out` can be resumed with `settings`. Returns True if they extend the run's
    stored settings, for example by more prompts. Returns False if they equal these, or if the folder has no run.
    `kind`: the run's type, such as "regenerate". Raises ConfigError for a run of another type, or for any other
    difference, which the message names."""
    file = out / "config.json"
    if not file.is_file():
        return False
    with reraised(ConfigError, f"{file} cannot be read", "choose another --out", OSError, ValueError, AttributeError):
        config = json.loads(file.read_text(encoding="utf-8"))
        what, before = config.get("what"), config.get(kind)
    if what != kind or not isinstance(before, dict) or not before:
        raise ConfigError(f"{out} is the folder of another run ({what}): choose another --out")
    grown = {name: settings.get(name) for name, grows in GROWS.items() if grows(before.get(name), settings.get(name))}
    if "self_written" in grown and "processes" not in before:
        grown["processes"] = settings["processes"]
    check_same(out, before | grown, settings)
    return bool(grown)


def opened_run(out: Path, kind: str, settings: dict[str, Any]) -> RunFolder:
    """Opens the run in the folder `out`, or creates one of type `kind`. Raises ConfigError if the run is of another
    type, or cannot be resumed with these settings (see `check_same_run`)."""
    if (out / "config.json").is_file():
        check_same_run(out, kind, settings)
    else:
        RunFolder.create(kind, {kind: settings}, out)
    return RunFolder.open(out)


def extend(folder: RunFolder, kind: str, settings: dict[str, Any]) -> None:
    """Replaces the stored settings of a run, in its config.json, by `settings`, after a resumed run was extended, for
    example by more prompts. `kind`: the run's type."""
    config = json.loads((folder.path / "config.json").read_text(encoding="utf-8"))
    folder.write_json("config.json", config | {kind: settings})


def _has_more(before: Any, now: Any) -> bool:
    """Returns True if the list `now` has all items of `before`, and new ones."""
    return isinstance(before, list) and isinstance(now, list) and before != now and all(item in now for item in before)


GROWS: dict[str, Callable[[Any, Any], bool]] = {
    "prompts": _has_more,
    "temperatures": _has_more,
    "limit": lambda before, now: before is not None and (now is None or now > before),
    "self_written": lambda before, now: (now or 0) > (before or 0),
    "samples": lambda before, now: (now or 1) > (before or 1),
}
"""Setting -> function (before, now): True if its value has grown."""
