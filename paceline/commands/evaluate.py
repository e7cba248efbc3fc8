"""`paceline evaluate`: one drafter on several prompt sets. evaluation.json grows set by set; a second run skips those done."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paceline import hub
from paceline.bench.config import BenchConfig
from paceline.bench.decode import Bench
from paceline.bench.evaluate import Evaluation, evaluation_config, set_figures
from paceline.bench.report import WIDE, ceiling_line, table
from paceline.commands.bench import BUILTIN_PROMPTS
from paceline.commands.terminal import introduce, print_json, progress, say
from paceline.draft.registry import DRAFTERS
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, ModelNotFoundError
from paceline.hardware import this_machine
from paceline.prompts import Prompt, read_prompts
from paceline.runlog import RunFolder, plain

EVALUATION = "evaluation.json"
BUILTIN = "built-in"
IDENTITY = ("model", "dtype", "backend", "isa", "weight_bytes", "device", "machine name")
"""What must be the same for two sets to stand in one table."""


@dataclass(frozen=True, slots=True)
class EvaluateAsk:
    """An `evaluate` command, its options read."""

    drafter: str
    settings: dict[str, Any]
    """Keyword arguments of LLM, without drafter, num_drafted and max_batch."""
    config: BenchConfig
    """Its drafters are ignored: plain decoding and `drafter` run."""
    prompts: tuple[str, ...] = ()
    """Files or data set ids; none is the built-in set."""
    limit: int | None = None
    """Only the first prompts of each set."""
    out: Path | None = None
    """A fresh folder, one of an earlier evaluation to go on with, or a training run's folder."""
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class _Set:
    name: str
    source: str
    prompts: list[Prompt]

    @property
    def noted(self) -> dict[str, Any]:
        """What must be the same for a set that is done to be skipped."""
        content = json.dumps([[prompt.messages, prompt.turns or prompt.token_ids] for prompt in self.prompts])
        return {"num_prompts": len(self.prompts), "prompts_sha256": hashlib.sha256(content.encode()).hexdigest()}


def evaluate(ask: EvaluateAsk) -> dict[str, Any]:
    """Evaluate and return what evaluation.json holds, with the run folder as "run".

    Raises ModelNotFoundError for a missing drafter, PromptError for missing prompts, ConfigError when `out` holds sets that
    were evaluated with other settings.
    """
    config = evaluation_config(ask.drafter, ask.config)
    sets = _read_sets(ask.prompts, ask.limit)
    described = plain({**_described(ask, config), "drafter_sha256": _fingerprint(ask.drafter)})
    run, saved = _open(ask, described)
    waiting = [each for each in sets if not _is_done(each, saved, run.path / EVALUATION)]
    if waiting:
        llm = LLM(drafter="none", max_batch=max(config.batches), **ask.settings)
        evaluation = _evaluation(ask, llm, config, saved, run.path / EVALUATION)
        for each in waiting:
            evaluation.sets[each.name] = {"source": each.source, **each.noted, **_evaluate_set(llm, each, config)}
            saved = {**evaluation.as_line(), "settings": described}
            run.write_json(EVALUATION, saved)
    line = plain({**saved, "run": run.path})
    say(f"figures and texts: {run.path / EVALUATION} (paceline report {run.path} draws them)")
    if ask.as_json:
        print_json(line)
    return line


def _evaluate_set(llm: LLM, each: _Set, config: BenchConfig) -> dict[str, Any]:
    from rich.console import Console

    bench = Bench(llm, each.prompts, config, notice=say)
    with progress(each.name, bench.num_answers) as advance:
        bench.run(on_answer=lambda setting: advance(f"{each.name}: {setting}"))
    figures = set_figures(bench)
    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = WIDE
    say(f"{each.name}: {figures.num_requests} requests, {figures.looping_share:.0%} of the drafter's answers end in a loop")
    console.print(table(figures.results, console.width))
    return figures.as_json()


def _evaluation(ask: EvaluateAsk, llm: LLM, config: BenchConfig, saved: dict[str, Any], file: Path) -> Evaluation:
    """A new one, or the saved one to go on with. Raises ConfigError when that was made on another machine."""
    machine = this_machine(llm.config.device)
    say(introduce(llm))
    say(ceiling_line(llm, machine))
    fresh = Evaluation.begin(llm, machine, ask.drafter, config)
    if not saved:
        return fresh
    before = Evaluation(**{field.name: saved[field.name] for field in fields(Evaluation) if field.name in saved})
    _refuse_change(_identity(before), _identity(fresh), file)
    return before


def _identity(evaluation: Evaluation) -> dict[str, Any]:
    known = {**plain(evaluation), "machine name": evaluation.machine.get("name")}
    return {name: known[name] for name in IDENTITY}


def _described(ask: EvaluateAsk, config: BenchConfig) -> dict[str, Any]:
    return {"drafter": ask.drafter, "llm": ask.settings, "bench": config, "limit": ask.limit}


def _read_sets(sources: tuple[str, ...], limit: int | None) -> list[_Set]:
    """Each source once, named by its file; two files of one name keep their folders."""
    if not sources:
        return [_Set(BUILTIN, BUILTIN, read_prompts(BUILTIN_PROMPTS, limit))]
    sources = tuple(dict.fromkeys(sources))
    short = [Path(source).stem if Path(source).is_file() else source for source in sources]
    names = [source if short.count(name) > 1 else name for source, name in zip(sources, short, strict=True)]
    return [_Set(name, source, read_prompts(source, limit)) for name, source in zip(names, sources, strict=True)]


def _fingerprint(drafter: str) -> str | None:
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


def _open(ask: EvaluateAsk, described: dict[str, Any]) -> tuple[RunFolder, dict[str, Any]]:
    """The run folder and what its evaluation.json holds, {} when no set is done. Raises ConfigError on other settings."""
    file = ask.out / EVALUATION if ask.out else None
    saved = _saved(file) if file and file.is_file() else {}
    if file and saved:
        _refuse_change(saved["settings"], described, file)
        return RunFolder(file.parent), saved
    if ask.out and _is_other_run(ask.out):
        return RunFolder.open(ask.out), {}
    return RunFolder.create("evaluate", {**described, "prompts": ask.prompts or (BUILTIN,)}, ask.out), {}


def _is_other_run(folder: Path) -> bool:
    """A training run keeps its config.json and its metrics."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("what") != "evaluate"
    except (OSError, ValueError, AttributeError):
        return False


def _saved(file: Path) -> dict[str, Any]:
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        complete = all(name in saved for name in ("settings", *(field.name for field in fields(Evaluation))))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): choose another --out") from error
    if not complete:
        raise ConfigError(f"{file} is not of paceline evaluate: choose another --out")
    return saved


def _is_done(each: _Set, saved: dict[str, Any], file: Path) -> bool:
    done = saved.get("sets", {}).get(each.name)
    if done is None:
        return False
    now = {"source": each.source, **each.noted}
    _refuse_change({key: done.get(key) for key in now}, now, file, f"prompt set {each.name}: ")
    say(f"{each.name} is done: skipped")
    return True


def _refuse_change(before: dict[str, Any], now: dict[str, Any], file: Path, where: str = "") -> None:
    """Raises ConfigError naming each setting that differs, old value and new."""
    old, new = _flat(before), _flat(now)
    changed = [f"{key} {old.get(key)} -> {new.get(key)}" for key in sorted(old | new) if old.get(key) != new.get(key)]
    if changed:
        raise ConfigError(
            f"{file} was made with other settings ({where}{', '.join(changed)}): repeat those, or choose another --out"
        )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"bench": {"seed": 0}} -> {"bench.seed": 0}"""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
