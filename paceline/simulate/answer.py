"""The library calls behind `paceline simulate` and `paceline simulate-serving`: a question in, figures and their limits out.

found = predict_all(CostsConfig(model="Qwen3-8B", hardware="H100"), PredictConfig(batch=(1, 8), acceptance="0.8,0.75"))
found.predictions[0].best_draft_length
simulate_server(CostsConfig(table=Path("runs/steps")), ServingConfig(rate=(0.5, 1, 2))).loads
simulate_server(CostsConfig(table=Path("runs/steps")), ServingConfig(against=Path("runs/bench-serving-1"))).compared
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.simulate import catalogue, limits
from paceline.simulate.acceptance import Acceptance, parse_acceptance
from paceline.simulate.config import CostsConfig, PredictConfig, ServingConfig
from paceline.simulate.flags import PLACEHOLDER, Serving, server_flags
from paceline.simulate.load import LoadFigures, capacity, parse_lengths, sweep, workload
from paceline.simulate.replay import Compared, compare, read_passes, recorded_survival, rows_of
from paceline.simulate.roofline import memory_need
from paceline.simulate.serving import Case, ServerShape, Survival
from paceline.simulate.setup import Setup, set_up
from paceline.simulate.speedup import Load, Prediction, predict

MAX_ROWS, MAX_DRAFT, ACCEPTANCE = 8, 16, "0.8"
SHARES = (0.3, 0.6, 0.8, 0.95, 1.2)
"""The rates of open loops when no load is given, as shares of what plain decoding can finish."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Predictions, one for each batch, with everything a reader must know about them."""

    setup: Setup
    acceptance: Acceptance
    predictions: list[Prediction]
    flags: dict[str, str]
    """Server -> command line for the first batch."""

    def as_json(self) -> dict[str, Any]:
        """The first batch's prediction on top, all of a sweep below."""
        deployment = self.setup.deployment
        return {
            **asdict(self.predictions[0]),
            "model": self.setup.shape.name if self.setup.shape else None,
            "kind": self.setup.kind,
            "hardware": deployment.machine.name if deployment else None,
            "gpus": deployment.num_gpus if deployment else None,
            "precisions": asdict(deployment.precisions) if deployment else None,
            "acceptance": {"kind": self.acceptance.kind, "conditional": self.acceptance.conditional},
            "sweep": [asdict(each) for each in self.predictions] if len(self.predictions) > 1 else None,
            "warnings": self.setup.warnings,
            "limits": self.setup.limits,
            "flags": self.flags,
        }


def predict_all(costs: CostsConfig, config: PredictConfig) -> Answer:
    """Predict each batch. Raises PacelineError."""
    acceptance = parse_acceptance(config.acceptance)
    loads = [Load(batch, config.context, config.max_draft) for batch in config.batch]
    setup = set_up(costs, loads)
    predictions = [predict(setup.costs, acceptance, load, setup.kind != "toy") for load in loads]
    setup.limits += limits.acceptance_limits(acceptance, loads[0])
    setup.warnings += _load_warnings(setup, loads)
    return Answer(setup, acceptance, predictions, server_flags(_serving(costs, config, setup, predictions[0])))


def _load_warnings(setup: Setup, loads: list[Load]) -> list[str]:
    """Of the smallest load that does not fit, since larger ones do not either, and of a context that is too long."""
    shape, deployment = setup.shape, setup.deployment
    if shape is None or deployment is None:
        return []
    needs = [(memory_need(shape, deployment, each.batch, each.context), each) for each in loads]
    needs.sort(key=lambda pair: pair[1].batch)
    too_large = [limits.memory_warning(need, load, deployment) for need, load in needs if not need.fits][:1]
    return [warning for warning in (*too_large, limits.context_warning(shape, loads[0])) if warning]


def _serving(costs: CostsConfig, config: PredictConfig, setup: Setup, prediction: Prediction) -> Serving:
    is_path = costs.model is not None and os.path.exists(costs.model)
    model = setup.shape.name if setup.shape and not is_path else costs.model or "YOUR-MODEL"
    return Serving(
        model=catalogue.served_name(model),
        method=config.method or ("dflash" if costs.block else "mtp"),
        drafter=config.drafter or PLACEHOLDER,
        num_drafted=prediction.best_draft_length,
        batch=prediction.batch,
        num_gpus=costs.gpus,
        has_8bit_cache=bool(setup.deployment and setup.deployment.precisions.kv == "float8"),
    )


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """A simulated server's figures: one for each load and policy, or for each load and contender of a replayed run."""

    setup: Setup
    server: ServerShape
    survival: Survival
    """How drafts stood in the simulation."""
    loads: list[LoadFigures] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    """Filled instead of `loads` when a run was replayed."""

    @property
    def num_within(self) -> int:
        """Comparisons that count as predicted."""
        return sum(each.is_within for each in self.compared)

    def as_json(self, config: ServingConfig) -> dict[str, Any]:
        errors = ("throughput_error", "first_token_error", "is_within")
        compared = [asdict(each) | {name: getattr(each, name) for name in errors} for each in self.compared]
        replayed = {
            "compared": compared,
            "num_within": self.num_within,
            "survival": self.survival,
            "against": config.against,
        }
        return {
            **(replayed if config.against else {"results": self.loads}),
            "kind": self.setup.kind,
            "title": self.setup.title,
            "seed": config.seed,
            "warnings": self.setup.warnings,
        }


def simulate_server(costs: CostsConfig, config: ServingConfig) -> ServerAnswer:
    """Simulate each load under each policy, or replay the run `config.against`. Raises PacelineError."""
    passes = read_passes(config.against) if config.against else []
    jobs = [job for each in passes for job in each.jobs]
    if not passes:
        prompt = parse_lengths("--prompt-tokens", config.prompt_tokens)
        jobs = workload(config.requests, prompt, parse_lengths("--answer-tokens", config.answer_tokens), config.seed)
    context = round(sum(job.prompt_tokens + job.answer_tokens / 2 for job in jobs) / len(jobs))
    setup = set_up(costs, [Load(config.max_rows or MAX_ROWS, context, config.max_draft or 1)])
    setup.limits[:0] = limits.SERVER
    if passes and not config.acceptance:
        survival = recorded_survival(passes)[: config.max_draft]
    else:
        most = config.max_draft or (setup.table and setup.table.max_draft) or MAX_DRAFT
        survival = tuple(parse_acceptance(config.acceptance or ACCEPTANCE).survival(most))
    rows = config.max_rows or (config.against and rows_of(config.against)) or MAX_ROWS
    adapts = setup.table is not None and setup.table.prefill_adapts  # prompts are cut as the engine that was measured does
    server = ServerShape(rows, config.prefill_chunk or None, adapts, config.request_overhead)
    if passes:
        compared = compare(passes, setup.costs, server, survival, seed=config.seed)
        return ServerAnswer(setup, server, survival, compared=compared)
    case, rates = Case(jobs, setup.costs, server, survival, config.seed), config.rate
    if not rates and not config.concurrency:
        most_per_s = capacity(case, "off")
        rates = tuple(float(f"{share * most_per_s:.2g}") for share in SHARES)
    return ServerAnswer(setup, server, survival, sweep(case, list(dict.fromkeys(config.policy)), rates, config.concurrency))
