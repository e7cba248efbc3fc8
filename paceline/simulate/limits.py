"""Writes the sentences printed with every prediction: its limits (what it ignores or assumes) and warnings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.simulate.config import CostsConfig
from paceline.simulate.costs.roofline import (
    COLLECTIVE_LATENCY_S,
    MEASURED_LOCALITY,
    Deployment,
    MemoryNeed,
    memory_need,
    shares_evenly,
)
from paceline.simulate.costs.shapes import ModelShape, arithmetic
from paceline.simulate.speedup import Acceptance, Load

TEXTS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Templates of the sentences; the calculator page uses them too."""

DEFAULT_COST = 0.1
"""Default cost of a drafter pass, as a share of a target pass."""
LOOKUPS = ("ngram",)
"""Drafting methods that do not run a model."""


def cost_by_method(costs: CostsConfig, method: str | None) -> tuple[CostsConfig, list[str]]:
    """Sets the drafter's cost to that of a drafting method: 0 for n-gram lookup, the default share of a target pass for
    other methods. Returns (changed copy of `costs`, sentences that explain the cost). Changes nothing if `method` is
    None, or if `costs` already fix the drafter's cost, for example by measured times."""
    is_said = costs.drafter_cost is not None or costs.drafter_params is not None
    if method is None or is_said or costs.toy or costs.table is not None or costs.calibration is not None:
        return costs, []
    if method in LOOKUPS:
        return replace(costs, drafter_cost=0.0), [TEXTS["lookup"]]
    return costs, [TEXTS["one_cost"].format(cost=f"{DEFAULT_COST:.0%}", method=method)]


def roofline_limits(shape: ModelShape, deployment: Deployment) -> list[str]:
    """Returns sentences on the limits of a roofline prediction for this model and machine."""
    limits: list[str] = list(TEXTS["roofline"])
    if shape.experts and deployment.expert_locality == 0:
        limits.append(TEXTS["uniform_experts"].format(locality=f"--expert-locality {MEASURED_LOCALITY}"))
    elif shape.experts:
        limits.append(TEXTS["local_experts"].format(power=f"{1 - deployment.expert_locality:g}"))
    if any(group.kind == "linear" for group in shape.attention):
        limits.append(TEXTS["linear"])
    if deployment.num_gpus > 1:
        gigabytes, microseconds = f"{deployment.machine.link_bytes_per_s / 1e9:.0f}", f"{1e6 * COLLECTIVE_LATENCY_S:g}"
        values = {"num_gpus": deployment.num_gpus, "gigabytes": gigabytes, "microseconds": microseconds}
        limits.append(TEXTS["several_gpus"].format(**values))
    return limits + _rate_limits(shape, deployment) + ([shape.note] if shape.note else [])


def _rate_limits(shape: ModelShape, deployment: Deployment) -> list[str]:
    """Limits for formats that the machine computes in a wider format."""
    parts = {"weights": deployment.precisions.weights, "attention": deployment.precisions.attention}
    if shape.experts:
        parts["experts"] = deployment.precisions.experts
    rates = {part: arithmetic(name, deployment.machine.flops_per_s) for part, name in parts.items()}
    return [
        TEXTS["no_rate"].format(machine=deployment.machine.name, format=parts[part], part=part, rate=rate)
        for part, rate in rates.items()
        if rate != parts[part] and not (rate == "bfloat16" and parts[part] in ("float16", "int4", "q8_0", "q4_1"))
    ]


def acceptance_limits(acceptance: Acceptance, load: Load) -> list[str]:
    """Returns sentences on the limits of the acceptance data, to be shown with a prediction.

    - For a constant acceptance: that all drafts are assumed to have the same chance.
    - For other data: that `load` has more draft positions than the data, or that the data come from recorded rounds, if
      this is the case.
    """
    if acceptance.kind == "constant":
        return [TEXTS["constant"]]
    limits = []
    if load.max_draft > acceptance.depth:
        limits.append(TEXTS["beyond"].format(place=acceptance.depth, chance=f"{acceptance.conditional[-1]:.2f}"))
    if acceptance.num_rounds:
        limits.append(TEXTS["recorded"].format(rounds=f"{acceptance.num_rounds:,}"))
    return limits


def load_warnings(shape: ModelShape, deployment: Deployment, loads: Sequence[Load]) -> list[str]:
    """Returns warnings: one for the smallest load that does not fit into memory, and one if the first load's context is
    longer than the model supports."""
    by_size = sorted(loads, key=lambda load: load.batch)
    needs = ((memory_need(shape, deployment, load.batch, load.context), load) for load in by_size)
    too_large = next(filter(None, (memory_warning(*need, deployment, shape) for need in needs)), None)
    return list(filter(None, (too_large, context_warning(shape, loads[0]))))


def memory_warning(need: MemoryNeed, load: Load, deployment: Deployment, shape: ModelShape | None = None) -> str | None:
    """Returns a warning if weights and caches (`need`) do not fit into memory, else None. If the machine has a link to
    others, the warning recommends the smallest number of GPUs with enough memory. With `shape`, it recommends the
    smallest such number that also divides the attention heads evenly, if there is one."""
    if need.fits:
        return None
    weights, cache, memory = need.weight_bytes, need.cache_bytes, need.memory_bytes
    fewest = -(-int(weights + cache) // int(memory / deployment.num_gpus))
    fewest = next((each for each in (shares_evenly(shape) if shape else []) if each >= fewest), fewest)
    sizes = {"weights": weights / 1e9, "cache": cache / 1e9, "needed": (weights + cache) / 1e9, "memory": memory / 1e9}
    gpus = f"--gpus {fewest} or more, " if deployment.machine.link_bytes_per_s else ""
    return TEXTS["memory"].format(**sizes, load=load, deployment=deployment, gpus=gpus)


def context_warning(shape: ModelShape, load: Load) -> str | None:
    if not shape.max_context or load.context <= shape.max_context:
        return None
    return f"a context of {load.context} is longer than the {shape.max_context} tokens that {shape.name} was made for"
