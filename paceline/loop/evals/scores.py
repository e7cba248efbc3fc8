"""Runs a suite on an answerer: replies, scores and their cost.

    scores = run_suite(suite, answerer)          scores.mean, scores.interval, scores.write(folder / "scores.json")

Each case has `samples` answers; its score is their mean, and intervals resample cases.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import ConfigError, PromptError, refuse, reraised
from paceline.loop.evals.config import PricesConfig
from paceline.loop.evals.sandbox.run import Sandbox
from paceline.loop.evals.scorers import SCORERS, score_code
from paceline.loop.evals.suite import Case, Suite
from paceline.report.statistics import Interval, Spread
from paceline.report.tables import SILENT, Advance, Progress
from paceline.runs.folder import record_of, write_whole

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Reply:
    """One generated answer to a case (question) of a suite, with its latency and token counts."""

    text: str
    seconds: float
    """Seconds from the request to the last token."""
    prompt_tokens: int = 0
    answer_tokens: int = 0
    finish_reason: str = "stop"
    lossless: bool = True
    """False if a lossy rule or mocked acceptance was used."""


class Answerer(Protocol):
    """Answers the cases of a suite, for example with a local model or an endpoint."""

    name: str

    def answers(self, cases: Sequence[Case], samples: int, advance: Advance) -> list[list[Reply]]:
        """Returns a list of `samples` replies for each case, in order. Calls `advance`, the progress callback, once per
        case. Raises an error if any case cannot be answered."""
        ...


class Judge(Protocol):
    """Scores an answer by comparison with a reference answer: `judge.Judge`, or a test double."""

    def score(self, case: Case, text: str) -> tuple[float, str]:
        """Returns the score of the answer `text`, and the reason for less than 1. Raises JudgeError if the judge is
        down or its verdicts are unusable."""
        ...


@dataclass(frozen=True, slots=True)
class Scored:
    """One case with its scored answers. Each field that is a tuple has one element per answer."""

    id: str
    kind: str
    scores: tuple[float, ...]
    texts: tuple[str, ...]
    why: tuple[str, ...]
    """Reasons for scores below 1; "" for a score of 1."""
    seconds: tuple[float, ...]
    prompt_tokens: int
    answer_tokens: tuple[int, ...]
    cut: int = 0
    """Number of answers truncated at the token limit."""

    @property
    def score(self) -> float:
        return statistics.fmean(self.scores)


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one answerer on one suite, case by case, with the time it took and the price of 1,000 answers."""

    name: str
    """Name of the answerer."""
    suite: str
    digest: str
    """Digest of the suite; only scores with the same digest are compared."""
    cases: tuple[Scored, ...]
    wall_s: float
    core_s: float | None = None
    """CPU seconds of this process while answering; None for an endpoint."""
    price_per_1000: float | None = None
    """Price of 1,000 answers, in the currency of the given prices."""
    lossless: bool = True
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        return statistics.fmean(case.score for case in self.cases)

    @property
    def interval(self) -> Interval:
        """95% interval (low, high) of the mean score over cases; (None, None) for a single case."""
        import numpy as np

        return resampled(np.array([case.score for case in self.cases]), 0.0) if len(self.cases) > 1 else (None, None)

    @property
    def latency(self) -> Spread:
        """Seconds per answer: mean and percentiles."""
        return Spread.of([seconds for case in self.cases for seconds in case.seconds])

    @property
    def num_answers(self) -> int:
        return sum(len(case.scores) for case in self.cases)

    @property
    def num_tokens(self) -> int:
        return sum(sum(case.answer_tokens) for case in self.cases)

    @property
    def num_cut(self) -> int:
        return sum(case.cut for case in self.cases)

    def as_line(self) -> dict[str, Any]:
        """Returns the summary as a JSON object, without single cases. "cases" is their number, "core_s_per_1000" the
        CPU seconds per 1,000 answers, "cut" the number of truncated answers."""
        return {
            "name": self.name,
            "suite": self.suite,
            "digest": self.digest,
            "cases": len(self.cases),
            "score": self.mean,
            "interval": list(self.interval),
            "p50_s": self.latency.p50,
            "p90_s": self.latency.p90,
            "answer_tokens": self.num_tokens,
            "tokens_per_s": self.num_tokens / self.wall_s if self.wall_s else None,
            "core_s_per_1000": None if self.core_s is None else 1000 * self.core_s / self.num_answers,
            "price_per_1000": self.price_per_1000,
            "cut": self.num_cut,
            "lossless": self.lossless,
        }

    def write(self, file: str | Path) -> Path:
        """Writes the scores and their provenance to `file` as JSON; returns its path. Raises CacheError when the disk
        cannot be written."""
        write_whole(Path(file), json.dumps(record_of({"scores": asdict(self)})) + "\n")
        return Path(file)


def resampled(values: np.ndarray, lowest: float, seed: int = 0, draws: int = 4000) -> tuple[float, float]:
    """Returns the 95% interval (low, high) of the mean of `values`: one value per case, between `lowest` and 1.

    Percentile bootstrap with `draws` resamples. Two pseudo-cases with the values `lowest` and 1 are added first (Bonett
    and Price 2012); without them, the interval would be too narrow where few cases differ.

    If all values are equal, resampling would give an interval of width 0. Instead, a share of 1 - 0.025^(1/cases) of
    all possible cases is assumed to have another value (Clopper and Pearson 1934): `lowest` for the low end, 1 for the
    high end.
    """
    import numpy as np

    if len(np.unique(values)) == 1:
        value, unseen = float(values[0]), 1 - 0.025 ** (1 / len(values))
        return value - unseen * (value - lowest), value + unseen * (1 - value)
    unique, counts = np.unique([*values, lowest, 1.0], return_counts=True)
    generator, size = np.random.default_rng(seed), len(values) + 2
    means = [generator.multinomial(size, counts / size, number) @ unique / size for number in parts_of(draws)]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)


def parts_of(draws: int, most: int = 500) -> list[int]:
    """Splits a number of random draws into parts, to bound memory; returns their sizes, each at most `most`."""
    return [min(most, draws - begin) for begin in range(0, draws, most)]


def read_scores(file: str | Path) -> Scores:
    """Reads a scores.json that `Scores.write` wrote. `file`: the file, or the run folder that contains it. Raises
    ConfigError if the file is missing or damaged."""
    path = Path(file) / "scores.json" if Path(file).is_dir() else Path(file)
    remedy = "give the folder of an evals run"
    caught = (OSError, ValueError, TypeError, LookupError, AttributeError)
    with reraised(ConfigError, f"{path} holds no scores", remedy, *caught):
        fields = json.loads(path.read_text(encoding="utf-8"))["scores"]
        return Scores(**{**fields, "cases": tuple(map(_read_case, fields["cases"]))})


def _read_case(fields: dict[str, Any]) -> Scored:
    """Returns the case with lists, as JSON has them, converted to tuples."""
    read: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return Scored(**read)


def run_suite(
    suite: Suite,
    answerer: Answerer,
    *,
    samples: int = 1,
    sandbox: Sandbox | None = None,
    judge: Judge | None = None,
    prices: PricesConfig | None = None,
    settings: dict[str, Any] | None = None,
    progress: Progress = SILENT,
) -> Scores:
    """Generates all answers to the suite's cases, then scores them.

    `samples`: answers per case. `sandbox`: runs code cases [default: with default limits]. `judge`: for cases with the
    scorer "judge". `settings`: stored with the scores. Raises ConfigError if the suite needs a judge and `judge` is
    None, SandboxError or JudgeError when sandbox or judge fails, and the errors of `answerer.answers`.
    """
    refuse(
        ConfigError,
        (samples < 1, f"samples must be at least 1, not {samples}"),
        (suite.needs_judge and judge is None, "this suite is scored by a judge: name one with --judge URL"),
    )
    if suite.runs_code:
        sandbox = sandbox or Sandbox()
        sandbox.check()
    began, core_began = time.perf_counter(), time.process_time()
    with progress.bar(f"{answerer.name} answers", len(suite)) as advance:
        replies = answerer.answers(suite.cases, samples, advance)
    wall_s, core_s = time.perf_counter() - began, time.process_time() - core_began
    if len(replies) != len(suite) or any(len(each) != samples for each in replies):
        raise PromptError(f"{answerer.name} left cases without an answer: an eval needs them all")
    cases: list[Scored] = []
    with progress.bar("scoring", len(suite)) as advance:
        for case, samples_of_case in zip(suite.cases, replies, strict=True):
            cases.append(_scored(case, samples_of_case, sandbox, judge))
            advance("scoring")
    flat = [reply for samples_of_case in replies for reply in samples_of_case]
    num_in, num_out = sum(each.prompt_tokens for each in flat), sum(each.answer_tokens for each in flat)
    return Scores(
        name=answerer.name,
        suite=suite.name,
        digest=suite.digest,
        cases=tuple(cases),
        wall_s=wall_s,
        core_s=None if getattr(answerer, "is_remote", False) else core_s,
        price_per_1000=(prices or PricesConfig()).of_1000(wall_s, len(suite) * samples, num_in, num_out),
        lossless=all(each.lossless for each in flat),
        settings={"samples": samples, **(settings or {})},
    )


def _scored(case: Case, replies: Sequence[Reply], sandbox: Sandbox | None, judge: Judge | None) -> Scored:
    kind = case.scorer["kind"]

    def verdict(text: str) -> tuple[float, str]:
        if kind == "code":
            assert sandbox is not None, "checked by run_suite"
            return score_code(case.scorer, text, sandbox)
        if kind == "judge":
            assert judge is not None, "checked by run_suite"
            return judge.score(case, text)
        return SCORERS[kind](case.scorer, text)

    verdicts = [verdict(reply.text) for reply in replies]
    return Scored(
        id=case.id,
        kind=kind,
        scores=tuple(score for score, _ in verdicts),
        texts=tuple(reply.text for reply in replies),
        why=tuple(why for _, why in verdicts),
        seconds=tuple(reply.seconds for reply in replies),
        prompt_tokens=replies[0].prompt_tokens,
        answer_tokens=tuple(reply.answer_tokens for reply in replies),
        cut=sum(reply.finish_reason == "length" for reply in replies),
    )
