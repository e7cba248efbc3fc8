"""Compares published speeds of other systems with the roofline's predictions: without an overhead, and with one that is
fitted to the rate of plain decoding alone.

    for row in served():
        row.published, row.without, row.within, row.error_with

`paceline/simulate/landmarks.json` has the published figures, their sources and the assumptions; `make_landmarks.py`
writes the tables into docs/explanation/landmarks.md. A published speed-up is not used in its own prediction: the
overhead comes from the system's plain rate of one stream. Drafter costs, chances and contexts are those of a published
calculation (the walk-through).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import paceline.simulate
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.overhead import overhead_s, with_overhead
from paceline.simulate.costs.roofline import MEASURED_LOCALITY, Deployment, distinct_experts
from paceline.simulate.costs.rounds import FractionDrafter, RooflineCosts, ShapeDrafter, StepCosts
from paceline.simulate.speedup import Load, best, constant, curve, from_survival, tokens_per_round

FILE = Path(paceline.simulate.__file__).with_name("landmarks.json")
PUBLISHED: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
COST, MOST = 0.10, 16
"""Assumptions of the walk-through (a published calculation): cost of a drafter pass as a share of a plain target pass
(COST), and maximum draft length (MOST)."""
WAYS = {"token by token": (0.75, None), "in blocks": (0.89, 16)}
"""Drafting method of the walk-through -> (chance that a draft is accepted, drafts per pass; None: one)."""


@dataclass(frozen=True, slots=True)
class Served:
    """One published decoding rate of a system (tokens/s of one stream), with the published and the predicted speed-up
    over plain decoding. A speed-up is a ratio of tokens/s summed over all streams."""

    system: str
    setting: str
    tokens_per_round: float
    is_assumed: bool
    """True if the tokens per round follow from an assumed chance and were not published."""
    rate: float
    published: float
    """Published speed-up over plain decoding."""
    without: float
    """Speed-up predicted by the roofline alone."""
    within: float
    """Speed-up predicted by the roofline with the overhead."""
    overhead_ms: float
    needed: float
    """Tokens per round at which the prediction with the overhead equals the published speed-up."""

    @property
    def error_without(self) -> float:
        return self.without / self.published - 1.0

    @property
    def error_with(self) -> float:
        return self.within / self.published - 1.0


def served() -> Iterator[Served]:
    """Yields each published decoding rate of other systems, with its published and its predicted speed-up."""
    for system in PUBLISHED["systems"]:
        costs = _costs_of(system)
        added_s = overhead_s(costs, Load(1, system["context"]), system["plain_rate"])
        for point in system["points"]:
            yield _point(system, point, costs, added_s)


def _costs_of(system: dict[str, Any]) -> RooflineCosts:
    shape = catalogue.find(system["model"])
    machine = catalogue.machines()["B200"]
    deployment = Deployment(machine, shape.precisions, system["gpus"], system.get("locality", 0.0))
    return RooflineCosts(shape, deployment, FractionDrafter(COST))


def _point(system: dict[str, Any], point: dict[str, Any], costs: RooflineCosts, added_s: float) -> Served:
    bare = replace(costs, drafter=FractionDrafter(COST, point.get("block")))
    streams, drafts, context = point.get("streams", 1), point["drafts"], system["context"]
    base_streams, base_rate = point.get("base_streams", streams), point.get("base_rate", system["plain_rate"])
    is_assumed = "tokens_per_round" not in point
    gained = tokens_per_round(constant(point["chance"]), drafts) if is_assumed else point["tokens_per_round"]
    published = streams * point["rate"] / (base_streams * base_rate)

    def speedup(of: StepCosts) -> float:
        plain = base_streams / of.round_s(base_streams, 0, context)
        return streams * gained / of.round_s(streams, drafts, context) / plain

    within = speedup(with_overhead(bare, added_s))
    return Served(
        system["name"], point["setting"], gained, is_assumed, point["rate"], published, speedup(bare), within,
        1e3 * added_s, gained * published / within,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Walked:
    """One speed-up from the walk-through (a published calculation without overheads), and the simulator's prediction
    for the same model, drafting method and batch size."""

    model: str
    way: str
    batch: int
    published: float
    predicted: float
    best_draft_length: int
    quotation: str
    """Quotation from the published text on this speed-up, or ""."""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1.0


def walked() -> Iterator[Walked]:
    """Yields every speed-up in the walk-through (a published calculation), with the simulator's prediction."""
    table = PUBLISHED["walkthrough"]
    for model, ways in table["models"].items():
        shape = catalogue.find(model)
        deployment = Deployment(catalogue.machines()["B200"], shape.precisions)
        for way, (chance, block) in WAYS.items():
            costs = RooflineCosts(shape, deployment, FractionDrafter(COST, block))
            for batch, published in zip(table["batches"], ways[way], strict=True):
                times = [costs.round_s(batch, length, 4096) for length in range(MOST + 1)]
                length, predicted = best(curve(times, constant(chance)))
                quotation = table["quotations"].get(model, {}).get(str(batch), {}).get(way, "")
                yield Walked(model, way, batch, published, predicted, length, quotation)


@dataclass(frozen=True, slots=True)
class BestLengths:
    """Published and predicted best draft lengths of one drafter, by number of streams."""

    drafter: str
    streams: list[int]
    published: list[int]
    predicted: list[int]

    @property
    def num_equal(self) -> int:
        return sum(predicted == published for predicted, published in zip(self.predicted, self.published, strict=True))


def best_lengths() -> Iterator[BestLengths]:
    """Yields the published and the predicted best number of drafts of each drafter. The prediction uses the drafter's
    roofline and its measured survival curve (share of rounds whose first i drafts are all accepted)."""
    table = PUBLISHED["best_lengths"]
    shape, machine = catalogue.find(table["model"]), catalogue.machines()["B200"]
    deployment = Deployment(machine, shape.precisions)
    for each in table["drafters"]:
        rates = machine.flops_per_s["bfloat16"], machine.bytes_per_s
        costs = RooflineCosts(shape, deployment, ShapeDrafter(each["parameters"], *rates, block=each.get("block")))
        acceptance, lengths = from_survival(each["survival"]), []
        for streams in table["streams"]:
            times = [costs.round_s(streams, length, table["context"]) for length in range(len(each["survival"]) + 1)]
            lengths.append(best(curve(times, acceptance))[0])
        yield BestLengths(each["name"], table["streams"], each["published"], lengths)


def experts() -> list[tuple[int, float, float, float]]:
    """Returns how many distinct experts a layer reads for several consecutive positions, measured and predicted. The
    layer has 256 experts, of which each position selects 8.

    An entry is (number of positions, measured number, number predicted if positions select independently, number
    predicted with MEASURED_LOCALITY). MEASURED_LOCALITY was fitted to these measurements."""
    table, distinct = PUBLISHED["experts"], partial(distinct_experts, 256, 8, 1)
    return [
        (positions, measured, distinct(positions), distinct(positions, MEASURED_LOCALITY))
        for positions, measured in zip(table["positions"], table["published"], strict=True)
    ]
