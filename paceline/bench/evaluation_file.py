"""What an evaluation reads before it measures: prompt sets, the drafter's fingerprint, the evaluation.json to go on with."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import hub
from paceline.bench.decode import ABOUT
from paceline.draft.registry import DRAFTERS
from paceline.errors import ConfigError, ModelNotFoundError
from paceline.prompts import Prompt, read_prompts
from paceline.runlog import RunFolder

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


@dataclass(frozen=True, slots=True)
class EvaluationFile:
    """evaluation.json in its run folder, and what it held when it was opened: {} when no set is done."""

    run: RunFolder
    saved: dict[str, Any]

    @classmethod
    def open(cls, out: Path | None, asked: dict[str, Any], sources: tuple[str, ...]) -> EvaluationFile:
        """Raises ConfigError when the file was made with other settings, or is damaged."""
        if out and (out / EVALUATION).is_file():
            opened = cls(RunFolder(out), _saved(out / EVALUATION))
            opened.refuse_change(opened.saved["settings"], asked)
            return opened
        if out and _is_other_run(out):
            return cls(RunFolder.open(out), {})
        return cls(RunFolder.create("evaluate", {**asked, "prompts": sources}, out), {})

    def has(self, each: PromptSet) -> bool:
        """Whether this set is done. Raises ConfigError when it was done with other prompts."""
        done = self.saved.get("sets", {}).get(each.name)
        if done is None:
            return False
        now = {"source": each.source, **each.noted}
        self.refuse_change({key: done.get(key) for key in now}, now, f"prompt set {each.name}: ")
        return True

    def write(self, line: dict[str, Any]) -> None:
        self.run.results(line, EVALUATION)

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
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("what") != "evaluate"
    except (OSError, ValueError, AttributeError):
        return False


def _saved(file: Path) -> dict[str, Any]:
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        complete = all(name in saved for name in ("settings", "sets", *ABOUT))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): choose another --out") from error
    if not complete:
        raise ConfigError(f"{file} is not of paceline evaluate: choose another --out")
    return saved


def flat(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """{"bench": {"seed": 0}} -> [("bench.seed", 0)]"""
    found: list[tuple[str, Any]] = []
    for key, value in settings.items():
        found += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return found
