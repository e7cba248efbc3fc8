"""Library calls behind `paceline simulate` and `paceline simulate-serving`.

`set_up` resolves names, files and machines to the costs of a round in seconds, with sentences on the limits of the
prediction and warnings.

    answer = predict_all(
        CostsConfig(model="Qwen3-8B", hardware="H100"), PredictConfig(batch=(1, 8), acceptance="0.8,0.75")
    )
    answer.predictions[0].best_draft_length
    simulate_server(CostsConfig(table=Path("runs/steps")), ServingConfig(rate=(0.5, 1, 2))).loads
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.config import EngineConfig, resolve
from paceline.errors import ConfigError
from paceline.hardware import Machine, this_machine
from paceline.plan.marginals import Expected, Marginals
from paceline.plan.trees import MOST_NODES
from paceline.simulate import limits
from paceline.simulate.assumed import ACCEPTANCE, assumed
from paceline.simulate.config import CostsConfig, PredictConfig, ServingConfig, given_of
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.overhead import Overhead, overhead_of, with_overhead
from paceline.simulate.costs.roofline import Deployment, check_shares
from paceline.simulate.costs.rounds import (
    Calibration,
    DrafterCost,
    FractionDrafter,
    MeasuredCosts,
    RooflineCosts,
    ShapeDrafter,
    StepCosts,
    ToyCosts,
    read_calibration,
    read_table,
)
from paceline.simulate.costs.shapes import ModelShape, Precisions, num_bytes, with_precisions
from paceline.simulate.flags import PLACEHOLDER, Serving, server_flags
from paceline.simulate.marginals import read_marginals
from paceline.simulate.server.drafts import Survival
from paceline.simulate.server.load import LoadFigures, capacity, parse_lengths, sweep, workload
from paceline.simulate.server.replay import Compared, compare, read_passes, recorded_survival, rows_of
from paceline.simulate.server.server import Case, ServerShape
from paceline.simulate.speedup import Acceptance, Load, Prediction, most_drafts, parse_acceptance, predict
from paceline.simulate.trees import BEST, TreePrediction, parse_sizes, predict_trees

MAX_ROWS, MAX_DRAFT = 8, 16
SHARES = (0.3, 0.6, 0.8, 0.95, 1.2)
"""Default request rates of open loops, as shares of the capacity of plain decoding."""
MACHINE = ("hardware", "precision", "expert_locality", "per_layer")
"""Options of the roofline's machine that measured and toy costs do not use."""
DEFAULT_MODEL = "smollm2-135m"
THIS = "this"


@dataclass(slots=True)
class Setup:
    """Inputs of a prediction: the cost model `costs` (seconds of a decode round by batch size, drafts and context), the
    model and the machine. `limits` and `warnings` are sentences to print with the prediction."""

    costs: StepCosts
    title: str
    kind: str
    """Source of the costs: toy, roofline, measured, calibrated, or own (step times of a replayed run)."""
    shape: ModelShape | None = None
    deployment: Deployment | None = None
    limits: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    overhead: Overhead | None = None
    """Overhead that is included in every round of `costs`."""
    bare: StepCosts | None = None
    """The costs without the overhead; None if `overhead` is None."""
    assumed: str = ""
    """Sentence that lists the assumed default values (`simulate/assumed.py`)."""

    def ignore(self, config: CostsConfig, *names: str) -> Setup:
        """Adds a warning if `config` sets any of the options `names`, because this setup's cost model does not use
        them. Returns the setup itself."""
        if given := given_of(config, *names):
            self.warnings.append(f"{', '.join(given)} has no effect here: the {self.kind} model knows better")
        return self


def set_up(config: CostsConfig, loads: Sequence[Load]) -> Setup:
    """Returns the round costs, model, machine and warnings that `config` selects. `loads`: batch sizes and context
    lengths to predict. An overhead (seconds added to every round) is computed at the context length of `loads[0]` and
    used for all loads. Raises PacelineError for an unknown or invalid model, machine, option or file."""
    setup = _source(config, loads)
    if setup.shape and setup.deployment:
        setup.warnings += limits.load_warnings(setup.shape, setup.deployment, loads)
    overhead = overhead_of(setup.costs, loads[0].context, config.overhead_ms, config.plain_rate, config.server_log)
    if overhead:
        setup.overhead, setup.bare = overhead, setup.costs
        setup.costs = with_overhead(setup.costs, overhead.seconds, overhead.token_s)
        text = limits.TEXTS["overhead_by_position" if overhead.token_s else "overhead"]
        amounts = {"ms": f"{1e3 * overhead.seconds:.3g}", "token_ms": f"{1e3 * overhead.token_s:.3g}"}
        setup.limits.insert(1, text.format(source=overhead.source, **amounts))
    return setup


def _source(config: CostsConfig, loads: Sequence[Load]) -> Setup:
    if config.toy:
        shape = catalogue.find(config.model) if config.model else None
        title = f"{shape.name}, toy model" if shape else "toy model"
        setup = Setup(ToyCosts(), title, "toy", shape, limits=list(limits.TEXTS["toy"]))
        return setup.ignore(config, *MACHINE, "drafter_cost", "drafter_params", "block")
    if config.table:
        return _measured(config, read_table(config.table), loads)
    if config.calibration:
        return _calibrated(config, read_calibration(config.calibration))
    shape = catalogue.find(config.model or DEFAULT_MODEL)
    deployment = deployment_of(config, shape.precisions)
    check_shares(shape, deployment.num_gpus)
    costs = RooflineCosts(shape, deployment, drafter_of(config, deployment))
    sentences = limits.roofline_limits(shape, deployment)
    return Setup(costs, _title(shape, deployment), "roofline", shape, deployment, sentences)


def _measured(config: CostsConfig, table: MeasuredCosts, loads: Sequence[Load]) -> Setup:
    if config.drafter_params is not None:
        raise ConfigError("--drafter-params needs a machine's rates, a table has none: use --drafter-cost")
    table = replace(table, drafter=_fraction(config))
    shape = catalogue.find(config.model) if config.model else None
    setup = Setup(table, table.title, "measured", shape, limits=list(limits.TEXTS["measured"]))
    if table.context and any(table.context != load.context for load in loads):
        setup.limits.append(f"Times are those of {table.context:.0f} tokens of context, whatever --context says.")
    low, high, _, widest = table.verify.span
    if not all(low <= load.batch <= high and most_drafts(table, load.max_draft) < widest for load in loads):
        setup.warnings.append(
            f"the table was measured for batch {low:g} to {high:g} and up to {widest:g} positions: "
            "what is beyond is extrapolated"
        )
    return setup.ignore(config, *MACHINE, *(("drafter_cost", "block") if table.draft else ()))


def _calibrated(config: CostsConfig, calibration: Calibration) -> Setup:
    shape = catalogue.find(config.model or calibration.model or DEFAULT_MODEL)
    known, measured = calibration.precisions or shape.precisions, calibration.machine
    deployment = deployment_of(config, known, measured, calibration.expert_locality)
    check_shares(shape, deployment.num_gpus)
    costs = calibration.costs(shape, deployment, drafter_of(config, deployment))
    sentences = [*limits.TEXTS["calibrated"], *limits.roofline_limits(shape, deployment)[1:]]
    setup = Setup(costs, f"{_title(shape, deployment)}, calibrated", "calibrated", shape, deployment, sentences)
    return setup.ignore(config, *(("drafter_cost", "drafter_params", "block") if calibration.draft else ()))


def deployment_of(
    config: CostsConfig, known: Precisions, measured: Machine | None = None, locality: float = 0.0
) -> Deployment:
    """Returns the machine, number formats, number of GPUs and expert locality that `config` sets. The other arguments
    are defaults for options that are not set: the machine `measured` (None: this computer), the number formats `known`,
    and the expert locality `locality` (0: each position selects its experts independently; 1: all positions of a
    sequence share them). Raises ConfigError for unknown or contradicting options."""
    number, name = catalogue.counted("--hardware", config.hardware or THIS)
    if number > 1 and config.gpus not in (1, number):
        raise ConfigError(f"--hardware {config.hardware!r} and --gpus {config.gpus} are two numbers: leave one out")
    machine = measured if measured and config.hardware is None else machine_named(name)
    precisions = with_precisions(known, config.precision)
    own = config.expert_locality
    return Deployment(machine, precisions, max(number, config.gpus), locality if own is None else own, config.per_layer)


def drafter_of(config: CostsConfig, deployment: Deployment) -> DrafterCost:
    """Returns the drafter's cost: computed by a roofline if `config` has its number of parameters, else a share of a
    target pass. The roofline assumes float32 parameters if the target's weights are float32, else bfloat16, because
    servers do not quantise drafters."""
    if config.drafter_params is None:
        return _fraction(config)
    number_format = "float32" if deployment.precisions.weights == "float32" else "bfloat16"
    rates = deployment.flops_per_s(number_format), deployment.bytes_per_s
    return ShapeDrafter(config.drafter_params, *rates, num_bytes(number_format), config.block)


def _fraction(config: CostsConfig) -> FractionDrafter:
    return FractionDrafter(limits.DEFAULT_COST if config.drafter_cost is None else config.drafter_cost, config.block)


def is_here(name: str) -> bool:
    """True if a machine's name means this computer: "this", "this machine" or "cpu", in any case."""
    return name.lower().replace("-", " ").replace("_", " ") in (THIS, "this machine", "cpu")


def machine_named(name: str) -> Machine:
    """Returns a known machine by its name, ignoring case and spaces. "this" measures this machine's GPU or, without
    one, its CPU; "cpu" measures its CPU. Raises ConfigError for an unknown name; the message lists the known ones."""
    if is_here(name):
        return this_machine(resolve(EngineConfig(device="cpu" if name.lower() == "cpu" else "auto")).device)
    return catalogue.known_machine("--hardware", name, f"or {THIS} to measure this one")


def _title(shape: ModelShape, deployment: Deployment) -> str:
    count = f"{deployment.num_gpus} x " if deployment.num_gpus > 1 else ""
    precisions = deployment.precisions
    parts = f"weights {precisions.weights}" + (f", experts {precisions.experts}" if shape.experts else "")
    return f"{shape.name} on {count}{deployment.machine.name}, {parts}, cache {precisions.kv}"


@dataclass(frozen=True, slots=True)
class Answer:
    """Predicted speed-ups of speculation for each batch size, with the costs and acceptance used."""

    setup: Setup
    acceptance: Acceptance
    predictions: list[Prediction]
    flags: dict[str, str]
    """Server -> command line that serves the model with the draft length predicted for the first batch size."""
    without: list[tuple[int, float]] = field(default_factory=list)
    """(best draft length, speed-up) for each batch size, predicted without the overhead; empty if there is no
    overhead."""
    trees: list[TreePrediction] = field(default_factory=list)
    """Predictions of draft trees for each batch size, if requested."""

    def as_json(self) -> dict[str, Any]:
        """Returns the prediction as a JSON object. Figures of the first batch size are at the top level. "sweep" lists
        those of all batch sizes, or is None if there is only one."""
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
            "overhead": self._overhead(),
            "trees": [asdict(each) for each in self.trees] or None,
        }

    def _overhead(self) -> dict[str, Any] | None:
        """Milliseconds of the overhead, and the first batch's prediction without it."""
        if self.setup.overhead is None:
            return None
        length, speedup = self.without[0]
        overhead = self.setup.overhead
        known = {"ms": 1e3 * overhead.seconds, "ms_per_position": 1e3 * overhead.token_s, "source": overhead.source}
        return {**known, "speedup_without": speedup, "best_draft_length_without": length}


def predict_all(costs: CostsConfig, config: PredictConfig) -> Answer:
    """Predicts the speed-up of speculation for each batch size in `config`. Raises ConfigError for invalid options,
    acceptance, marginals or tree sizes, and another PacelineError for a model that cannot be predicted."""
    marginals = read_marginals(config.marginals or "greedy") if config.tree else None
    if marginals and not config.acceptance:
        kind, acceptance_text = "histogram" if marginals.num_rounds else "conditional", "of the marginals"
        acceptance = Acceptance(tuple(marginals.firsts), kind, marginals.num_rounds)
        max_draft = min(config.max_draft, acceptance.depth)
    else:
        acceptance_text, max_draft = config.acceptance or ACCEPTANCE, config.max_draft
        acceptance = parse_acceptance(acceptance_text)
    loads = [Load(batch, config.context, max_draft) for batch in config.batch]
    costs, cost_limits = limits.cost_by_method(costs, config.method)
    setup = set_up(costs, loads)
    loads = [replace(load, max_draft=most_drafts(setup.costs, max_draft)) for load in loads]
    setup.limits += cost_limits
    predictions = [predict(setup.costs, acceptance, load, setup.kind != "toy") for load in loads]
    bare = [predict(setup.bare, acceptance, load) for load in loads] if setup.bare else []
    setup.limits += limits.acceptance_limits(acceptance, loads[0])
    setup.assumed = assumed(config.context, ", ".join(map(str, config.batch)), acceptance_text)
    flags = server_flags(_serving(costs, config, setup, predictions[0]))
    trees = _trees(costs, config, setup, marginals, loads, predictions) if marginals else []
    return Answer(
        setup, acceptance, predictions, flags, [(each.best_draft_length, each.speedup) for each in bare], trees
    )


def _trees(
    costs: CostsConfig,
    config: PredictConfig,
    setup: Setup,
    marginals: Marginals,
    loads: list[Load],
    chains: list[Prediction],
) -> list[TreePrediction]:
    """Predicts trees for each load; adds the assumptions to the limits."""
    sizes, num_slots = parse_sizes(config.tree or BEST), loads[0].max_draft
    if config.acceptance:
        acceptance = parse_acceptance(config.acceptance)
        if num_slots:
            marginals = marginals.with_firsts([acceptance.at(place) for place in range(1, num_slots + 1)])
        setup.limits.append(limits.TEXTS["tree_shares"])
    setup.limits.append(limits.TEXTS["trees"].format(slots=num_slots))
    expected, has_unit = [Expected(1.0, 0.0)] * (MOST_NODES + 1), setup.kind != "toy"
    if num_slots:
        expected = marginals.first_slots(num_slots).expected(MOST_NODES)
    pairs = zip(loads, chains, strict=True)
    return [predict_trees(setup.costs, expected, load, chain, sizes, has_unit) for load, chain in pairs]


def _serving(costs: CostsConfig, config: PredictConfig, setup: Setup, prediction: Prediction) -> Serving:
    is_path = costs.model is not None and os.path.exists(costs.model)
    known = setup.shape.name if setup.shape else "YOUR-MODEL"
    model = costs.model or known
    return Serving(
        model=model if is_path else catalogue.served_name(model),
        method=config.method or ("dflash" if costs.block else "mtp"),
        drafter=config.drafter or PLACEHOLDER,
        num_drafted=prediction.best_draft_length,
        batch=prediction.batch,
        num_gpus=setup.deployment.num_gpus if setup.deployment else costs.gpus,
        has_8bit_cache=bool(setup.deployment and setup.deployment.precisions.kv == "float8"),
        has_decoder=is_path or catalogue.has_decoder(known),
    )


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """Results of a simulated server. A simulation has one result for each load and policy (rule for the number of
    drafts), in `loads`. A replay of a recorded run has one for each load and `speculate` setting, in `compared`."""

    setup: Setup
    server: ServerShape
    survival: Survival
    """Survival curve that the simulation draws from: share of rounds whose first i drafts are accepted."""
    loads: list[LoadFigures] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    """Simulated and measured results, if a recorded run is replayed; `loads` is empty then."""

    @property
    def num_within(self) -> int:
        """Number of results of a replay (`compared`) that are close to the measured ones: at most 10% off in tokens per
        second, and at most 30% off in the median time to the first token."""
        return sum(each.is_within for each in self.compared)

    def as_json(self, config: ServingConfig) -> dict[str, Any]:
        errors = ("throughput_error", "first_token_error", "has_throughput", "is_within")
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
    """Simulates each load under each policy (rule for the number of drafts), or replays the recorded run
    `config.against`. Raises ConfigError for invalid options or a run that cannot be replayed, and another PacelineError
    for a model that cannot be predicted."""
    passes = read_passes(config.against) if config.against else []
    jobs = [job for each in passes for job in each.jobs]
    if not passes:
        prompt = parse_lengths("--prompt-tokens", config.prompt_tokens)
        jobs = workload(config.requests, prompt, parse_lengths("--answer-tokens", config.answer_tokens), config.seed)
    has_own = bool(passes) and costs == CostsConfig() and all(each.steps for each in passes)
    context = round(sum(job.prompt_tokens + job.answer_tokens / 2 for job in jobs) / len(jobs))
    rows = config.max_rows or (rows_of(config.against) if config.against else None) or MAX_ROWS
    if has_own:
        setup = Setup(StepCosts(), f"steps of {config.against}", "own", limits=list(limits.TEXTS["own"]))
    else:
        setup = set_up(costs, [Load(rows, context, config.max_draft or 1)])
        setup.assumed = assumed(context, f"up to {rows}", "of the run" if passes else config.acceptance or ACCEPTANCE)
    setup.limits[:0] = limits.TEXTS["server"]
    marginals = read_marginals(config.marginals) if config.marginals else None
    if marginals:
        marginals = marginals.first_slots(most_drafts(setup.costs, config.max_draft or len(marginals.chances_KM)))
        survival = marginals.survival
    elif passes and not config.acceptance:
        survival = recorded_survival(passes)[: config.max_draft]
    else:
        most = most_drafts(setup.costs, config.max_draft or setup.costs.max_draft or MAX_DRAFT)
        survival = tuple(parse_acceptance(config.acceptance or ACCEPTANCE).survival(most))
    server = ServerShape(rows, config.prefill_chunk or None, config.request_overhead)
    if passes:
        compared = compare(passes, None if has_own else setup.costs, server, survival, seed=config.seed)
        return ServerAnswer(setup, server, survival, compared=compared)
    case, rates = Case(jobs, setup.costs, server, survival, config.seed, marginals=marginals), config.rate
    policies = list(dict.fromkeys(config.policy))
    for policy in policies:
        case.planner(policy)  # refuses an unknown one before the work
    if policies and not rates and not config.concurrency:
        most_per_s = capacity(case, "off")
        rates = tuple(float(f"{share * most_per_s:.2g}") for share in SHARES)
    return ServerAnswer(setup, server, survival, sweep(case, policies, rates, config.concurrency))
