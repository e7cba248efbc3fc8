"""From names, files and machines to the costs of a round, with the limits and warnings that go with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.config import EngineConfig, resolve
from paceline.errors import ConfigError
from paceline.hardware import KNOWN_MACHINES, Machine, this_machine
from paceline.simulate import catalogue, limits
from paceline.simulate.config import CostsConfig
from paceline.simulate.costs import (
    Calibration,
    DrafterCost,
    FractionDrafter,
    RooflineCosts,
    ShapeDrafter,
    StepCosts,
    ToyCosts,
    read_calibration,
)
from paceline.simulate.measured import MeasuredCosts, read_table
from paceline.simulate.roofline import Deployment
from paceline.simulate.shapes import ModelShape, Precisions, with_precisions
from paceline.simulate.speedup import Load

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_COST = 0.1
THIS = "this"


@dataclass(slots=True)
class Setup:
    """The costs of a round, and what a reader must know about them."""

    costs: StepCosts
    title: str
    kind: str
    """toy, roofline, measured or calibrated."""
    shape: ModelShape | None = None
    deployment: Deployment | None = None
    limits: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def table(self) -> MeasuredCosts | None:
        """The measured steps, where the costs are these."""
        return self.costs if isinstance(self.costs, MeasuredCosts) else None

    def ignore(self, config: CostsConfig, *names: str) -> Setup:
        """Warn of options that were given and have no effect."""
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(config, name) is not None]
        if given:
            self.warnings.append(f"{', '.join(given)} has no effect here: the {self.kind} model knows better")
        return self


def set_up(config: CostsConfig, loads: Sequence[Load]) -> Setup:
    """Raises the errors of whatever is not known or cannot be read. `loads` only decide on warnings."""
    if config.toy:
        shape = catalogue.find(config.model) if config.model else None
        title = f"{shape.name}, toy model" if shape else "toy model"
        setup = Setup(ToyCosts(), title, "toy", shape, limits=list(limits.TOY))
        return setup.ignore(config, "hardware", "precision", "drafter_cost", "drafter_params", "block")
    if config.table:
        return _measured(config, read_table(config.table), loads)
    if config.calibration:
        return _calibrated(config, read_calibration(config.calibration))
    shape = catalogue.find(config.model or DEFAULT_MODEL)
    deployment = deployment_of(config, shape.precisions, machine_named(config.hardware))
    costs = RooflineCosts(shape, deployment, drafter_of(config, deployment))
    told = limits.roofline_limits(shape, deployment)
    return Setup(costs, _title(shape, deployment), "roofline", shape, deployment, told)


def _measured(config: CostsConfig, table: MeasuredCosts, loads: Sequence[Load]) -> Setup:
    if config.drafter_params is not None:
        raise ConfigError("--drafter-params needs a machine's rates, a table has none: use --drafter-cost")
    table = replace(table, drafter=_fraction(config))
    shape = catalogue.find(config.model) if config.model else None
    setup = Setup(table, table.title, "measured", shape, limits=list(limits.MEASURED))
    if table.context and any(table.context != load.context for load in loads):
        setup.limits.append(f"Times are those of {table.context:.0f} tokens of context, whatever --context says.")
    low, high, _, widest = table.verify.span
    if not all(low <= load.batch <= high and load.max_draft < widest for load in loads):
        setup.warnings.append(
            f"the table was measured for batch {low:g} to {high:g} and up to {widest:g} positions: "
            "what is beyond is extrapolated"
        )
    return setup.ignore(config, "hardware", "precision", *(("drafter_cost", "block") if table.draft else ()))


def _calibrated(config: CostsConfig, calibration: Calibration) -> Setup:
    shape = catalogue.find(config.model or calibration.model or DEFAULT_MODEL)
    machine = calibration.machine if config.hardware is None else None
    precisions = calibration.precisions or shape.precisions
    deployment = deployment_of(config, precisions, machine or machine_named(config.hardware))
    costs = calibration.costs(shape, deployment, drafter_of(config, deployment))
    told = [*limits.CALIBRATED, *limits.roofline_limits(shape, deployment)[1:]]
    setup = Setup(costs, f"{_title(shape, deployment)}, calibrated", "calibrated", shape, deployment, told)
    return setup.ignore(config, *(("drafter_cost", "drafter_params", "block") if calibration.draft else ()))


def deployment_of(config: CostsConfig, known: Precisions, machine: Machine) -> Deployment:
    """A model on a machine, in the precisions asked for, else those that are known."""
    variant = "layers" if config.per_layer else "whole"
    return Deployment(machine, with_precisions(known, config.precision), config.gpus, config.expert_locality, variant)


def drafter_of(config: CostsConfig, deployment: Deployment) -> DrafterCost:
    if config.drafter_params is None:
        return _fraction(config)
    rates = deployment.flops_per_s("bfloat16"), deployment.bytes_per_s
    return ShapeDrafter(config.drafter_params, *rates, block=config.block)


def _fraction(config: CostsConfig) -> FractionDrafter:
    return FractionDrafter(DEFAULT_COST if config.drafter_cost is None else config.drafter_cost, config.block)


def machine_named(name: str | None) -> Machine:
    """A known machine by its name, in any case and with or without spaces; None and "this": the GPU at hand, else the CPU,
    measured. Raises ConfigError with the names."""
    wanted = (name or THIS).strip().lower().replace("-", " ").replace("_", " ")
    if wanted in (THIS, "this machine", "cpu"):
        return this_machine(resolve(EngineConfig(device="cpu" if wanted == "cpu" else "auto")).device)
    for known, machine in KNOWN_MACHINES.items():
        if wanted.replace(" ", "") == known.lower().replace(" ", "") or wanted == known.lower().split()[0]:
            return machine
    raise ConfigError(
        f"--hardware {name!r} is not known: choose from {', '.join(KNOWN_MACHINES)}, or {THIS} to measure this one"
    )


def _title(shape: ModelShape, deployment: Deployment) -> str:
    count = f"{deployment.num_gpus} x " if deployment.num_gpus > 1 else ""
    precisions = deployment.precisions
    parts = f"weights {precisions.weights}" + (f", experts {precisions.experts}" if shape.experts else "")
    return f"{shape.name} on {count}{deployment.machine.name}, {parts}, cache {precisions.kv}"
