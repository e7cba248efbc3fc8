"""The plan of a training run, made and printed before it begins, without loading weights.

    plan = make_plan(config)                # choices, hours, disk, memory, expected acceptance length
    plan.config                             # the run with all choices
    print(plan.text)

The text distinguishes the user's settings from the plan's choices. Times come from the roofline of `simulate` and the
measured efficiency of each stage (`EFFICIENCY`); acceptance lengths from `expected_acceptance.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.simulate.costs.roofline import pass_seconds
from paceline.train.config import TrainConfig
from paceline.train.documents.dataset import MAX_HELDOUT, MIN_HELDOUT, num_heldout
from paceline.train.plan.choices import (
    Sizes,
    choices,
    deployment_of,
    for_chains,
    machine_choices,
    share_of_pass,
    sizes_of,
)
from paceline.train.plan.expected_acceptance import Learned, expected_lines, expected_of
from paceline.train.plan.gpu_times import CHECKPOINT_BYTES, fixed_seconds, hours_range
from paceline.train.plan.lengths import fit_lengths, limits_of, longest_of, memory_of, position_bytes
from paceline.train.plan.prompt_facts import Data, read_data
from paceline.train.plan.target_facts import Device, MachineFacts, TargetFacts, machine_of, read_target
from paceline.train.run_file import option_of, value_of, with_value

PLANNED = ("shape.", "loop.")
"""Prefixes of the fields that a plan shows."""
EFFICIENCY = {
    "cpu": {"answers": 0.35, "features": 0.6, "steps": 0.5},
    "gpu": {"answers": 0.4, "features": 0.5, "steps": 0.32},
}
"""Measured efficiency of the stages, as shares of the machine's rates; docs/tutorials/your-drafter.md has the runs."""
MEASURED_STEPS = 0.43
"""Efficiency of the steps relative to a GPU's measured rate: on one H100, 310 to 326 of 743 TFLOP/s (989 nominal)."""
MOST_UNUSED = 0.5
"""A plan that uses less than this share of the given minutes explains why."""
ANSWER_SHARE = 0.75
"""Mean length of an answer as a share of the longest; assumed for answers that do not exist yet."""
MOST_ANSWERING = 0.35
"""Largest share of the minutes for answers and features; the rest is for steps."""
MORE_ANSWERS, LEAST_EPOCHS, WARM = 0.25, 6.0, 0.7
"""A prompt gets several answers, sampled at temperature WARM, if they take at most this share of the minutes and leave
time for LEAST_EPOCHS epochs."""
NOT_KEPT = ("online", "streamed")
"""Hidden states that are recomputed in every epoch instead of stored on disk."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a training run: config, hours, bytes of disk and memory, and the expected acceptance length."""

    target: str
    target_source: str
    is_copyable: bool
    """True if draft layers can begin as copies of the target's layers."""
    machine: str
    config: TrainConfig
    sizes: Sizes
    chosen: dict[str, str]
    """Field -> reason, for the plan's choices."""
    share_of_pass: float
    """Time of drafting a block as a share of the time of the target's verification pass."""
    parameters: int
    """Parameters of the drafter."""
    data: Data
    hours: dict[str, float]
    """Hours of answers, features, steps, and all together; on GPUs also of loading, compiling and checkpoints."""
    hours_range: tuple[float, float] | None
    """(fewest, most) hours, on GPUs."""
    disk_bytes: dict[str, float]
    """Bytes on disk of answers, features, checkpoints, and all together."""
    memory_bytes: float
    """Maximum bytes of memory that the training needs on one device."""
    blocks: float
    """Number of blocks (an anchor and its draft positions) that the steps train on, counting repetitions."""
    expected: dict[str, Any] | None
    """Result of `expected_acceptance.expected_of`; None for eagle3 and mtp drafters, and with --init: no curve
    applies."""
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        names = [name for name in self.__dataclass_fields__ if name not in ("config", "sizes", "data")]
        tree = {name: getattr(self, name) for name in names}
        tree["values"] = {name: value_of(self.config, name) for name in self.chosen}
        return {**tree, "sizes": asdict(self.sizes), "data": asdict(self.data), "text": self.text}

    @property
    def text(self) -> str:
        return "\n".join(_lines(self))


def make_plan(config: TrainConfig, device_name: Device = None, *, reads_answers: bool = False) -> Plan:
    """Returns the plan of a run. `device_name`: the machine, such as "8x H100"; None for this one. `reads_answers`:
    report the number of existing answers. Raises ModelNotFoundError, ModelFileError or UnsupportedModelError for the
    target, ConfigError for an unknown machine or lengths without room for an answer, PromptError for bad prompts."""
    config = for_chains(config)
    target, machine = read_target(config.target), machine_of(device_name, config.target.device)
    notes: list[str] = []
    if machine.is_busy:
        notes.append(
            "other programs kept this machine busy while its speeds were measured: a plan made when idle may differ"
        )
    chosen: dict[str, str] = {}
    if config.plan == "auto":
        options = choices(config, target, machine) if config.init is None else machine_choices(machine)
        for choice in options:
            if not config.is_given(choice.name) and value_of(config, choice.name) != choice.value:
                config, chosen[choice.name] = with_value(config, choice.name, choice.value), choice.why
    sizes = sizes_of(config, target)
    if config.plan == "auto" or config.max_len is None:
        config, fitted = fit_lengths(config, limits_of(config, target, machine, sizes))
        chosen |= fitted
    data = read_data(config, notes, reads_answers=reads_answers)
    config, limited, data = _limited(config, target, machine, data)
    chosen |= limited
    config, more = _more_answers(config, target, machine, data, sizes)
    chosen |= more
    seconds = _stage_seconds(config, target, machine, data)
    steps_s, blocks = _steps(config, target, machine, data, sizes, sum(seconds.values()))
    if config.minutes is not None and config.loop.max_minutes is None:
        config = with_value(config, "loop.max_minutes", max(steps_s / 60, 0.1))
        chosen["loop.max_minutes"] = "what answers and features leave of the minutes"
    seconds["steps"] = steps_s
    seconds |= fixed_seconds(config, target, machine, sizes, steps_s)
    hours = {name: value / 3600 for name, value in seconds.items()}
    if config.minutes and 60 * sum(hours.values()) < MOST_UNUSED * config.minutes:
        notes.append(
            f"only {60 * sum(hours.values()):.0f} of {config.minutes:g} minutes are used: by then each answer was "
            f"learned from {config.loop.epochs:g} times; more prompts would use them"
        )
    has_curve = not config.shape.is_chained and config.init is None
    return Plan(
        target=target.name,
        target_source=target.source,
        is_copyable=target.is_copyable,
        machine=machine.title,
        config=config,
        sizes=sizes,
        chosen=chosen,
        share_of_pass=share_of_pass(sizes, target, machine),
        parameters=sizes.parameters,
        data=data,
        hours={**hours, "all": sum(hours.values())},
        hours_range=hours_range(config, hours) if machine.is_gpu else None,
        disk_bytes=_disk(config, target, data, sizes),
        memory_bytes=memory_of(config, target, sizes) + longest_of(config) * position_bytes(config, target, sizes),
        blocks=blocks,
        expected=expected_of(target.name, _learned(config, data, blocks)) if has_curve else None,
        notes=notes,
    )


def _limited(
    config: TrainConfig, target: TargetFacts, machine: MachineFacts, data: Data
) -> tuple[TrainConfig, dict[str, str], Data]:
    """Uses fewer prompts of each source if answering all of them would leave too few minutes for steps."""
    num_sources = len(config.prompting.prompts)
    if config.minutes is None or config.plan == "off" or config.is_given("prompting.limit") or not num_sources:
        return config, {}, data
    needed_s = sum(_stage_seconds(config, target, machine, data).values())
    share = MOST_ANSWERING * 60 * config.minutes / needed_s if needed_s else 1.0
    if share >= 1.0:
        return config, {}, data
    limit = max(32, math.floor(share * data.prompts / num_sources))
    why = f"all {data.prompts} prompts would take {needed_s / 60:.0f} of {config.minutes:g} minutes to answer and read"
    fewer = replace(data, prompts=min(data.prompts, limit * num_sources))
    return with_value(config, "prompting.limit", limit), {"prompting.limit": why}, fewer


def _more_answers(
    config: TrainConfig, target: TargetFacts, machine: MachineFacts, data: Data, sizes: Sizes
) -> tuple[TrainConfig, dict[str, str]]:
    """Chooses several answers per prompt if the minutes would otherwise repeat the same few answers many times."""
    names = ("answering.temperatures", "answering.samples")
    if config.minutes is None or config.plan == "off" or not config.prompting.prompts:
        return config, {}
    if config.remote.answers_at or any(map(config.is_given, names)):
        return config, {}
    epochs = _epochs(config, target, machine, data, sizes)[0]
    for samples in (3, 2, 1):
        trial = with_value(with_value(config, names[0], (0.0, WARM)), names[1], samples)
        times, before_s = _epochs(trial, target, machine, data, sizes)
        if times >= LEAST_EPOCHS and before_s <= MORE_ANSWERS * 60 * config.minutes:
            why = f"{data.prompts} answers would be learned from {epochs:.0f} times, "
            why += f"{1 + samples} to a prompt {times:.0f} times"
            return trial, dict.fromkeys(names[: 2 if samples > 1 else 1], why)
    return config, {}


def _epochs(
    config: TrainConfig, target: TargetFacts, machine: MachineFacts, data: Data, sizes: Sizes
) -> tuple[float, float]:
    """Returns (passes over each answer, seconds of answers and features)."""
    before_s = sum(_stage_seconds(config, target, machine, data).values())
    blocks = _steps(config, target, machine, data, sizes, before_s)[1]
    return blocks / max(_blocks_per_answer(config) * _num_answers(config, data), 1.0), before_s


def _num_answers(config: TrainConfig, data: Data) -> int:
    answering = config.answering
    return data.prompts * sum(answering.samples if temperature else 1 for temperature in answering.temperatures)


def _blocks_per_answer(config: TrainConfig) -> float:
    return min(config.loop.anchors, ANSWER_SHARE * config.answering.max_tokens)


def _learned(config: TrainConfig, data: Data, blocks: float) -> Learned:
    """Returns the training data of the steps: samples of one prompt count once, held-out prompts do not count."""
    kept_out = 0 if config.heldout else _num_held_out(config, data)
    return Learned(blocks, None if config.answers else data.prompts - kept_out, _blocks_per_answer(config))


def _num_held_out(config: TrainConfig, data: Data) -> int:
    return num_heldout(data.prompts, config.heldout_share, MAX_HELDOUT, MIN_HELDOUT)


def _stage_seconds(config: TrainConfig, target: TargetFacts, machine: MachineFacts, data: Data) -> dict[str, float]:
    """Returns the seconds of answers and features: the roofline's time / efficiency; 0 for remote stages."""
    deployment, reached = deployment_of(target, machine), EFFICIENCY["gpu" if machine.is_gpu else "cpu"]
    answer, batch = ANSWER_SHARE * config.answering.max_tokens, 32
    number = _num_answers(config, data) / machine.number
    context = data.prompt_tokens + answer / 2
    pass_s = sum(pass_seconds(target.shape, deployment, batch, 1, context).values())
    prefill_s = sum(pass_seconds(target.shape, deployment, 1, 256, context).values()) / 256
    documents_s = number * (data.prompt_tokens + answer) * prefill_s
    answers_s = number * (answer * pass_s / batch + data.prompt_tokens * prefill_s)
    times = config.loop.epochs if config.features in NOT_KEPT else 1.0
    return {
        "answers": 0.0 if config.remote.answers_at else answers_s / reached["answers"],
        "features": 0.0 if config.remote.features_at else times * documents_s / reached["features"],
    }


def flops_per_block(config: TrainConfig, target: TargetFacts, data: Data, sizes: Sizes) -> float:
    """Returns the FLOPs of training on one block, forward and backward. Includes the block's share of the work on the
    document's context, which is divided equally among the document's blocks."""
    rows = config.loop.loss.vocab or sizes.draft_vocab
    # Two each for the outputs, and for gradients of inputs and of weights.
    times = {"all": 6.0, "low-rank": 4.0, "last-layer": 2.0 + 4.0 / sizes.num_layers}[config.loop.learn]
    layers = times * sizes.num_layers * sizes.layer_parameters * sizes.block_size
    head = 4.0 * (sizes.block_size - 1) * min(rows, target.shape.vocab_size) * sizes.hidden_size
    answer = ANSWER_SHARE * config.answering.max_tokens
    length = min(data.prompt_tokens + answer, longest_of(config))
    times = 6.0 if config.loop.learn == "all" else 2.0
    return layers + head + times * sizes.context_parameters * length / _blocks_per_answer(config)


def _steps(
    config: TrainConfig, target: TargetFacts, machine: MachineFacts, data: Data, sizes: Sizes, before_s: float
) -> tuple[float, float]:
    """Returns (seconds, blocks) of the steps, as limited by minutes, steps or epochs."""
    loop = config.loop
    name = "bfloat16" if loop.autocast and "bfloat16" in machine.machine.flops_per_s else "float32"
    reached = EFFICIENCY["gpu" if machine.is_gpu else "cpu"]["steps"]
    if machine.is_gpu and machine.is_here:
        reached = MEASURED_STEPS
    rate = machine.machine.flops_per_s[name] * machine.number * reached / flops_per_block(config, target, data, sizes)
    blocks = loop.epochs * _blocks_per_answer(config) * _num_answers(config, data)
    if loop.max_steps is not None:
        blocks = float(loop.max_steps * loop.blocks_per_step)
    has_end = loop.max_minutes is not None or config.minutes is not None
    is_counted = loop.max_steps is not None or not config.answers  # existing answers are counted when the run begins
    seconds = blocks / rate if is_counted or not has_end else math.inf
    if loop.max_minutes is not None:
        seconds = min(seconds, 60 * loop.max_minutes)
    elif config.minutes is not None:
        seconds = min(seconds, max(60 * config.minutes - before_s, 0.25 * 60 * config.minutes))
    return seconds, seconds * rate


def _disk(config: TrainConfig, target: TargetFacts, data: Data, sizes: Sizes) -> dict[str, float]:
    length = data.prompt_tokens + ANSWER_SHARE * config.answering.max_tokens
    number, value_bytes = _num_answers(config, data), 4 if config.target.dtype == "float32" else 2
    value_bytes = 1 if config.feature_dtype == "int8" else value_bytes
    features = number * length * sizes.features * value_bytes
    checkpoint = sizes.parameters * CHECKPOINT_BYTES
    sizes_in_bytes = {
        "answers": 8.0 * number * length,
        "features": 0.0 if config.features in NOT_KEPT else features,
        "checkpoints": checkpoint * (config.loop.keep_last + 1) + 6.0 * sizes.parameters,
    }
    return {**sizes_in_bytes, "all": sum(sizes_in_bytes.values())}


def _lines(plan: Plan) -> Iterator[str]:
    sizes, config = plan.sizes, plan.config
    yield f"plan: a drafter for {plan.target} (sizes from {plan.target_source}), on {plan.machine}"
    vocab = f"{sizes.draft_vocab} tokens to draft among, " if config.shape.draft_vocab else ""
    loop, part = config.loop, f"rank {config.loop.rank}" if config.loop.learn == "low-rank" else "norms aside"
    learned = f", {_short(sizes.learned(loop))} of them learned ({loop.learn}, {part})" if loop.learn != "all" else ""
    yield (
        f"  shape      {sizes.num_layers} layers of width {sizes.intermediate_size}, {sizes.num_heads} heads of "
        f"{sizes.head_dim} over {sizes.num_kv_heads}, {sizes.num_taps} taps, block {sizes.block_size}, {vocab}"
        f"{plan.parameters / 1e6:.1f} million parameters{learned}; drafting costs {plan.share_of_pass:.0%} of a target "
        "pass"
    )
    yield from _chosen_lines(plan)
    hours = plan.hours
    parts = ", ".join(f"{name} {_duration(value)}" for name, value in hours.items() if name != "all")
    span = "" if plan.hours_range is None else f" ({' to '.join(map(_duration, plan.hours_range))})"
    kept_out = "" if config.heldout else f", {_num_held_out(config, plan.data)} of them held out"
    yield (
        f"  time       {_duration(hours['all'])}{span}: {parts} ({plan.data.prompts} prompts{kept_out}, "
        f"{_short(plan.blocks)} blocks)"
    )
    disk = plan.disk_bytes
    held = ", ".join(f"{name} {disk[name] / 1e9:.2f}" for name in ("answers", "features", "checkpoints"))
    yield f"  disk       {disk['all'] / 1e9:.2f} GB: {held}"
    yield f"  memory     {plan.memory_bytes / 1e9:.1f} GB at most"
    if plan.expected is None:
        drafter = "a drafter that is trained further" if plan.config.init is not None else "such a drafter"
        yield f"  expected   no curve for {drafter}: its own held-out figures will say"
    else:
        yield from (f"  {line}" for line in expected_lines(plan.target, plan.expected))
    if plan.data.example:
        yield f"  prompt     as the target gets it: {plan.data.example!r}"
    for note in plan.notes:
        yield f"  note       {note}"


def _chosen_lines(plan: Plan) -> Iterator[str]:
    """Yields the options chosen by the plan, grouped by reason; then those given by the user."""
    config, by_reason = plan.config, dict[str, list[str]]()
    for name, why in plan.chosen.items():
        by_reason.setdefault(why, []).append(_setting(config, name))
    for why, options in by_reason.items():
        yield f"  chosen     {', '.join(options)}: {why}"
    given = config.given if config.given is not None else ()
    yours = [_setting(config, name) for name in sorted(given) if name.startswith(PLANNED)]
    if yours:
        yield f"  yours      {', '.join(yours)}"


def _setting(config: TrainConfig, name: str) -> str:
    """Returns a field with its value, in command-line form."""
    value, (option, _, opposite) = value_of(config, name), option_of(name).partition("/")
    if isinstance(value, bool):
        return option if value else opposite or f"--no-{option[2:]}"
    return f"{option} {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{item:g}" for item in value)
    return f"{value:.4g}" if isinstance(value, float) else "all" if value == 0 else str(value)


def _duration(hours: float) -> str:
    minutes = 60 * hours
    if minutes < 1.5:
        return f"{60 * minutes:.0f} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{hours:.1f} h"


def _short(number: float) -> str:
    for unit, size in (("million", 1e6), ("thousand", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"
