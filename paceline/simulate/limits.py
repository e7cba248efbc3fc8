"""What a prediction takes for granted, in sentences for people: printed with every result."""

from __future__ import annotations

from paceline.simulate.roofline import COLLECTIVE_LATENCY_S, Deployment, MemoryNeed
from paceline.simulate.shapes import ModelShape, arithmetic
from paceline.simulate.speedup import Acceptance, Load

TOY = ("Toy model: drafting and verifying are free, so the speed-up is the tokens per round. Nothing is that good.",)
ROOFLINE = (
    "Roofline: each part takes the larger of its arithmetic and its memory traffic at the machine's full rates; no launch "
    "overhead, no host time, weights are read once a pass and each cache once, not once for each draft.",
    "All sequences decode together with the same draft length and context; prefill is not counted.",
)
MEASURED = (
    "Measured: step times are interpolated between measured sizes and continued beyond them; they hold for that machine, "
    "model, drafter and context only.",
)
SERVER = (
    "Simulated server: one prefill chunk and one round a step, first come first served, no prefix cache, answers of known "
    "length; HTTP and tokenizing only as --request-overhead says.",
    "Every round's acceptance is drawn anew from one curve: real requests differ from one another, and so do their rounds.",
)
CALIBRATED = (
    "Calibrated: the roofline with factors and overheads fitted to measured steps; for another model, machine or drafter than "
    "those it is an estimate.",
)


def roofline_limits(shape: ModelShape, deployment: Deployment) -> list[str]:
    """Of a shape on a machine."""
    limits: list[str] = list(ROOFLINE)
    if shape.experts and deployment.expert_locality == 0:
        limits.append(
            "Experts are drawn uniformly, anew for each position; real routing is more local, so drafts bring fewer new "
            "experts (--expert-locality 0.255 fits one measurement)."
        )
    elif shape.experts:
        power = 1 - deployment.expert_locality
        limits.append(f"The q positions of a sequence draw experts as q^{power:g} positions would, uniformly.")
    if any(group.kind == "linear" for group in shape.attention):
        limits.append(
            "Linear attention costs the reading of its state, in 16 bits, once a pass: its arithmetic and the copies of the "
            "state that taking back drafts needs are left out."
        )
    if deployment.num_gpus > 1:
        limits.append(
            f"{deployment.num_gpus} GPUs: arithmetic and bandwidth add up perfectly, and each layer pays two ring "
            f"all-reduces of 16-bit activations at {deployment.machine.link_bytes_per_s / 1e9:.0f} GB/s one way and "
            f"{1e6 * COLLECTIVE_LATENCY_S:g} us each, hidden behind nothing. An assumption, not a measurement."
        )
    return limits + _rate_limits(shape, deployment) + ([shape.note] if shape.note else [])


def _rate_limits(shape: ModelShape, deployment: Deployment) -> list[str]:
    """Formats that the machine multiplies in a wider one."""
    parts = {"weights": deployment.precisions.weights, "attention": deployment.precisions.attention}
    if shape.experts:
        parts["experts"] = deployment.precisions.experts
    found = {part: arithmetic(name, deployment.machine.flops_per_s) for part, name in parts.items()}
    return [
        f"{deployment.machine.name} has no known rate for {parts[part]}: {part} are read as such and multiplied as {rate}."
        for part, rate in found.items()
        if rate != parts[part] and not (rate == "bfloat16" and parts[part] in ("float16", "int4", "q8_0", "q4_1"))
    ]


def acceptance_limits(acceptance: Acceptance, load: Load) -> list[str]:
    """Of what is known of the drafts."""
    if acceptance.kind == "constant":
        return ["Each draft stands with the same chance; measured chances rise with depth, so long drafts come out too low."]
    limits = []
    if load.max_draft > acceptance.depth:
        limits.append(
            f"Drafts beyond place {acceptance.depth} have the last known chance, {acceptance.conditional[-1]:.2f}: a guess."
        )
    if acceptance.num_rounds:
        limits.append(f"Acceptance is that of {acceptance.num_rounds:,} recorded rounds.")
    return limits


def memory_warning(need: MemoryNeed, load: Load, deployment: Deployment) -> str | None:
    """A sentence when weights and caches do not fit."""
    if need.fits:
        return None
    num_gpus, name = deployment.num_gpus, deployment.machine.name
    needed = (need.weight_bytes + need.cache_bytes) / 1e9
    each = need.memory_bytes / num_gpus
    fewest = -(-int(need.weight_bytes + need.cache_bytes) // int(each))
    return (
        f"does not fit: {need.weight_bytes / 1e9:.1f} GB of weights and {need.cache_bytes / 1e9:.1f} GB of cache for "
        f"{load.batch} x {load.context} tokens are {needed:.1f} GB, {num_gpus} x {name} have {need.memory_bytes / 1e9:.0f} GB: "
        f"use --gpus {fewest} or more, a smaller --batch or --context, or another --precision"
    )


def context_warning(shape: ModelShape, load: Load) -> str | None:
    if not shape.max_context or load.context <= shape.max_context:
        return None
    return f"--context {load.context} is longer than the {shape.max_context} tokens that {shape.name} was made for"
