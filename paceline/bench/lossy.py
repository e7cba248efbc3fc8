"""Measures gain and cost of lossy acceptance rules. Plain decoding, lossless speculation and each rule alternate on
tasks with checkable answers.

    paceline bench lossy --tasks tickets=heldout.jsonl,humaneval=humaneval.jsonl --settings "typical;lenience:0.5"

Total variation and divergence from the target's distribution are computed in the verify passes (`verify/lossy.py`).
Speeds are compared with lossless speculation request by request; intervals are bootstraps over requests.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.bench.config import BASELINE, WARM_UP_TOKENS, LossyConfig
from paceline.bench.passes import Answer, Engines, Pass, Request, make_requests, pairs, rate_ratio, rates, run_pass
from paceline.bench.tasks import Task, read_task
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.lossy import Lossy
from paceline.report.pages import COLORS, WIDTH_INCHES, new_figure, plain_axes, svg_of
from paceline.report.statistics import BUSY, Interval, Rounds, bootstrap, is_possible, ratio_of_sums
from paceline.report.tables import Advance, Column, Table, ignore, with_interval
from paceline.types import SamplingParams

PLAIN, LOSSLESS = "plain decoding", "lossless"
FEWEST = 5
"""Minimum number of requests for an interval of speeds."""
MARKERS = "oD^vPX"
"""matplotlib markers of lossy settings; the next marker is used once all colours are used."""


@dataclass(slots=True, kw_only=True)
class Result:
    """Results of one setting (plain decoding, lossless speculation or a lossy rule) on one task: speed, task score, and
    deviation from the target's distribution."""

    task: str
    setting: str
    lossless: bool
    tokens_per_round: float
    tokens_per_s: float
    beside_lossless: float | None
    """Ratio of tokens per second to lossless speculation's, on the same requests. None if the speed-up over plain
    decoding exceeds the acceptance length: then the machine was busy."""
    beside_lossless_interval: Interval
    mean_tv: float
    """Mean total variation distance from the target's distribution, over tokens."""
    mean_kl: float
    """Mean KL divergence from the target's distribution, in nats; `verify/lossy.py` defines it for greedy answers."""
    share_changed: float
    """Share of tokens that differ from the lossless rule's token with the same random numbers."""
    score: float
    score_interval: Interval
    score_gain: float
    """Mean difference of the task score from lossless speculation's, on the same requests."""
    score_gain_interval: Interval

    @property
    def is_faster(self) -> bool:
        """True if the setting changes the distribution (mean total variation above 0) and is faster than lossless
        speculation: the whole 95% interval of the speed ratio is above 1."""
        low = self.beside_lossless_interval[0]
        return low is not None and low > 1.0 and self.mean_tv > 0


class LossyBench:
    """Runs all tasks with plain decoding, lossless speculation and each lossy rule, on one model that was loaded with
    `allow_lossy`. Call `run()`, then `results()`."""

    def __init__(self, llm: LLM, drafter: str, config: LossyConfig) -> None:
        self.llm, self.config = llm, config
        self.rules: dict[str, Lossy | None] = {PLAIN: None, LOSSLESS: None}
        self.rules |= {str(rule): rule for rule in config.rules()}
        self.tasks = [read_task(task, config.limit) for task in config.tasks]
        self.passes: dict[tuple[str, str], list[Pass]] = {}
        self._engines = Engines(llm)
        self._engines.add(BASELINE, llm.make_drafter(BASELINE))
        self._engines.add("drafter", llm.make_drafter(drafter))

    def run(self, advance: Advance = ignore) -> None:
        """Run each task `repeat` times with every setting (plain decoding, lossless speculation, each lossy rule),
        after a short warm-up. `advance` gets a text that names task and setting after each pass. Raises ConfigError if
        a prompt does not fit the context."""
        for task in self.tasks:
            requests, num_skipped = make_requests(self.llm, task.prompts, self.config.max_tokens)
            if num_skipped or len(requests) != len(task.prompts):
                raise ConfigError(f"task {task.name} has prompts that do not fit: raise max_len, or lower max_tokens")
            for setting in self.rules:
                self._pass(setting, requests, WARM_UP_TOKENS)
            for number in range(self.config.repeat):
                order = list(self.rules) if number % 2 == 0 else list(self.rules)[::-1]
                for setting in order:
                    done = self._pass(setting, requests, self.config.max_tokens)
                    self.passes.setdefault((task.name, setting), []).append(done)
                    advance(f"{task.name}, {setting}")

    def _pass(self, setting: str, requests: list[Request], max_tokens: int) -> Pass:
        engine, config = self._engines.use(BASELINE if setting == PLAIN else "drafter"), self.config
        common = SamplingParams(temperature=config.temperature, max_tokens=max_tokens, lossy=self.rules[setting])
        params = [replace(common, seed=config.seed + index) for index in range(len(requests))]
        return run_pass(engine, requests, params, 1)

    def results(self) -> list[Result]:
        return [self._result(task, setting) for task in self.tasks for setting in self.rules]

    def _result(self, task: Task, setting: str) -> Result:
        passes, base = self.passes[task.name, setting], self.passes[task.name, LOSSLESS]
        answers = passes[0].answers
        both, plain = pairs(passes, base), self.passes[task.name, PLAIN]
        scores = [(task.score(index, answer.text),) for index, answer in enumerate(answers)]
        others = [task.score(index, answer.text) for index, answer in enumerate(base[0].answers)]
        gains = [(score - before,) for (score,), before in zip(scores, others, strict=True)]
        acceptance_length = Rounds.counted([one for answer in answers for one in answer.rounds]).tokens_per_round
        is_sound = is_possible(rate_ratio(pairs(passes, plain)), acceptance_length)
        has_interval = is_sound and len(both) >= FEWEST
        return Result(
            task=task.name,
            setting=setting,
            lossless=all(answer.lossless for answer in answers),
            tokens_per_round=acceptance_length,
            tokens_per_s=ratio_of_sums(rates(passes)),
            beside_lossless=rate_ratio(both) if is_sound else None,
            beside_lossless_interval=bootstrap(both, rate_ratio) if has_interval else (None, None),
            mean_tv=_by_token(answers, "mean_tv"),
            mean_kl=_by_token(answers, "mean_kl"),
            share_changed=_by_token(answers, "share_changed"),
            score=_mean(scores),
            score_interval=bootstrap(scores, _mean),
            score_gain=_mean(gains),
            score_gain_interval=bootstrap(gains, _mean),
        )

    def texts(self) -> list[dict[str, str]]:
        """Return all answers of the first repetition, as dicts with the keys "task", "setting" and "text"."""
        return [
            {"task": task, "setting": setting, "text": answer.text}
            for (task, setting), passes in self.passes.items()
            for answer in passes[0].answers
        ]


def _mean(items: list[tuple[float, ...]]) -> float:
    return statistics.fmean(item[0] for item in items)


def _by_token(answers: list[Answer], name: str) -> float:
    """Return the token-weighted mean of the field `name` of `Price`; answers without a lossy rule count as 0."""
    pairs = [
        (getattr(answer.price, name) * len(answer.token_ids) if answer.price else 0.0, len(answer.token_ids))
        for answer in answers
    ]
    return ratio_of_sums(pairs)


def verdict(results: list[Result]) -> str:
    """Return the conclusion as Markdown text: which lossy rules are faster than lossless speculation, each with its
    speed ratio, total variation and task score. It also says if no rule is faster, or if the machine was too busy for a
    verdict."""
    lossy = [result for result in results if not result.lossless]
    faster = [result for result in lossy if result.is_faster]
    if not lossy:
        return "No lossy setting was measured."
    if any(result.beside_lossless is None for result in results):
        return f"No verdict: {BUSY}. A setting was faster than plain decoding by more than its acceptance length."
    if not faster:
        quicker = [result for result in lossy if result.beside_lossless is not None and result.beside_lossless > 1.0]
        doubt = f" ({len(quicker)} of {len(lossy)} measured slightly faster, within chance)" if quicker else ""
        return (
            "**Lossless speculation dominates everywhere**: no lossy setting is significantly faster on any task, and "
            f"each costs fidelity{doubt}. No lossy rule pays here."
        )
    lines = [
        f"- {result.setting} on {result.task}: "
        f"{with_interval(result.beside_lossless, result.beside_lossless_interval, unit='x')} lossless speculation, "
        f"mean total variation {result.mean_tv:.4f}, score {with_interval(result.score, result.score_interval)}, "
        f"{with_interval(result.score_gain, result.score_gain_interval, '{:+.2f}')} compared with it"
        for result in faster
    ]
    rest = len(lossy) - len(faster)
    ending = (
        [f"Lossless speculation dominates the other {rest}: they are not significantly faster and cost fidelity."]
        if rest
        else []
    )
    return "\n".join(["Significantly faster than lossless speculation, at a price:", "", *lines, "", *ending]).rstrip()


def table(results: list[Result]) -> Table:
    columns = [
        Column("task", lambda result: result.task),
        Column("setting", lambda result: result.setting),
        Column("tokens/round", lambda result: result.tokens_per_round, "{:.2f}", align="right"),
        Column("tokens/s", lambda result: result.tokens_per_s, "{:.1f}", align="right"),
        Column(
            "x lossless",
            lambda result: with_interval(result.beside_lossless, result.beside_lossless_interval) or "busy: repeat",
            align="right",
            cut=" [",
        ),
        Column("mean TV", lambda result: result.mean_tv, "{:.4f}", align="right"),
        Column("mean KL", lambda result: result.mean_kl, "{:.4f}", align="right"),
        Column("changed", lambda result: result.share_changed, "{:.1%}", align="right"),
        Column("score", lambda result: with_interval(result.score, result.score_interval), align="right", cut=" ["),
        Column("lossless", lambda result: "yes" if result.lossless else "NO"),
    ]
    notes = [
        "intervals: bootstrap over requests; x lossless: tokens per second, request by request, all settings in turns",
        "mean TV, KL (nats), changed: per token, from the verify passes; greedy answers count 1 where another token "
        "is generated",
    ]
    return Table(columns, results, title="Lossy rules compared with lossless decoding", notes=notes)


def draw(results: list[Result]) -> str:
    """Return an SVG chart with two plots per task: score, and total variation, over tokens/s. A line joins the
    Pareto-optimal settings. Raises ConfigError if matplotlib is missing."""
    tasks = list(dict.fromkeys(result.task for result in results))
    with new_figure(WIDTH_INCHES * max(len(tasks), 1.4), 1.4 * WIDTH_INCHES) as figure:
        grid = figure.subplots(2, len(tasks), squeeze=False)
        for column, task in enumerate(tasks):
            own = [result for result in results if result.task == task]
            grid[0][column].set_title(task)
            for axes, name, ylabel, sign in (
                (grid[0][column], "score", "score", 1.0),
                (grid[1][column], "mean_tv", "mean total variation", -1.0),
            ):
                for number, result in enumerate(own):
                    marker = "s" if result.lossless else MARKERS[number // len(COLORS) % len(MARKERS)]
                    color = COLORS[number % len(COLORS)]
                    axes.plot(result.tokens_per_s, getattr(result, name), marker, color=color, label=result.setting)
                best = pareto([(result.tokens_per_s, sign * getattr(result, name)) for result in own])
                axes.plot([x for x, _ in best], [sign * y for _, y in best], linewidth=1, color="#7f7f7f", zorder=0)
                axes.set(xlabel="tokens/s", ylabel=ylabel)
                plain_axes(axes)
            grid[0][column].legend(frameon=False, fontsize=6)
        return svg_of(figure)


def pareto(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto-optimal points (more is better in both coordinates), sorted by the first coordinate."""
    beaten = [any(a >= x and b >= y and (a, b) != (x, y) for a, b in points) for x, y in points]
    return sorted({point for point, is_beaten in zip(points, beaten, strict=True) if not is_beaten})


def as_line(bench: LossyBench) -> dict[str, Any]:
    results = bench.results()
    is_busy = any(result.beside_lossless is None for result in results)
    return {
        "results": [asdict(result) for result in results],
        "verdict": verdict(results),
        "lossless_dominates": None if is_busy else not any(each.is_faster for each in results if not each.lossless),
        **{name: getattr(bench.config, name) for name in ("temperature", "max_tokens", "repeat", "seed")},
    }
