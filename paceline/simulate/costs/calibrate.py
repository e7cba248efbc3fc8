"""Fits the roofline's factors and overheads to measured step times, and measures the prediction error on held-out
sizes.

    paceline bench steps --drafter random-dflash --out runs/steps
    paceline simulate --calibrate runs/steps            ->  runs/steps/calibration.json

For a given ratio of the reading factor to the computing factor the fit is linear (non-negative least squares); the
ratio is found by search. Errors are relative, so that small passes weigh as much as large ones.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import ConfigError, reraised
from paceline.hardware import Machine
from paceline.simulate.answer import deployment_of
from paceline.simulate.config import CostsConfig
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.model_config import shape_of
from paceline.simulate.costs.roofline import Deployment, distinct_experts, works_of
from paceline.simulate.costs.rounds import (
    Calibration,
    DraftFit,
    PassFit,
    RooflineCosts,
    TimeTable,
    read_steps,
    table_of,
)
from paceline.simulate.costs.shapes import FORMATS, ModelShape, Precisions
from paceline.simulate.files import read_machine

HELD_OUT = 3
"""One of this number of sizes is held out of the fit, to measure the prediction error."""
FEWEST = 6
"""Minimum number of sizes for a fit."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured time in seconds of a target pass, of drafting or of a whole round. Its size is the batch size, the
    positions or drafts per row (`width`) and the context in tokens."""

    batch: float
    width: float
    """Positions per row of a target pass, or drafts per row of a drafting measurement."""
    context: float
    seconds: float

    @property
    def size(self) -> tuple[float, float]:
        return self.batch, self.width


@dataclass(frozen=True, slots=True)
class Steps:
    """Measured times of target passes, drafting, whole rounds and the host (launches, scheduling, sampling), from one
    or several steps.json of `paceline bench steps`."""

    verify: list[Observation]
    draft: list[Observation]
    rounds: list[Observation]
    """Times of whole rounds, if measured; width: positions per row of the target pass."""
    host_s: float
    model: str = ""
    drafter: str = ""
    experts: tuple[tuple[float, float, float], ...] = ()
    """For a mixture of experts: (batch, positions, distinct experts that the pass read in a layer)."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Measured and predicted seconds of whole rounds of one size (batch, positions per row). The prediction comes from
    a fit that did not use this size."""

    batch: float
    positions: float
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative error of the predicted tokens per second: 0.1 if they are 10% more than measured."""
        return self.measured_s / self.predicted_s - 1.0


@dataclass(frozen=True, slots=True)
class Fitted:
    """A calibration of the roofline, fitted to all measured times (`steps`), with an estimate of its prediction error.
    For this estimate, a second fit leaves out some sizes (batch, positions per row) and predicts them: `held_out`."""

    steps: Steps
    calibration: Calibration
    costs: RooflineCosts
    held_out: list[HeldOut]

    @property
    def mean_error(self) -> float:
        """Mean absolute relative error of the predicted tokens per second over the held-out sizes; 0.1 is 10%."""
        return statistics.fmean(abs(point.error) for point in self.held_out)

    @property
    def worst_error(self) -> float:
        return max(abs(point.error) for point in self.held_out)

    def as_json(self) -> dict[str, Any]:
        points = [{**asdict(point), "error": point.error} for point in self.held_out]
        errors = {"mean_error": self.mean_error, "worst_error": self.worst_error, "points": points}
        return {**self.calibration.as_json(), "held_out": errors}


def calibrate(config: CostsConfig, paths: Sequence[Path]) -> Fitted:
    """Fits the parameters of the roofline cost model to the step times in `paths` (runs of `paceline bench steps`).
    Model, machine and number formats are those of the first run, unless `config` sets them. Raises PacelineError for
    invalid or too few times, or an unknown model or machine."""
    files = [read_steps(path) for path in paths]
    steps, shape = steps_of(files), _measured_shape(config, files[0])
    known = precisions_of(files[0], shape.precisions)
    measured = machine_of(files[0]) if config.hardware is None else None
    deployment = deployment_of(config, known, measured, locality_of(steps, shape))
    return fitted(steps, shape, deployment)


def locality_of(steps: Steps, shape: ModelShape) -> float:
    """Returns the expert locality that best explains how many distinct experts the measured passes read
    (`steps.experts`). 0: each position selects its experts independently; 1: all positions of a sequence share them.
    Returns 0 if `steps` has no such numbers.

    Use the result only with step times of the same measurement: a model with random weights has a higher locality than
    a trained model on text."""
    experts = shape.experts
    if not experts or not steps.experts:
        return 0.0
    routed, chosen = experts.num_routed, experts.per_token

    def error(locality: float) -> float:
        read = [
            distinct_experts(routed, chosen, batch, width, locality) / counted
            for batch, width, counted in steps.experts
        ]
        return sum((each - 1) ** 2 for each in read)

    return min((step / 1000 for step in range(1001)), key=error)


def _measured_shape(config: CostsConfig, steps: dict[str, Any]) -> ModelShape:
    """Returns the shape of --model, or else of the measured config, or else of the measured model's name."""
    if config.model:
        return catalogue.find(config.model)
    if isinstance(steps.get("config"), dict):
        return shape_of(steps["config"], str(steps.get("model", "")))
    if not steps.get("model"):
        raise ConfigError("the step times do not say which model they are of: give --model")
    return catalogue.find(str(steps["model"]))


def steps_of(files: Sequence[dict[str, Any]]) -> Steps:
    """Combines the contents of several steps.json files. Raises ConfigError for invalid times, or if target passes of
    fewer than `FEWEST` sizes (batch, positions per row) were measured."""
    for steps in files:
        table_of(steps)  # refuses values that are no times
        if steps.get("rounds"):
            TimeTable.of(steps["rounds"], "rounds")
    verify, draft, rounds = (
        [
            Observation(batch, width, float(steps.get("context") or 0), spent)
            for steps in files
            for batch, width, spent in steps.get(kind) or []
        ]
        for kind in ("verify", "draft", "rounds")
    )
    if len({each.size for each in verify}) < FEWEST:
        raise ConfigError(
            f"a calibration needs the times of at least {FEWEST} sizes: run paceline bench steps with more"
        )
    host_s = statistics.median(float(steps.get("host_s") or 0.0) for steps in files)
    experts = [
        point for steps in files if steps.get("experts") for point in TimeTable.points(steps["experts"], "experts")
    ]
    return Steps(
        verify, draft, rounds, host_s, str(files[0].get("model", "")), str(files[0].get("drafter", "")), tuple(experts)
    )


def machine_of(steps: dict[str, Any]) -> Machine | None:
    """Returns the machine that the content of a steps.json describes, with its peak bandwidth and FLOP/s. Returns None
    if the description is incomplete. Raises ConfigError for values that are not speeds."""
    machine = steps.get("machine")
    if not isinstance(machine, dict) or {*machine, "cached_bytes_per_s"} != set(Machine.__dataclass_fields__):
        return None
    remedy = "run paceline bench steps again, or name a machine with --hardware"
    with reraised(ConfigError, "the machine of the step times cannot be read", remedy, ValueError):
        return read_machine(machine)


def precisions_of(steps: dict[str, Any], known: Precisions) -> Precisions:
    """Returns the number formats of the measured model. `steps`: content of a steps.json. `known`: number formats by
    the model's config.

    - Attention and cache: the "dtype" of `steps`. If it is missing or unknown, the cache's format in `known`.
    - Weights and experts: the "weight_format" of `steps` (the first one if a GGUF file has several). If it is missing
      or unknown, the same format as attention and cache."""
    dtype, stored = str(steps.get("dtype", "")), str(steps.get("weight_format", "")).partition("+")[0].lower()
    rest = dtype if dtype in FORMATS else known.kv
    weights = stored if stored in FORMATS else rest
    return replace(known, weights=weights, experts=weights, attention=rest, kv=rest)


def fitted(steps: Steps, shape: ModelShape, deployment: Deployment) -> Fitted:
    """Fits the costs of a round to all measured sizes (batch, positions per row). A second fit to about two thirds of
    the sizes predicts the others, to measure the prediction error. Raises ConfigError if no size can be left out."""
    calibration = fit(steps, shape, deployment)
    return Fitted(steps, calibration, calibration.costs(shape, deployment), predicted(steps, shape, deployment))


def fit(steps: Steps, shape: ModelShape, deployment: Deployment) -> Calibration:
    """Fits the costs of the target pass and of drafting to all measured times. The host's seconds per round are not
    fitted: the measured ones are used."""
    draft = fit_draft(steps.draft) if steps.draft else None
    verify = fit_pass(steps.verify, shape, deployment)
    where = (deployment.machine, deployment.precisions, deployment.expert_locality)
    return Calibration(verify, draft, steps.host_s, steps.model, steps.drafter, *where)


def fit_pass(times: list[Observation], shape: ModelShape, deployment: Deployment) -> PassFit:
    """Fits the roofline model of a target pass to measured times. The fit has a factor on the seconds of reading
    weights and caches, a factor on the seconds of arithmetic, and added seconds per pass, per position and per cached
    token."""
    parts = [_part_seconds(each, shape, deployment) for each in times]
    others = np.array([[1.0, each.batch * each.width, each.batch * each.context] for each in times])

    def solve(ratio: float) -> tuple[float, np.ndarray]:
        overlapped = np.array([[sum(max(ratio * read, compute) for read, compute in each)] for each in parts])
        return _relative(np.hstack([overlapped, others]), times)

    ratio = _searched(solve)
    computing, fixed_s, token_s, cached_s = solve(ratio)[1].tolist()
    return PassFit(ratio * computing, computing, fixed_s, token_s, cached_s)


def _part_seconds(each: Observation, shape: ModelShape, deployment: Deployment) -> list[tuple[float, float]]:
    """Returns (seconds of reading, seconds of arithmetic) of each part at the machine's full rates."""
    return [deployment.seconds(work) for work in works_of(shape, deployment, each.batch, each.width, each.context)]


def reached(costs: RooflineCosts, context: float) -> tuple[float, float]:
    """Returns how close target passes over one sequence come to the machine's full rates, as (share of the memory
    bandwidth, share of the arithmetic rate). 1.0 is the full rate. `costs`: fitted costs; `context`: cached tokens of
    the sequence.

    A share is the seconds that some work takes at the full rate, divided by the seconds that it takes by `costs`. For
    the bandwidth, this work is a pass over one position. For arithmetic, it is the work that a pass over 128 positions
    has in addition to one over 64.
    """

    def at(positions: float) -> tuple[float, float, float]:
        parts = _part_seconds(Observation(1, positions, context, 0.0), costs.shape, costs.deployment)
        return (
            sum(read for read, _ in parts),
            sum(compute for _, compute in parts),
            costs.verify_s(1, positions, context),
        )

    read_s, _, plain_s = at(1)
    (_, compute_64, pass_64), (_, compute_128, pass_128) = at(64), at(128)
    return read_s / plain_s, (compute_128 - compute_64) / (pass_128 - pass_64) if pass_128 > pass_64 else 1.0


def fit_draft(times: list[Observation]) -> DraftFit:
    """Fits two models of a drafter's cost: one pass for all drafts, and one pass per draft. Returns the fit with the
    smaller mean squared relative error."""
    fits = [_fit_draft(times, is_block) for is_block in (True, False)]
    return min(fits, key=lambda pair: pair[0])[1]


def _fit_draft(times: list[Observation], is_block: bool) -> tuple[float, DraftFit]:
    passes = np.array([1.0 if is_block else each.width for each in times])
    positions = np.array([each.batch * (each.width + 1) if is_block else each.batch for each in times])
    rows = np.array([each.batch for each in times])

    def solve(floor: float) -> tuple[float, np.ndarray]:
        return _relative(np.stack([passes, passes * np.maximum(floor, positions), rows], axis=1), times)

    floor = _searched(solve)
    error, terms = solve(floor)
    fixed_s, position_s, row_s = terms.tolist()
    return error, DraftFit(fixed_s, position_s, floor, row_s, is_block, max(round(each.width) for each in times))


def _relative(columns: np.ndarray, times: list[Observation]) -> tuple[float, np.ndarray]:
    """Returns the mean squared relative error, and the solution."""
    seconds = np.array([each.seconds for each in times])
    weighed = columns / seconds[:, None]
    solution = nnls(weighed, np.ones(len(times)))
    return float(np.mean((weighed @ solution - 1.0) ** 2)), solution


def nnls(columns: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Non-negative least squares: returns the x >= 0 [k] that minimises |columns @ x - wanted|. `columns`: [n, k] with
    a small k; `wanted`: [n].

    Solves ordinary least squares for every subset of the columns, scaled to unit length, and takes the best solution
    without negative terms (Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23)."""
    lengths = np.linalg.norm(columns, axis=0)
    scale = np.where(lengths > 0, lengths, 1.0)
    scaled, best, least = columns / scale, np.zeros_like(scale), np.linalg.norm(wanted)
    for used in itertools.product((True, False), repeat=len(scale)):
        solution = np.zeros_like(scale)
        solution[[*used]] = np.linalg.lstsq(scaled[:, [*used]], wanted, rcond=None)[0]
        error = np.linalg.norm(scaled @ solution - wanted)
        if error < least and (solution >= 0).all():
            best, least = solution, error
            if all(used):
                break  # the least of all solutions has no negative term
    return best / scale


def _searched(solve: Callable[[float], tuple[float, np.ndarray]]) -> float:
    """Returns the value with the smallest error over twelve powers of ten: a grid, then finer grids around the best
    value."""
    low, high, count = -6.0, 6.0, 121
    best = 0.0
    for _ in range(8):
        places = np.linspace(low, high, count)
        best = float(min(places, key=lambda place: solve(10.0**place)[0]))
        width = (high - low) / (count - 1)
        low, high, count = best - width, best + width, 21
    return 10.0**best


def predicted(steps: Steps, shape: ModelShape, deployment: Deployment) -> list[HeldOut]:
    """Fits the costs of a round to about two thirds of the sizes (batch, positions per row). Returns the measured and
    the predicted seconds of whole rounds at the other sizes. Raises ConfigError if no size can be left out."""
    held = held_out_sizes(steps)
    training = replace(
        steps,
        verify=[each for each in steps.verify if each.size not in held],
        draft=[each for each in steps.draft if (each.batch, each.width + 1) not in held],
    )
    costs = fit(training, shape, deployment).costs(shape, deployment)
    points = [
        HeldOut(each.batch, each.width, each.seconds, costs.round_s(each.batch, round(each.width) - 1, each.context))
        for each in measured_rounds(steps)
        if each.size in held
    ]
    if not points:
        raise ConfigError("no size was left to predict: measure more sizes with paceline bench steps")
    return points


def held_out_sizes(steps: Steps) -> set[tuple[float, float]]:
    """Returns the sizes (batch, positions per row) to leave out of a fit: about a third of the positions at each batch
    size. The smallest and the largest size are never left out."""
    batches = sorted({each.batch for each in steps.verify})
    held = set()
    for number, batch in enumerate(batches):
        widths = sorted({each.width for each in steps.verify if each.batch == batch})
        held |= {(batch, width) for place, width in enumerate(widths) if (place + number) % HELD_OUT == 1}
    return held - {min(each.size for each in steps.verify), max(each.size for each in steps.verify)}


def measured_rounds(steps: Steps) -> list[Observation]:
    """Returns the seconds of whole rounds. If they were not measured, they are computed as sums of the measured seconds
    of verification, drafting and the host.

    If drafting was measured at all, rounds with drafts are returned only for sizes at which it was measured.
    """
    drafts = {(each.batch, each.width + 1, each.context): each.seconds for each in steps.draft}
    rounds = steps.rounds or [
        replace(each, seconds=each.seconds + drafts.get((*each.size, each.context), 0.0) + steps.host_s)
        for each in steps.verify
    ]
    return [each for each in rounds if each.width == 1 or not drafts or (*each.size, each.context) in drafts]
