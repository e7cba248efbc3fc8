"""`paceline evals run` as a library call: scores a model's answers to a suite, and compares them with an earlier run.

done = evaluate("suite.jsonl", EngineConfig(model="smollm2-135m"), EvalSettings(endpoint=EndpointConfig()))
done.scores        # the score of each case
done.refusals      # reasons for which the gates refuse the model; empty if it passes
done.comparison    # with an earlier run (`Gate.no_worse_than`); None without one
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.bench.config import BASELINE
from paceline.config import EngineConfig, read_api_keys, short_name
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, refuse
from paceline.loop.evals.answerers import EndpointAnswerer, LLMAnswerer
from paceline.loop.evals.compare import Comparison, Gate, compare
from paceline.loop.evals.config import EndpointConfig, EvalSampling, JudgeConfig, PricesConfig
from paceline.loop.evals.judge import Judge
from paceline.loop.evals.report import write_report
from paceline.loop.evals.sandbox.run import Limits, Sandbox
from paceline.loop.evals.scores import Answerer, Scores, read_scores, run_suite
from paceline.loop.evals.suite import read_suite
from paceline.net.streaming import Client, served_name
from paceline.report.tables import SILENT, Progress
from paceline.runs.folder import RunFolder, check_own, plain

JUDGE_KEY = "PACELINE_JUDGE_KEY"


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """All settings of `evaluate` apart from the suite and the engine."""

    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    sampling: EvalSampling = field(default_factory=EvalSampling)
    prices: PricesConfig = field(default_factory=PricesConfig)
    limits: Limits = field(default_factory=Limits)
    gate: Gate = field(default_factory=Gate)
    samples: int = 1
    limit: int | None = None
    name: str | None = None
    check_drafter: bool = True
    """With a drafter and greedy sampling, also run the model alone; all answers must be identical."""
    unsafe_code: bool = False


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Result of `evaluate`: scores, comparisons, and the gate's decision."""

    scores: Scores
    run: RunFolder
    refusals: list[str]
    """Reasons why the gate fails; empty if it passes."""
    comparison: Comparison | None = None
    """Comparison with the earlier run that the setting `no_worse_than` names."""
    drafter_check: Comparison | None = None
    """Comparison with the same model without its drafter."""

    def as_line(self) -> dict[str, Any]:
        return {
            **self.scores.as_line(),
            "comparison": self.comparison and self.comparison.as_line(),
            "drafter_check": self.drafter_check and self.drafter_check.as_line(),
            "passed": not self.refusals,
            "refusals": self.refusals,
            "run": self.run.path,
        }


def evaluate(
    suite_file: str | Path,
    engine: EngineConfig,
    config: EvalSettings,
    *,
    out: str | Path | None = None,
    progress: Progress = SILENT,
) -> Evaluated:
    """Scores the answers of a model or an endpoint to a suite, applies the gate, and writes a run folder.

    `out`: the run folder [default: a new one in runs/]. Raises PromptError and ConfigError on unusable suites and
    settings. Raises DownloadError, JudgeError or SandboxError when the endpoint, the judge or the sandbox fails, and
    ModelNotFoundError, ModelFileError or UnsupportedModelError if the model cannot be loaded.
    """
    check_own(out, "evals", config.gate.no_worse_than)
    suite, gate = read_suite(suite_file).first(config.limit), config.gate
    other = read_scores(gate.no_worse_than) if gate.no_worse_than else None
    refuse(
        ConfigError,
        (
            other is not None and other.digest != suite.digest,
            f"{gate.no_worse_than} answered another suite than {suite_file}: run both on the same one",
        ),
        (
            other is None and (gate.margin is not None or gate.same_text),
            "margin and same_text need another run: name it with no_worse_than",
        ),
    )
    settings = plain({"engine": engine, "asked": config, "suite_file": str(suite_file), "samples": config.samples})
    options: dict[str, Any] = {"samples": config.samples, "prices": config.prices, "settings": settings}
    options |= {"sandbox": Sandbox(config.limits, unsafe=config.unsafe_code), "progress": progress}
    with contextlib.ExitStack() as stack:
        if suite.needs_judge and config.judge.url is not None:
            options["judge"] = stack.enter_context(open_judge(config.judge, "--judge"))
        answerer, alone_scores = _answerer(engine, config, stack, progress), None
        checks_drafter = config.check_drafter and engine.drafter != BASELINE and config.sampling.temperature == 0
        if isinstance(answerer, LLMAnswerer) and checks_drafter:
            drafter = answerer.llm.drafter
            answerer.llm.use_drafter(None)
            alone = LLMAnswerer(answerer.llm, config.sampling, f"{short_name(engine.model)} alone")
            alone_scores = run_suite(suite, alone, **options)
            answerer.llm.use_drafter(drafter)
        scores = run_suite(suite, answerer, **options)
    comparison = compare(other, scores) if other else None
    check = compare(alone_scores, scores) if alone_scores else None
    refusals = gate.refusals(scores, comparison) + (Gate(same_text=True).refusals(scores, check) if check else [])
    run = RunFolder.create("evals", settings, out)
    scores.write(run.path / "scores.json")
    write_report([scores], [each for each in (comparison, check) if each], refusals, settings, run, progress)
    return Evaluated(scores, run, refusals, comparison, check)


def compare_runs(
    before: str | Path, after: str | Path, gate: Gate, *, out: str | Path | None = None, progress: Progress = SILENT
) -> tuple[Comparison, list[str], RunFolder]:
    """Compares two finished runs, given by their folders. Returns (comparison, reasons why the gate fails, run folder).

    The reasons are empty if the gate passes. `out`: the run folder [default: a new one in runs/]. Raises ConfigError
    when the runs are of different suites.
    """
    check_own(out, "evals", before, after)
    one, two = read_scores(before), read_scores(after)
    comparison = compare(one, two)
    refusals = gate.refusals(two, comparison)
    settings = {"before": str(before), "after": str(after), **asdict(gate)}
    run = RunFolder.create("evals", settings, out)
    write_report([one, two], [comparison], refusals, settings, run, progress)
    return comparison, refusals, run


def _answerer(engine: EngineConfig, config: EvalSettings, stack: contextlib.ExitStack, progress: Progress) -> Answerer:
    endpoint = config.endpoint
    if endpoint.url is None:
        llm = LLM.of(replace(engine, max_batch=config.sampling.at_once))
        progress.loaded(llm)
        return LLMAnswerer(llm, config.sampling, config.name)
    key = next(iter(read_api_keys((), endpoint.key_file)), None)
    client = stack.enter_context(contextlib.closing(Client(endpoint.url, key, endpoint.timeout_s)))
    return EndpointAnswerer(client, served_name(client, endpoint.served_name), config.sampling, config.name)


@contextlib.contextmanager
def open_judge(config: JudgeConfig, option: str, timeout_s: float = 600.0) -> Iterator[Judge]:
    """Context manager that yields a judge connected to the server in `config`.

    `option`: name of the option with the server's address, for error messages. Raises ConfigError on an invalid address
    or key, DownloadError if the server does not answer, ModelNotFoundError if the server does not list the model.
    """
    assert config.url is not None
    key = next(iter(read_api_keys((), config.key_file, JUDGE_KEY)), None)
    with contextlib.closing(Client(config.url, key, timeout_s, option)) as client:
        yield Judge(client, served_name(client, config.served_name))
