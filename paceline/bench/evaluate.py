"""One drafter in the real engine, prompt set by prompt set: acceptance, speed-up, losslessness, and texts to read.

    evaluation = evaluate("runs/drafter", ["gsm8k.jsonl", "mt_bench.jsonl"], BenchConfig(batches=(1, 8)))

`paceline evaluate` shows what this returns. Each set is a `bench.decode` (plain decoding, then the drafter, same process, same
requests); evaluation.json grows set by set, and a second call with the same `out` does what is missing. Text that repeats
itself is easy to draft and fakes acceptance: each set tells how many answers end in a loop, and tokens per round without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.bench.config import BASELINE, BenchConfig
from paceline.bench.decode import Bench, Result, Setting, introduction
from paceline.bench.drafting import drafting
from paceline.bench.evaluation_file import Evaluation, PromptSet, fingerprint, read_sets
from paceline.bench.passes import Pass
from paceline.bench.report import ceiling_line, table
from paceline.config import EngineConfig
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.figures import is_loop
from paceline.hardware import this_machine
from paceline.progress import Progress
from paceline.runlog import plain

NUM_TEXTS = 4
"""Texts kept of each set and temperature."""
IDENTITY = ("model", "dtype", "backend", "isa", "weight_bytes", "device", "machine")
"""What must be the same for two sets to stand in one table; of the machine, its name."""


@dataclass(frozen=True, slots=True)
class Looping:
    """How much of the acceptance at one temperature comes from answers that end in a loop (`figures.is_loop`)."""

    temperature: float
    num_answers: int
    looping_share: float
    tokens_per_round: float | None
    tokens_per_round_interval: tuple[float | None, float | None]
    without_loops: float | None
    """Tokens per round of the other answers; None when there is none."""
    without_loops_interval: tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Text:
    """One answer, to be read."""

    request: str
    temperature: float
    prompt: str
    """The user's last turn."""
    text: str
    num_tokens: int
    tokens_per_round: float | None
    is_loop: bool


@dataclass(frozen=True, slots=True)
class SetFigures:
    """One prompt set: rows as of `bench decode`, what loops, and texts."""

    results: list[Result]
    looping: list[Looping]
    texts: list[Text]
    num_requests: int
    num_skipped: int
    """Turns left out because they do not fit the context."""

    @property
    def looping_share(self) -> float:
        """At the lowest temperature, where models loop most."""
        return min(self.looping, key=lambda each: each.temperature).looping_share

    def as_json(self) -> dict[str, Any]:
        return {**plain(self), "looping_share": self.looping_share}


def evaluate(
    drafter: str,
    prompts: Sequence[str] = (),
    config: BenchConfig | None = None,
    *,
    engine: EngineConfig | None = None,
    limit: int | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate on every prompt set that `out` does not hold yet; the model is loaded only if there is one.

    `prompts`: files or data set ids, none is the built-in set; `limit`: only the first prompts of each. `config`: its drafters
    are ignored. `engine`: its drafter, num_drafted and max_batch are ignored too. `out`: a fresh folder, one of
    an earlier evaluation to go on with, or a training run's.

    Raises ModelNotFoundError for a missing drafter, PromptError for missing prompts, ConfigError when `out` holds sets that
    were evaluated with other settings.
    """
    progress = progress or Progress()
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
    llm = LLM.of(engine)
    machine = this_machine(llm.config.device)
    progress.loaded(llm)
    progress.say(ceiling_line(llm, machine))
    about = introduction(llm, machine, config)
    if evaluation.about:
        evaluation.refuse_change(_identity(evaluation.about), _identity(about))
    evaluation.about = about
    for each in waiting:
        evaluation.sets[each.name] = {"source": each.source, **each.noted, **_evaluate_set(llm, each, config, progress)}
        evaluation.write()
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
    loops = f"{figures.looping_share:.0%} of the drafter's answers end in a loop"
    progress.say(f"{each.name}: {figures.num_requests} requests, {loops}")
    progress.table(table(figures.results))
    return figures.as_json()


def set_figures(bench: Bench) -> SetFigures:
    """The figures of a benchmark that has run on one prompt set, its config made by `evaluation_config`."""
    config = bench.config
    looping, texts = [], []
    for temperature in config.temperatures:
        done = bench.passes[Setting(config.drafters[-1], min(config.batches), temperature)][0]
        looping.append(_looping(done, temperature))
        texts += _texts(bench, done, temperature)
    return SetFigures(bench.results(), looping, texts, len(bench.requests), bench.num_skipped)


def _looping(done: Pass, temperature: float) -> Looping:
    others = [answer.rounds for answer in done.answers if not is_loop(answer.token_ids)]
    whole = drafting([answer.rounds for answer in done.answers])
    rest = drafting(others) if others else None
    return Looping(
        temperature=temperature,
        num_answers=len(done.answers),
        looping_share=1 - len(others) / len(done.answers),
        tokens_per_round=whole.tokens_per_round,
        tokens_per_round_interval=whole.tokens_per_round_interval,
        without_loops=rest.tokens_per_round if rest else None,
        without_loops_interval=rest.tokens_per_round_interval if rest else (None, None),
    )


def _texts(bench: Bench, done: Pass, temperature: float) -> list[Text]:
    """Answers from all over the set, not its best."""
    count = min(NUM_TEXTS, len(done.answers))
    places = [index * len(done.answers) // count for index in range(count)]
    chosen = [(bench.requests[place], done.answers[place]) for place in places]
    return [
        Text(
            request=request.name,
            temperature=temperature,
            prompt=request.turn,
            text=answer.text,
            num_tokens=len(answer.token_ids),
            tokens_per_round=drafting([answer.rounds]).tokens_per_round,
            is_loop=is_loop(answer.token_ids),
        )
        for request, answer in chosen
    ]
