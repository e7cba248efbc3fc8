"""Measures decoding speed: prompts x drafters x temperatures x batch sizes on one loaded model.

    paceline bench decode --limit 4 --drafters default --batch 1,4

Plain decoding (`none`) always runs, first, in the same process. To reduce noise, every repetition runs all settings in
turn over the same requests, after a warm-up. Results are medians over repetitions, with bootstrap intervals over
prompts. Acceptance is averaged over rounds, and so weighted by tokens. `evaluate` uses the same functions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import product
from typing import Any

from paceline.bench.comparison import PEERS, TransformersPeer
from paceline.bench.config import BASELINE, WARM_UP_TOKENS, BenchConfig
from paceline.bench.drafting import Drafting, by_context, drafting
from paceline.bench.passes import Engines, Pass, Request, described, make_requests, pairs, parting, rate_ratio, run_pass
from paceline.data.prompts import Prompt
from paceline.draft.registry import make_drafter
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.hardware import Machine
from paceline.model.target import Target
from paceline.plan.marginals import Tally
from paceline.plan.planner import MOST_CANDIDATES, FixedPlanner
from paceline.report.statistics import Interval, bootstrap, doubt, is_loop, possible_speedup, repetition
from paceline.report.tables import ignore
from paceline.runs.folder import plain
from paceline.types import SamplingParams

ABOUT = (
    *("device", "machine", "model", "dtype", "backend", "isa", "weight_format", "weight_bytes"),
    *("ceiling_tokens_per_s", "max_tokens", "repeat"),
)
"""Keys of the description that `introduction` returns."""
NUM_TEXTS = 4
"""Number of sample texts stored for each prompt set and temperature."""


@dataclass(frozen=True, slots=True)
class Setting:
    drafter: str
    batch: int
    temperature: float

    @property
    def is_peer(self) -> bool:
        return self.drafter in PEERS

    def __str__(self) -> str:
        return f"{self.drafter}, batch {self.batch}, temperature {self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Difference:
    """First token at which an answer differs from plain decoding's answer to the same request, and how close the
    target's two best logits were at this token."""

    request: str
    index: int
    """Number of equal tokens before the first difference."""
    top2_gap: float
    """Target's best logit minus its second-best at the difference; 0 is a tie."""


@dataclass(slots=True, kw_only=True)
class Result(Drafting):
    """Speed, losslessness and acceptance of one setting (drafter, temperature, batch size). Speeds are medians over all
    repetitions; acceptance is that of the first repetition."""

    drafter: str
    """Drafter as requested: a name or path."""
    drafter_name: str
    """The drafter's own name, e.g. of the one that "default" or a path refers to."""
    batch: int
    temperature: float
    tokens_per_s: float
    tokens_per_s_range: tuple[float, float]
    """Tokens per second in the slowest and in the fastest repetition."""
    decode_tokens_per_s: float | None
    speedup: float | None
    """Speed-up over plain decoding; None if it exceeds the acceptance length, which is impossible, see `doubt`."""
    speedup_interval: tuple[float | None, float | None]
    """95% bootstrap interval of the speed-up over prompts."""
    speedup_vs: dict[str, float]
    """Name of a Transformers setting -> speed-up over it, at the same batch size and temperature."""
    identical: float | None
    """Share of greedy answers whose tokens equal plain decoding's; None if sampled."""
    lossless: bool | None
    seconds: dict[str, float | None]
    """Seconds by stage: prefill, draft, verify, host, wall."""
    bytes_per_s: float | None
    """Bytes of weights that verification reads per second, over all repetitions."""
    repetition: float
    """Share of token 8-grams that occurred earlier in the same answer."""
    num_answers: int
    num_output_tokens: int
    marginals: Tally | None = None
    """How often the target's token had each rank among the drafter's candidates; None if not recorded."""
    differences: list[Difference] = field(default_factory=list)
    doubt: str | None = None
    """Reason not to trust the speed-up (machine busy, too few tokens), or None."""

    def __post_init__(self) -> None:
        """Removes a speed-up that exceeds the acceptance length, also one from an older version's file."""
        if self.drafter != BASELINE and self.drafter not in PEERS:
            self.doubt = self.doubt or doubt(self.speedup, self.tokens_per_round, self.num_output_tokens)
            self.speedup = possible_speedup(self.speedup, self.tokens_per_round)
            if self.speedup is None:
                self.speedup_interval = (None, None)

    @property
    def setting(self) -> str:
        return f"{self.drafter}, batch {self.batch}, T={self.temperature:g}"


class Bench:
    """Measures every setting (drafter, temperature, batch size) on a loaded model. Call `run()`, then `results()`."""

    def __init__(
        self, llm: LLM, prompts: list[Prompt], config: BenchConfig, notice: Callable[[str], None] = print
    ) -> None:
        self.llm, self.config = llm, config
        rows = llm.target.cache.num_rows
        if max(config.batches) > rows:
            raise ConfigError(
                f"batch {max(config.batches)} needs as many cache rows, this engine has {rows}: raise max_batch"
            )
        self._engines = Engines(llm)
        for name in config.drafters:
            most = llm.config.most_drafted if config.num_drafted is None else config.num_drafted
            limit = {} if most is None or name == BASELINE else {"num_drafted": most}
            self._engines.add(name, make_drafter(name, llm.target, target_name=llm.config.model, **limit))
        self._peer = TransformersPeer(llm) if config.against else None
        self._engines.use(BASELINE)
        self.requests, self.num_skipped = make_requests(llm, prompts, config.max_tokens)
        if self.num_skipped:
            notice(f"left out {self.num_skipped} turns that do not fit the context: raise --max-len to include them")
        count = len(self.requests)
        batches = tuple(dict.fromkeys(min(batch, count) for batch in config.batches))
        if batches != config.batches:
            notice(f"{count} requests fill no batch of {max(config.batches)}: measured in batches of at most {count}")
        self.settings = [
            Setting(name, batch, temperature)
            for temperature, batch in product(config.temperatures, batches)
            for name in (*config.drafters, *(PEERS if self._peer and batch == 1 and temperature == 0 else ()))
        ]
        self.passes: dict[Setting, list[Pass]] = {setting: [] for setting in self.settings}

    @property
    def num_answers(self) -> int:
        """Number of answers that `run` generates, which is the length of its progress bar."""
        return len(self.settings) * self.config.repeat * len(self.requests)

    def run(
        self, on_answer: Callable[[Setting], None] = ignore, on_pass: Callable[[Setting, Pass], None] = ignore
    ) -> None:
        """Measure every setting (drafter, temperature, batch size) in turn, `repeat` times. `on_answer(setting)` is
        called after each answer. `on_pass(setting, timed_pass)` is called after each pass over all requests."""
        for _ in range(self.config.repeat):
            for setting in self.settings:
                done = self._pass(setting, partial(on_answer, setting))
                self.passes[setting].append(done)
                on_pass(setting, done)

    def _pass(self, setting: Setting, on_answer: Callable[[], None]) -> Pass:
        config = self.config
        if setting.is_peer:
            assert self._peer is not None
            self._peer.run(setting.drafter, self.requests[:1], WARM_UP_TOKENS, True)
            return self._peer.run(setting.drafter, self.requests, config.max_tokens, config.ignore_eos, on_answer)
        params = self._params(setting.temperature)
        warm_up = [replace(one, max_tokens=min(WARM_UP_TOKENS, config.max_tokens)) for one in params]
        engine = self._engines.use(setting.drafter)
        if config.marginals and isinstance(engine.planner, FixedPlanner):
            engine.planner.num_named = MOST_CANDIDATES
        run_pass(engine, self.requests[: setting.batch], warm_up[: setting.batch], setting.batch)
        return run_pass(self._engines.use(setting.drafter), self.requests, params, setting.batch, on_answer)

    def _params(self, temperature: float) -> list[SamplingParams]:
        return [
            SamplingParams(
                temperature=temperature,
                max_tokens=self.config.max_tokens,
                ignore_eos=self.config.ignore_eos,
                seed=None if self.config.seed is None else self.config.seed + index,
            )
            for index in range(len(self.requests))
        ]

    def results(self) -> list[Result]:
        return [self._result(setting) for setting in self.settings]

    def _result(self, setting: Setting) -> Result:
        passes = self.passes[setting]
        baseline = self.passes[replace(setting, drafter=BASELINE)]
        peers = {name: self.passes.get(replace(setting, drafter=name)) for name in PEERS}
        rates = [run.tokens_per_s for run in passes]
        first, verify_s = passes[0], sum(run.verify_s for run in passes)
        num_passes = sum(run.num_passes for run in passes)
        speedup, interval = speedup_over(passes, baseline)
        is_greedy = setting.temperature == 0
        differ = differences(self.llm.target, self.requests, first, baseline[0]) if is_greedy else []
        drafter = None if setting.is_peer else self._engines[setting.drafter]
        drafted = drafting([answer.rounds for answer in first.answers], drafter.num_drafted) if drafter else Drafting()
        return Result(
            **{item.name: getattr(drafted, item.name) for item in fields(Drafting)},
            drafter=setting.drafter,
            drafter_name=drafter.name if drafter else setting.drafter,
            batch=setting.batch,
            temperature=setting.temperature,
            tokens_per_s=statistics.median(rates),
            tokens_per_s_range=(min(rates), max(rates)),
            decode_tokens_per_s=median_of([run.decode_tokens_per_s for run in passes]),
            speedup=speedup,
            speedup_interval=interval,
            speedup_vs={name: speedup_over(passes, theirs)[0] for name, theirs in peers.items() if theirs},
            identical=1 - len(differ) / len(first.answers) if is_greedy else None,
            lossless=None if setting.is_peer else all(answer.lossless for run in passes for answer in run.answers),
            seconds={stage: median_of([run.seconds[stage] for run in passes]) for stage in first.seconds},
            bytes_per_s=self.llm.target.weight_bytes * num_passes / verify_s if verify_s else None,
            repetition=repetition([answer.token_ids for answer in first.answers]),
            num_answers=len(first.answers),
            num_output_tokens=first.num_tokens,
            marginals=first.marginals if first.marginals.num_rounds else None,
            differences=differ,
        )


def speedup_over(ours: list[Pass], theirs: list[Pass]) -> tuple[float, Interval]:
    """Compare the speed of two settings on the same requests. `ours`, `theirs`: their passes, one per repetition.
    Returns (speed-up of `ours` over `theirs`, its 95% bootstrap interval over prompts). The speed-up is the median over
    repetitions of the ratio of tokens per second.

    The bootstrap needs the time of each prompt. As answers run in parallel, the sum of these times is longer than the
    pass. The interval is therefore computed for the ratio of tokens per second of this sum, and then scaled to the
    speed-up."""
    ratios = [
        one.tokens_per_s / other.tokens_per_s for one, other in zip(ours, theirs, strict=True) if other.tokens_per_s
    ]
    value = statistics.median(ratios) if ratios else 0.0
    items = pairs(ours, theirs)
    (low, high), over_answers = bootstrap(items, rate_ratio), rate_ratio(items)
    if low is None or high is None or not over_answers:
        return value, (None, None)
    scale = value / over_answers
    return value, (low * scale, high * scale)


def median_of(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def differences(target: Target, requests: list[Request], ours: Pass, baseline: Pass) -> list[Difference]:
    """Return the first difference of each pair of unequal answers in `ours` and `baseline`. No request may be running,
    because each difference takes one more pass of the target.

    In float32, greedy answers must be equal. In bfloat16, passes over different numbers of tokens round differently, so
    near-ties may be decided differently; the gap between the two best logits shows whether a difference is a
    near-tie."""
    listed = []
    for request, one, other in zip(requests, ours.answers, baseline.answers, strict=True):
        if parted := parting(target, request.token_ids, one.token_ids, other.token_ids):
            listed.append(Difference(request.name, *parted))
    return listed


def introduction(llm: LLM, machine: Machine, config: BenchConfig) -> dict[str, Any]:
    """Return a description of a benchmark: the keys of `bench.passes.described` (model, device, weights), "machine",
    "ceiling_tokens_per_s" (upper limit of plain decoding's speed), "max_tokens" and "repeat"."""
    return {
        **described(llm),
        "machine": plain(machine),
        "ceiling_tokens_per_s": machine.ceiling_tokens_per_s(llm.target.weight_bytes),
        "max_tokens": config.max_tokens,
        "repeat": config.repeat,
    }


def as_line(bench: Bench, machine: Machine) -> dict[str, Any]:
    return {**set_figures(bench), **introduction(bench.llm, machine, bench.config)}


def set_figures(bench: Bench) -> dict[str, Any]:
    """Return the results of a finished `Bench`, which measured one prompt set, as a dict. Keys for the whole benchmark:

    - "results": one Result per setting (drafter, temperature, batch size)
    - "num_requests": number of requests measured
    - "num_skipped": number of user messages left out because they exceed the context

    Keys for one drafter, the last in the options, at the smallest batch size, in the first repetition:

    - "looping": a list with a dict for each temperature. "looping_share" is the share of answers that end in a
      repetition, "without_loops" is the acceptance length of the other answers
    - "looping_share": share of answers that end in a repetition, at the lowest temperature
    - "by_context": acceptance length by context length, at the lowest temperature
    - "texts": some answers of each temperature"""
    config = bench.config
    drafter, batch = config.drafters[-1], min(setting.batch for setting in bench.settings)
    passes = {heat: bench.passes[Setting(drafter, batch, heat)][0] for heat in config.temperatures}
    looping = [_looping(done, temperature) for temperature, done in passes.items()]
    return {
        "results": bench.results(),
        "looping": looping,
        "texts": [text for temperature, done in passes.items() for text in _texts(bench, done, temperature)],
        "by_context": by_context(
            (len(request.token_ids), answer.rounds)
            for request, answer in zip(bench.requests, passes[min(passes)].answers, strict=True)
        ),
        "num_requests": len(bench.requests),
        "num_skipped": bench.num_skipped,
        "looping_share": min(looping, key=lambda entry: entry["temperature"])["looping_share"],
    }


def _looping(done: Pass, temperature: float) -> dict[str, Any]:
    others = [answer.rounds for answer in done.answers if not is_loop(answer.token_ids)]
    whole = drafting([answer.rounds for answer in done.answers])
    rest = drafting(others) if others else Drafting()
    return {
        "temperature": temperature,
        "num_answers": len(done.answers),
        "looping_share": 1 - len(others) / len(done.answers),
        "tokens_per_round": whole.tokens_per_round,
        "tokens_per_round_interval": whole.tokens_per_round_interval,
        "without_loops": rest.tokens_per_round,
        "without_loops_interval": rest.tokens_per_round_interval,
    }


def _texts(bench: Bench, done: Pass, temperature: float) -> list[dict[str, Any]]:
    """Return answers spread evenly over the prompt set, each with the user's last turn."""
    count = min(NUM_TEXTS, len(done.answers))
    places = [index * len(done.answers) // count for index in range(count)]
    return [
        {
            "request": request.name,
            "temperature": temperature,
            "prompt": request.turn,
            "text": answer.text,
            "num_tokens": len(answer.token_ids),
            "tokens_per_round": drafting([answer.rounds]).tokens_per_round,
            "is_loop": is_loop(answer.token_ids),
        }
        for request, answer in ((bench.requests[place], done.answers[place]) for place in places)
    ]
