"""What an evaluation reads and writes: prompt sets, the drafter's fingerprint, the evaluation.json that grows set by set."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import hub
from paceline.bench.config import BASELINE
from paceline.bench.decode import ABOUT
from paceline.draft.registry import DRAFTERS
from paceline.errors import ConfigError, ModelNotFoundError
from paceline.prompts import Prompt, read_prompts
from paceline.runlog import RunFolder, plain
from paceline.simulate.files import read_json

BUILTIN_PROMPTS = Path(__file__).parent / "prompts.jsonl"
BUILTIN = "built-in"
EVALUATION = "evaluation.json"


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts that are evaluated together."""

    name: str
    source: str
    prompts: list[Prompt]

    @property
    def noted(self) -> dict[str, Any]:
        """What must be the same for a set that is done to be skipped."""
        content = json.dumps([[prompt.messages, prompt.turns or prompt.token_ids] for prompt in self.prompts])
        return {"num_prompts": len(self.prompts), "prompts_sha256": hashlib.sha256(content.encode()).hexdigest()}


def read_sets(sources: tuple[str, ...], limit: int | None) -> list[PromptSet]:
    """Each source once, named by its file; two files of one name keep their folders."""
    if not sources:
        return [PromptSet(BUILTIN, BUILTIN, read_prompts(BUILTIN_PROMPTS, limit))]
    sources = tuple(dict.fromkeys(sources))
    short = [Path(source).stem if Path(source).is_file() else source for source in sources]
    names = [source if short.count(name) > 1 else name for source, name in zip(sources, short, strict=True)]
    return [PromptSet(name, source, read_prompts(source, limit)) for name, source in zip(names, sources, strict=True)]


def fingerprint(drafter: str) -> str | None:
    """Hash of the drafter's weights, so that figures of one trained further are not mixed with the old one's."""
    if drafter in DRAFTERS:
        return None
    try:
        path = hub.resolve(drafter)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"no drafter {drafter!r}: give a drafter's folder, a hub id, or one of {', '.join(DRAFTERS)}"
        ) from error
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or (path.is_dir() and not (path / "config.json").is_file()):
        raise ModelNotFoundError(f"{path} holds no drafter (config.json and *.safetensors): check the path")
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


@dataclass(slots=True)
class Evaluation:
    """A drafter's figures on the sets done so far, and the run folder whose evaluation.json holds them."""

    drafter: str
    settings: dict[str, Any]
    """What was asked for."""
    run: RunFolder
    about: dict[str, Any] = field(default_factory=dict)
    """What was measured and on which machine, as of `bench.decode.introduction`; {} when no set is done."""
    sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> `SetFigures.as_json()` and where its prompts are from."""

    @classmethod
    def open(cls, drafter: str, settings: dict[str, Any], out: Path | None, sources: tuple[str, ...]) -> Evaluation:
        """A fresh one, or what `out` holds. Raises ConfigError when that was made with other settings, or is damaged."""
        if out and (out / EVALUATION).is_file():
            saved = _saved(out / EVALUATION)
            opened = cls(drafter, settings, RunFolder(out), {name: saved[name] for name in ABOUT}, dict(saved["sets"]))
            opened.refuse_change(saved["settings"], settings)
            return opened
        if out and _is_other_run(out):
            return cls(drafter, settings, RunFolder.open(out))
        return cls(drafter, settings, RunFolder.create("evaluate", {**settings, "prompts": sources}, out))

    @property
    def results(self) -> list[dict[str, Any]]:
        """The rows of all sets; "prompts" names theirs."""
        return [{"prompts": name, **row} for name, figures in self.sets.items() for row in figures["results"]]

    @property
    def heldout(self) -> dict[str, float]:
        """Set -> the drafter's tokens per round at batch 1, temperature 0; a set without that setting is left out."""
        return {
            row["prompts"]: row["tokens_per_round"]
            for row in self.results
            if row["drafter"] != BASELINE and row["tokens_per_round"] and (row["batch"], row["temperature"]) == (1, 0)
        }

    def as_line(self) -> dict[str, Any]:
        """What the command prints and evaluation.json holds."""
        told = {"drafter": self.drafter, **self.about, "sets": self.sets, "settings": self.settings}
        return plain({**told, "results": self.results, "heldout": self.heldout})

    def has(self, each: PromptSet) -> bool:
        """Whether this set is done. Raises ConfigError when it was done with other prompts."""
        done = self.sets.get(each.name)
        if done is None:
            return False
        now = {"source": each.source, **each.noted}
        self.refuse_change({key: done.get(key) for key in now}, now, f"prompt set {each.name}: ")
        return True

    def write(self) -> None:
        self.run.results(self.as_line(), EVALUATION)

    def refuse_change(self, before: dict[str, Any], now: dict[str, Any], where: str = "") -> None:
        """Raises ConfigError naming each setting that differs, old value and new."""
        old, new = dict(flat(before)), dict(flat(now))
        changed = [f"{key} {old.get(key)} -> {new.get(key)}" for key in sorted(old | new) if old.get(key) != new.get(key)]
        if changed:
            raise ConfigError(
                f"{self.run.path / EVALUATION} was made with other settings ({where}{', '.join(changed)}): "
                "repeat those, or choose another --out"
            )


def _is_other_run(folder: Path) -> bool:
    """A training run keeps its config.json and its metrics."""
    with contextlib.suppress(ConfigError):
        config = read_json(folder / "config.json", "")
        return isinstance(config, dict) and config.get("what") != "evaluate"
    return False


def _saved(file: Path) -> dict[str, Any]:
    saved = read_json(file, "choose another --out")
    if not isinstance(saved, dict) or any(name not in saved for name in ("settings", "sets", *ABOUT)):
        raise ConfigError(f"{file} is not of paceline evaluate: choose another --out")
    return saved


def flat(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """{"bench": {"seed": 0}} -> [("bench.seed", 0)]"""
    found: list[tuple[str, Any]] = []
    for key, value in settings.items():
        found += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return found
