"""`paceline simulate`: resolve names and files, predict, print the table, the limits and the flags."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.commands.simulate_table import print_prediction, print_sweep
from paceline.commands.terminal import print_json, say
from paceline.config import EngineConfig, resolve
from paceline.errors import ConfigError
from paceline.hardware import KNOWN_MACHINES, Machine, this_machine
from paceline.simulate import catalogue, limits
from paceline.simulate.acceptance import Acceptance
from paceline.simulate.calibrated import CalibratedCosts, Calibration, read_calibration
from paceline.simulate.costs import MeasuredCosts, RooflineCosts, StepCosts, ToyCosts
from paceline.simulate.drafter_cost import DrafterCost, FractionDrafter, ShapeDrafter
from paceline.simulate.flags import PLACEHOLDER, Serving, server_flags
from paceline.simulate.measured import read_table
from paceline.simulate.memory import memory_need
from paceline.simulate.recorded import parse_acceptance
from paceline.simulate.roofline import Deployment
from paceline.simulate.shapes import ModelShape, with_precisions
from paceline.simulate.speedup import Load, Prediction, predict

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_COST = 0.1
THIS = "this"


@dataclass(frozen=True, slots=True)
class SimulateAsk:
    """A `simulate` command, its options read; see cli_simulate.py for what they mean."""

    batches: tuple[int, ...] = (1,)
    model: str | None = None
    hardware: str | None = None
    gpus: int = 1
    context: int = 4096
    acceptance: str = "0.8"
    drafter_cost: float | None = None
    drafter_params: float | None = None
    block: int | None = None
    max_draft: int = 16
    precision: str | None = None
    expert_locality: float = 0.0
    per_layer: bool = False
    toy: bool = False
    table: Path | None = None
    calibration: Path | None = None
    flags: bool = False
    method: str | None = None
    drafter: str | None = None
    out: Path | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        if not self.batches:
            raise ConfigError("--batch is empty: write it as 1, or 1,8,32 for a sweep")
        if sum((self.toy, self.table is not None, self.calibration is not None)) > 1:
            raise ConfigError("--toy, --table and --calibration exclude each other: leave all but one out")
        if self.drafter_cost is not None and self.drafter_params is not None:
            raise ConfigError("--drafter-cost and --drafter-params say the same in two ways: leave one out")


@dataclass(slots=True)
class Setup:
    """What was asked for, resolved: where times come from, and what to say of it."""

    costs: StepCosts
    title: str
    kind: str
    """toy, roofline, measured or calibrated."""
    shape: ModelShape | None = None
    deployment: Deployment | None = None
    limits: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def simulate(ask: SimulateAsk) -> None:
    """Predict each batch and print: people read stdout, or stderr beside --json."""
    acceptance = parse_acceptance(ask.acceptance)
    loads = [Load(batch, ask.context, ask.max_draft) for batch in ask.batches]
    setup = set_up(ask)
    predictions = [predict(setup.costs, acceptance, load, setup.kind != "toy") for load in loads]
    warnings = setup.warnings + _load_warnings(setup, loads)
    told = setup.limits + limits.acceptance_limits(acceptance, loads[0])
    flags = server_flags(_serving(ask, setup, predictions[0])) if ask.flags or ask.as_json else {}
    print_sweep(setup.title, predictions, ask.as_json)
    if len(predictions) == 1:
        print_prediction(predictions[0], acceptance, ask.as_json)
    _print_notes(warnings, told, flags if ask.flags else {}, ask.as_json)
    if ask.as_json:
        print_json(_line(setup, acceptance, predictions, warnings, told, flags))


def set_up(ask: SimulateAsk) -> Setup:
    """Raises the errors of whatever is not known or cannot be read."""
    if ask.toy:
        shape = catalogue.find(ask.model) if ask.model else None
        title = f"{shape.name}, toy model" if shape else "toy model"
        setup = Setup(ToyCosts(), title, "toy", shape, limits=list(limits.TOY))
        return _without_effect(setup, ask, "hardware", "precision", "drafter_cost", "drafter_params", "block")
    if ask.table:
        return _measured(ask, ask.table)
    if ask.calibration:
        return _calibrated(ask, read_calibration(ask.calibration))
    shape = catalogue.find(ask.model or DEFAULT_MODEL)
    deployment = deployment_of(ask, shape, machine_named(ask.hardware or THIS))
    costs = RooflineCosts(shape, deployment, drafter_of(ask, deployment))
    told = limits.roofline_limits(shape, deployment)
    return Setup(costs, _title(shape, deployment), "roofline", shape, deployment, told)


def _measured(ask: SimulateAsk, file: Path) -> Setup:
    table = read_table(file)
    if ask.drafter_params is not None:
        raise ConfigError("--drafter-params needs a machine's rates, a table has none: use --drafter-cost")
    costs = MeasuredCosts(table, FractionDrafter(_cost(ask), ask.block))
    setup = Setup(costs, table.title or str(file), "measured", limits=list(limits.MEASURED))
    if ask.model:
        setup.shape = catalogue.find(ask.model)
    if table.context and table.context != ask.context:
        setup.limits.append(f"Times are those of {table.context:.0f} tokens of context, whatever --context says.")
    _warn_beyond(setup, ask, table.verify.span)
    ignored = ("drafter_cost", "block") if table.draft else ()
    return _without_effect(setup, ask, "hardware", "precision", *ignored)


def _warn_beyond(setup: Setup, ask: SimulateAsk, span: tuple[float, float, float, float]) -> None:
    """Where the table has to be continued."""
    low, high, _, widest = span
    if not all(low <= batch <= high for batch in ask.batches) or ask.max_draft + 1 > widest:
        setup.warnings.append(
            f"the table was measured for batch {low:g} to {high:g} and up to {widest:g} positions: "
            "what is beyond is extrapolated"
        )


def _calibrated(ask: SimulateAsk, calibration: Calibration) -> Setup:
    shape = catalogue.find(ask.model or calibration.model or DEFAULT_MODEL)
    machine = calibration.machine if ask.hardware is None else None
    deployment = deployment_of(ask, shape, machine or machine_named(ask.hardware or THIS), calibration)
    costs = CalibratedCosts(shape, deployment, calibration, drafter_of(ask, deployment))
    told = [*limits.CALIBRATED, *limits.roofline_limits(shape, deployment)[1:]]
    setup = Setup(costs, f"{_title(shape, deployment)}, calibrated", "calibrated", shape, deployment, told)
    ignored = ("drafter_cost", "drafter_params", "block") if calibration.draft else ()
    return _without_effect(setup, ask, *ignored)


def deployment_of(ask: SimulateAsk, shape: ModelShape, machine: Machine, calibration: Calibration | None = None) -> Deployment:
    known = calibration.precisions if calibration and calibration.precisions else shape.precisions
    variant = "layers" if ask.per_layer else "whole"
    return Deployment(machine, with_precisions(known, ask.precision), ask.gpus, ask.expert_locality, variant)


def drafter_of(ask: SimulateAsk, deployment: Deployment) -> DrafterCost:
    if ask.drafter_params is None:
        return FractionDrafter(_cost(ask), ask.block)
    return ShapeDrafter(ask.drafter_params, deployment.flops_per_s("bfloat16"), deployment.bytes_per_s, block=ask.block)


def _cost(ask: SimulateAsk) -> float:
    return DEFAULT_COST if ask.drafter_cost is None else ask.drafter_cost


def machine_named(name: str) -> Machine:
    """Case and spelling of the spaces aside; "this" is the GPU at hand, else the CPU. Raises ConfigError with the names."""
    wanted = name.strip().lower().replace("-", " ").replace("_", " ")
    if wanted in (THIS, "this machine", "cpu"):
        return this_machine(resolve(EngineConfig(device="cpu" if wanted == "cpu" else "auto")).device)
    for known, machine in KNOWN_MACHINES.items():
        if wanted.replace(" ", "") == known.lower().replace(" ", "") or wanted == known.lower().split()[0]:
            return machine
    raise ConfigError(
        f"--hardware {name!r} is not known: choose from {', '.join(KNOWN_MACHINES)}, or {THIS} to measure this one"
    )


def _without_effect(setup: Setup, ask: SimulateAsk, *names: str) -> Setup:
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(ask, name) is not None]
    if given:
        setup.warnings.append(f"{', '.join(given)} has no effect here: the {setup.kind} model knows better")
    return setup


def _title(shape: ModelShape, deployment: Deployment) -> str:
    count = f"{deployment.num_gpus} x " if deployment.num_gpus > 1 else ""
    precisions = deployment.precisions
    parts = f"weights {precisions.weights}" + (f", experts {precisions.experts}" if shape.experts else "")
    return f"{shape.name} on {count}{deployment.machine.name}, {parts}, cache {precisions.kv}"


def _load_warnings(setup: Setup, loads: list[Load]) -> list[str]:
    """Of the first load that does not fit: larger ones do not either."""
    shape, deployment = setup.shape, setup.deployment
    if shape is None or deployment is None:
        return []
    name, num_gpus = deployment.machine.name, deployment.num_gpus
    needs = [
        (load, memory_need(shape, deployment, load.batch, load.context)) for load in sorted(loads, key=lambda load: load.batch)
    ]
    too_large = [limits.memory_warning(need, load, num_gpus, name) for load, need in needs]
    first = next((warning for warning in too_large if warning), None)
    return [warning for warning in (first, limits.context_warning(shape, loads[0])) if warning]


def _serving(ask: SimulateAsk, setup: Setup, prediction: Prediction) -> Serving:
    return Serving(
        model=catalogue.served_name(setup.shape.name if setup.shape and not _is_path(ask.model) else ask.model or "YOUR-MODEL"),
        method=ask.method or ("dflash" if ask.block else "mtp"),
        drafter=ask.drafter or PLACEHOLDER,
        num_drafted=prediction.best_draft_length,
        batch=prediction.batch,
        num_gpus=ask.gpus,
        has_8bit_cache=bool(setup.deployment and setup.deployment.precisions.kv == "float8"),
    )


def _is_path(model: str | None) -> bool:
    return model is not None and os.path.exists(model)


def _print_notes(warnings: list[str], told: list[str], flags: dict[str, str], as_json: bool) -> None:
    show = say if as_json else print
    for warning in dict.fromkeys(warnings):
        show(f"warning: {warning}")
    show("Limits:")
    for sentence in told:
        show(f"- {sentence}")
    for server, command in flags.items():
        show(f"{server}:  {command}")


def _line(
    setup: Setup,
    acceptance: Acceptance,
    predictions: list[Prediction],
    warnings: list[str],
    told: list[str],
    flags: dict[str, str],
) -> dict[str, Any]:
    """The JSON line: the first batch's prediction on top, all of a sweep below."""
    deployment = setup.deployment
    return {
        **predictions[0].as_line(),
        "model": setup.shape.name if setup.shape else None,
        "kind": setup.kind,
        "hardware": deployment.machine.name if deployment else None,
        "gpus": deployment.num_gpus if deployment else None,
        "precisions": asdict(deployment.precisions) if deployment else None,
        "acceptance": {"kind": acceptance.kind, "conditional": acceptance.conditional},
        "sweep": [prediction.as_line() for prediction in predictions] if len(predictions) > 1 else None,
        "warnings": list(dict.fromkeys(warnings)),
        "limits": told,
        "flags": flags,
    }


def list_known(as_json: bool) -> None:
    """Models and machines of the catalogue."""
    known = catalogue.entries()
    shapes = catalogue.all_shapes()
    if as_json:
        unavailable = {name: entry["unavailable"] for name, entry in known.items() if "unavailable" in entry}
        print_json({"models": list(shapes), "unavailable": unavailable, "machines": list(KNOWN_MACHINES)})
        return
    for name, entry in known.items():
        shape = shapes.get(name)
        size = f"{shape.num_parameters / 1e9:.4g}B, {shape.num_active / 1e9:.3g}B active" if shape else entry["unavailable"]
        print(f"{name:22s} {size}")
    print("machines: " + ", ".join([*KNOWN_MACHINES, THIS]))
