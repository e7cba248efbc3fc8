"""One drafter in the real engine, prompt set by prompt set: acceptance, speed-up, losslessness, and texts to read.

    evaluation = evaluate("runs/drafter", ["gsm8k.jsonl", "mt_bench.jsonl"], BenchConfig(batches=(1, 8)))

`paceline evaluate` shows what this returns. Each set is a `bench.decode` (plain decoding, then the drafter, same process, same
requests); evaluation.json grows set by set, and a second call with the same `out` does what is missing. Text that repeats
itself is easy to draft and fakes acceptance: each set tells how many answers end in a loop, and tokens per round without them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.bench.by_context import context_table
from paceline.bench.config import BASELINE, BUILTIN_PROMPTS, BenchConfig
from paceline.bench.decode import ABOUT, Bench, introduction, set_figures
from paceline.bench.pages.run_page import table
from paceline.bench.runs import loaded
from paceline.config import EngineConfig
from paceline.data.prompts import Prompt, read_prompts
from paceline.draft.registry import DRAFTERS, checkpoint_of
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, ModelNotFoundError
from paceline.report.tables import SILENT, Progress, differences
from paceline.runs.folder import RunFolder, plain
from paceline.simulate.files import read_json

BUILTIN = "built-in"
EVALUATION = "evaluation.json"
IDENTITY = ("model", "dtype", "backend", "isa", "weight_bytes", "device", "machine")
"""What must be the same for two sets to stand in one table; of the machine, its name."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    name: str
    source: str
    prompts: list[Prompt]

    @property
    def noted(self) -> dict[str, Any]:
        """What must be the same for a set that is done to be skipped."""
        content = json.dumps([_content(prompt) for prompt in self.prompts])
        return {"num_prompts": len(self.prompts), "prompts_sha256": hashlib.sha256(content.encode()).hexdigest()}


def _content(prompt: Prompt) -> list[Any]:
    """What is asked; tools and template variables only where there are some, so that old hashes stay valid."""
    more = [prompt.tools, prompt.variables] if prompt.tools or prompt.variables else []
    return [prompt.messages, prompt.turns or prompt.token_ids, *more]


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
    path = checkpoint_of(drafter)
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
    """Name -> `set_figures` and where its prompts are from."""

    @classmethod
    def open(cls, drafter: str, settings: dict[str, Any], out: Path | None, sources: tuple[str, ...]) -> Evaluation:
        """A fresh one, or what `out` holds. Raises ConfigError when that was made with other settings, or is damaged."""
        if out and (out / EVALUATION).is_file():
            saved = read_json(out / EVALUATION, "choose another --out")
            if not isinstance(saved, dict) or any(name not in saved for name in ("settings", "sets", *ABOUT)):
                raise ConfigError(f"{out / EVALUATION} is not of paceline evaluate: choose another --out")
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

    def refuse_change(self, before: dict[str, Any], now: dict[str, Any], where: str = "") -> None:
        """Raises ConfigError naming each setting that differs, old value and new."""
        changed = [f"{name} {old} -> {new}" for name, (old, new) in differences(before, now).items()]
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


def evaluate(
    drafter: str,
    prompts: Sequence[str] = (),
    config: BenchConfig | None = None,
    *,
    engine: EngineConfig | None = None,
    limit: int | None = None,
    out: Path | None = None,
    shows_context: bool = False,
    progress: Progress = SILENT,
) -> Evaluation:
    """Evaluate on every prompt set that `out` does not hold yet; the model is loaded only if there is one.

    `prompts`: files or data set ids, none is the built-in set; `limit`: only the first prompts of each. `config`: its drafters
    are ignored. `engine`: its drafter, num_drafted and max_batch are ignored too. `out`: a fresh folder, one of
    an earlier evaluation to go on with, or a training run's. `shows_context`: also a table of each set's acceptance length
    by context.

    Raises ModelNotFoundError for a missing drafter, PromptError for missing prompts, ConfigError when `out` holds sets that
    were evaluated with other settings.
    """
    config = evaluation_config(drafter, config or BenchConfig())
    engine = replace(engine or EngineConfig(), drafter="none", num_drafted=None, max_batch=max(config.batches))
    sets = read_sets(tuple(prompts), limit)
    asked: dict[str, Any] = {"drafter": drafter, "llm": engine, "bench": config, "limit": limit}
    asked = plain({**asked, "drafter_sha256": fingerprint(drafter)})
    evaluation = Evaluation.open(drafter, asked, out, tuple(each.source for each in sets))
    waiting = [each for each in sets if not evaluation.has(each)]
    for each in sets:
        if each not in waiting:
            progress.say(f"{each.name} is done: skipped")
    if not waiting:
        return evaluation
    llm, machine = loaded(engine, progress)
    about = introduction(llm, machine, config)
    if evaluation.about:
        evaluation.refuse_change(_identity(evaluation.about), _identity(about))
    evaluation.about = about
    for each in waiting:
        evaluation.sets[each.name] = {"source": each.source, **each.noted, **_evaluate_set(llm, each, config, progress)}
        if shows_context:
            progress.table(context_table(evaluation.sets[each.name]["by_context"]))
        evaluation.run.results(evaluation.as_line(), EVALUATION)
    return evaluation


def _identity(about: dict[str, Any]) -> dict[str, Any]:
    return {**{name: about.get(name) for name in IDENTITY}, "machine": about["machine"]["name"]}


def evaluation_config(drafter: str, config: BenchConfig) -> BenchConfig:
    """`config` with plain decoding and this one drafter. Raises ConfigError for "none", which has nothing to evaluate."""
    if drafter == BASELINE:
        raise ConfigError("none drafts nothing, so there is nothing to evaluate: name a drafter's folder, or use bench decode")
    if config.against:
        raise ConfigError("an evaluation compares with plain decoding only: use bench decode --against for peers")
    batches, temperatures = tuple(dict.fromkeys(config.batches)), tuple(dict.fromkeys(config.temperatures))
    return replace(config, drafters=(drafter,), batches=batches, temperatures=temperatures)


def _evaluate_set(llm: LLM, each: PromptSet, config: BenchConfig, progress: Progress) -> dict[str, Any]:
    bench = Bench(llm, each.prompts, config, notice=progress.say)
    with progress.bar(each.name, bench.num_answers) as advance:
        bench.run(on_answer=lambda setting: advance(f"{each.name}: {setting}"))
    figures = set_figures(bench)
    loops = f"{figures['looping_share']:.0%} of the drafter's answers end in a loop"
    progress.say(f"{each.name}: {len(bench.requests)} requests, {loops}")
    progress.table(table(figures["results"]))
    return plain(figures)
