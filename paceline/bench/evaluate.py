"""Evaluates one drafter in the real engine on each prompt set: acceptance, speed-up, losslessness and sample texts.

    evaluation = evaluate("runs/drafter", ["gsm8k.jsonl", "mt_bench.jsonl"], BenchConfig(batches=(1, 8)))

`paceline evaluate` prints the result. Each set is measured as in `bench.decode`: plain decoding, then the drafter, on
the same requests in one process. evaluation.json is rewritten after each set, and a second call with the same `out`
measures only missing sets. Looping text is easy to draft and inflates acceptance, so each set also reports the share of
answers that end in a loop, and tokens per round without these answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.bench.config import BASELINE, BUILTIN_PROMPTS, BenchConfig
from paceline.bench.decode import ABOUT, Bench, introduction, set_figures
from paceline.bench.drafting import context_table
from paceline.bench.pages.run_page import table
from paceline.bench.runs import loaded
from paceline.config import EngineConfig
from paceline.data.prompts import Prompt, read_prompts
from paceline.draft.registry import DRAFTERS, checkpoint_of
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, ModelNotFoundError, refuse
from paceline.model.adapter import identity_of
from paceline.report.tables import SILENT, Progress, differences
from paceline.runs.folder import RunFolder, plain
from paceline.simulate.files import read_json

BUILTIN = "built-in"
EVALUATION = "evaluation.json"
IDENTITY = ("model", "dtype", "backend", "isa", "weight_bytes", "device", "machine")
"""Keys of model and machine that must be equal for all sets of an evaluation; of the machine, only its name."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    name: str
    source: str
    prompts: list[Prompt]

    @property
    def noted(self) -> dict[str, Any]:
        """Fields of evaluation.json by which changed prompts are recognised later: "num_prompts", and "prompts_sha256",
        a hash of the prompts' contents."""
        content = json.dumps(
            [[each.messages, each.turns or each.token_ids, each.tools, each.variables] for each in self.prompts]
        )
        return {"num_prompts": len(self.prompts), "prompts_sha256": hashlib.sha256(content.encode()).hexdigest()}


def read_sets(sources: tuple[str, ...], limit: int | None, tags: Sequence[str] = ()) -> list[PromptSet]:
    """Read one prompt set from each source, a file or data set id. Without sources, return the built-in set. `limit`:
    use only the first prompts of each source. A set is named after its file, or by its full path if two files have the
    same name.

    `tags`: read only requests (of traces or stores) with one of these tags. Raises ConfigError if there are tags
    without sources, or if one of the tags does not occur in a source. Raises PromptError if a source cannot be
    read."""
    if not sources:
        refuse(ConfigError, (bool(tags), "--tag selects among traces: give them with --prompts"))
        return [PromptSet(BUILTIN, BUILTIN, read_prompts(BUILTIN_PROMPTS, limit))]
    sources = tuple(dict.fromkeys(sources))
    short = [Path(source).stem if Path(source).is_file() else source for source in sources]
    names = [source if short.count(name) > 1 else name for source, name in zip(sources, short, strict=True)]
    return [
        PromptSet(name, source, read_prompts(source, limit, tags=tags))
        for name, source in zip(names, sources, strict=True)
    ]


def fingerprint(drafter: str) -> str | None:
    """Return the SHA-256 of a drafter's weights, by which a changed drafter is recognised; None for a built-in drafter.
    `drafter`: name of a built-in drafter, a folder, a GGUF file or a hub id. Raises ModelNotFoundError if the folder is
    incomplete."""
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
    """Results of one drafter on the prompt sets measured so far; stored in evaluation.json of the run folder."""

    drafter: str
    settings: dict[str, Any]
    """Settings of the evaluation as requested."""
    run: RunFolder
    about: dict[str, Any] = field(default_factory=dict)
    """Description of model and machine (`bench.decode.introduction`); {} before the first set."""
    sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Prompt set -> its results (`bench.decode.set_figures`), with the source of the prompts."""

    @classmethod
    def open(cls, drafter: str, settings: dict[str, Any], out: Path | None, sources: tuple[str, ...]) -> Evaluation:
        """Return the evaluation that is stored in the folder `out`, to continue it. Otherwise start a new one, in `out`
        or, if `out` is None, in a new run folder. `sources`: files or ids of the prompt sets, noted in a new run
        folder. Raises ConfigError if the stored evaluation is damaged, or its settings differ from `settings`."""
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
        """All results as dicts, one for each prompt set and setting (drafter, temperature, batch size); "prompts" is
        the prompt set's name."""
        return [{"prompts": name, **row} for name, figures in self.sets.items() for row in figures["results"]]

    @property
    def heldout(self) -> dict[str, float]:
        """Prompt set -> the drafter's acceptance length at batch size 1 and temperature 0. Sets without this
        measurement are left out."""
        return {
            row["prompts"]: row["tokens_per_round"]
            for row in self.results
            if row["drafter"] != BASELINE and row["tokens_per_round"] and (row["batch"], row["temperature"]) == (1, 0)
        }

    def as_line(self) -> dict[str, Any]:
        line = {"drafter": self.drafter, **self.about, "sets": self.sets, "settings": self.settings}
        return plain({**line, "results": self.results, "heldout": self.heldout})

    def has(self, prompt_set: PromptSet) -> bool:
        """Return True if a prompt set of this name is already measured. Raises ConfigError if its source or prompts
        have changed since then."""
        done = self.sets.get(prompt_set.name)
        if done is None:
            return False
        now = {"source": prompt_set.source, **prompt_set.noted}
        self.refuse_change({key: done.get(key) for key in now}, now, f"prompt set {prompt_set.name}: ")
        return True

    def refuse_change(self, before: dict[str, Any], now: dict[str, Any], where: str = "") -> None:
        """Raise ConfigError if the settings of a stored evaluation differ from those of the current call; the message
        lists each changed setting. `before`: stored settings; `now`: current ones. `where`: text before this list, such
        as the prompt set's name."""
        changed = [f"{name} {old} -> {new}" for name, (old, new) in differences(before, now).items()]
        if changed:
            raise ConfigError(
                f"{self.run.path / EVALUATION} was made with other settings ({where}{', '.join(changed)}): "
                "repeat those, or choose another --out"
            )


def _is_other_run(folder: Path) -> bool:
    """Return True if the folder has another command's config.json, such as that of a training run."""
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
    tags: Sequence[str] = (),
    shows_context: bool = False,
    progress: Progress = SILENT,
) -> Evaluation:
    """Evaluate a drafter on prompt sets, and return all results stored in the run folder. Sets that already have
    results in this folder are skipped; the model is loaded only if a set is left.

    - `prompts`: files or data set ids [default: the built-in set].
    - `config`: options of the measurement; its drafters are ignored.
    - `engine`: options of the engine; its drafter, num_drafted and max_batch are ignored.
    - `limit`: use only the first prompts of each set.
    - `out`: the run folder [default: runs/evaluate-<time>]. It may be new, or that of a training run. If it is the
      folder of an earlier evaluation, that evaluation is continued.
    - `tags`: use only requests, from traces or stores, with one of these tags.
    - `shows_context`: also report the acceptance length by context length.

    Raises ModelNotFoundError for a missing drafter, PromptError for missing prompts, and ConfigError for a tag that no
    request has, or if the run folder has results with other settings."""
    config = evaluation_config(drafter, config or BenchConfig())
    engine = replace(engine or EngineConfig(), drafter="none", num_drafted=None, max_batch=max(config.batches))
    sets = read_sets(tuple(prompts), limit, tags)
    settings: dict[str, Any] = {"drafter": drafter, "llm": engine, "bench": config, "limit": limit}
    settings |= {"tags": tags} if tags else {}
    settings = plain({**settings, "drafter_sha256": fingerprint(drafter)})
    if (target := identity_of(engine.model)) != engine.model:
        settings["target"] = target
    evaluation = Evaluation.open(drafter, settings, out, tuple(prompt_set.source for prompt_set in sets))
    waiting = [prompt_set for prompt_set in sets if not evaluation.has(prompt_set)]
    for prompt_set in sets:
        if prompt_set not in waiting:
            progress.say(f"{prompt_set.name} is done: skipped")
    if not waiting:
        return evaluation
    llm, machine = loaded(engine, progress)
    about = introduction(llm, machine, config)
    if evaluation.about:
        evaluation.refuse_change(_identity(evaluation.about), _identity(about))
    evaluation.about = about
    for prompt_set in waiting:
        evaluation.sets[prompt_set.name] = {
            "source": prompt_set.source,
            **prompt_set.noted,
            **_evaluate_set(llm, prompt_set, config, progress),
        }
        if shows_context:
            progress.table(context_table(evaluation.sets[prompt_set.name]["by_context"]))
        evaluation.run.results(evaluation.as_line(), EVALUATION)
    return evaluation


def _identity(about: dict[str, Any]) -> dict[str, Any]:
    return {**{name: about.get(name) for name in IDENTITY}, "machine": about["machine"]["name"]}


def evaluation_config(drafter: str, config: BenchConfig) -> BenchConfig:
    """Return `config` with only this drafter. Raises ConfigError for the drafter "none", because the drafter is always
    compared with plain decoding. Raises it also if `config.against` names other engines to compare with."""
    if drafter == BASELINE:
        raise ConfigError(
            "none drafts nothing, so there is nothing to evaluate: name a drafter's folder, or use bench decode"
        )
    if config.against:
        raise ConfigError("an evaluation compares with plain decoding only: use bench decode --against for peers")
    return replace(config, drafters=(drafter,))


def _evaluate_set(llm: LLM, prompt_set: PromptSet, config: BenchConfig, progress: Progress) -> dict[str, Any]:
    bench = Bench(llm, prompt_set.prompts, config, notice=progress.say)
    with progress.bar(prompt_set.name, bench.num_answers) as advance:
        bench.run(on_answer=lambda setting: advance(f"{prompt_set.name}: {setting}"))
    figures = set_figures(bench)
    loops = f"{figures['looping_share']:.0%} of the drafter's answers end in a loop"
    progress.say(f"{prompt_set.name}: {len(bench.requests)} requests, {loops}")
    progress.table(table(figures["results"]))
    return plain(figures)
