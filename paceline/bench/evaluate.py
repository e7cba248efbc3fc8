"""One drafter in the real engine, prompt set by prompt set: acceptance, speed-up, losslessness, and texts to read.

    paceline evaluate runs/drafter --prompts gsm8k.jsonl --prompts mt_bench.jsonl --batch 1,8 --temperature 0,1

Each set is a `bench.decode` (plain decoding, then the drafter, same process, same requests); `set_figures` takes from it what
is kept. An `Evaluation` gathers the sets as JSON, so that one read back from a file goes on where it ended. Text that repeats
itself is easy to draft and fakes acceptance: each set tells how many answers end in a loop, and tokens per round without them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.bench.config import BASELINE, BenchConfig
from paceline.bench.decode import Bench, Result, Setting, ceiling_tokens_per_s
from paceline.bench.passes import Answer, Pass
from paceline.bench.summary import speedup_over_prompts, tokens_per_round
from paceline.errors import ConfigError
from paceline.figures import is_loop
from paceline.hardware import Machine
from paceline.model.backends import form_of
from paceline.runlog import plain

if TYPE_CHECKING:
    from paceline.engine.llm import LLM

NUM_TEXTS = 4
"""Texts kept of each set and temperature."""


@dataclass(frozen=True, slots=True)
class Looping:
    """How much of the acceptance at one temperature comes from answers that end in a loop (`figures.is_loop`)."""

    temperature: float
    num_answers: int
    looping_share: float
    tokens_per_round: float
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
    tokens_per_round: float
    is_loop: bool


@dataclass(frozen=True, slots=True)
class SetFigures:
    """One prompt set: rows as of `bench decode`, but `speedup_interval` is a bootstrap over prompts at every batch size."""

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


@dataclass(slots=True)
class Evaluation:
    """A drafter's figures on the sets done so far."""

    drafter: str
    model: str
    dtype: str
    device: str
    machine: dict[str, Any]
    weight_bytes: int
    ceiling_tokens_per_s: float
    """Plain decoding at batch 1 cannot be faster."""
    max_tokens: int
    repeat: int
    backend: str = "torch"
    """As of `model.load.Form`; evaluations of before had no other."""
    isa: str | None = None
    weight_format: str = ""
    sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> `SetFigures.as_json()` and whatever the caller noted beside it."""

    @classmethod
    def begin(cls, llm: LLM, machine: Machine, drafter: str, config: BenchConfig) -> Evaluation:
        return cls(
            drafter=drafter,
            model=llm.config.model,
            dtype=llm.config.dtype,
            device=llm.config.device,
            machine=plain(machine),
            weight_bytes=llm.target.weight_bytes,
            ceiling_tokens_per_s=ceiling_tokens_per_s(llm, machine),
            max_tokens=config.max_tokens,
            repeat=config.repeat,
            **asdict(form_of(llm.target)),
        )

    def as_line(self) -> dict[str, Any]:
        """What the command prints and evaluation.json holds; "results" are the rows of all sets, "prompts" names theirs."""
        rows = [{"prompts": name, **row} for name, figures in self.sets.items() for row in figures["results"]]
        return {**plain(self), "results": rows, "heldout": heldout(rows)}


def heldout(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Set -> the drafter's tokens per round at batch 1, temperature 0; a set without that setting is left out."""
    return {
        row["prompts"]: row["tokens_per_round"]
        for row in rows
        if row["drafter"] != BASELINE and row["tokens_per_round"] is not None and (row["batch"], row["temperature"]) == (1, 0)
    }


def evaluation_config(drafter: str, config: BenchConfig) -> BenchConfig:
    """`config` with plain decoding and this one drafter. Raises ConfigError for "none", which has nothing to evaluate."""
    if drafter == BASELINE:
        raise ConfigError("none drafts nothing, so there is nothing to evaluate: name a drafter's folder, or use bench decode")
    if config.against:
        raise ConfigError("an evaluation compares with plain decoding only: use bench decode --against for peers")
    batches, temperatures = tuple(dict.fromkeys(config.batches)), tuple(dict.fromkeys(config.temperatures))
    return replace(config, drafters=(drafter,), batches=batches, temperatures=temperatures)


def set_figures(bench: Bench) -> SetFigures:
    """The figures of a benchmark that has run on one prompt set, its config made by `evaluation_config`."""
    config = bench.config
    results = bench.results()
    for result in results:
        setting = Setting(result.drafter, result.batch, result.temperature)
        baseline = bench.passes[replace(setting, drafter=BASELINE)]
        speedup = speedup_over_prompts(bench.passes[setting], baseline, setting.batch)
        result.speedup_interval = (speedup.low, speedup.high)
    looping, texts = [], []
    for temperature in config.temperatures:
        done = bench.passes[Setting(config.drafters[-1], min(config.batches), temperature)][0]
        looping.append(_looping(done, temperature))
        texts += _texts(bench, done, temperature)
    return SetFigures(results, looping, texts, len(bench.requests), bench.num_skipped)


def _looping(done: Pass, temperature: float) -> Looping:
    others = [answer for answer in done.answers if not is_loop(answer.token_ids)]
    whole = tokens_per_round(done)
    rest = tokens_per_round(Pass(others)) if others else None
    return Looping(
        temperature=temperature,
        num_answers=len(done.answers),
        looping_share=1 - len(others) / len(done.answers),
        tokens_per_round=whole.value,
        tokens_per_round_interval=(whole.low, whole.high),
        without_loops=rest.value if rest else None,
        without_loops_interval=(rest.low, rest.high) if rest else (None, None),
    )


def _texts(bench: Bench, done: Pass, temperature: float) -> list[Text]:
    """Answers from all over the set, not its best."""
    count = min(NUM_TEXTS, len(done.answers))
    places = [index * len(done.answers) // count for index in range(count)]
    return [
        Text(
            request=bench.requests[place].name,
            temperature=temperature,
            prompt=bench.requests[place].turn,
            text=done.answers[place].text,
            num_tokens=len(done.answers[place].token_ids),
            tokens_per_round=_per_round(done.answers[place]),
            is_loop=is_loop(done.answers[place].token_ids),
        )
        for place in places
    ]


def _per_round(answer: Answer) -> float:
    return 1 + answer.num_accepted / answer.num_rounds if answer.num_rounds else 1.0
