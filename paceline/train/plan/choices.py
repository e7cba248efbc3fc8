"""Chooses the settings of a plan: a drafter shape with cheap drafting compared with the target's pass, and training
settings.

The shape is the first of a list, largest first, whose drafting costs less than `MOST_SHARE` of the target's
verification pass. Both are predicted by the roofline of `simulate`: the larger of reading and computing time. Training
settings follow measured recipes: recipes/default_drafter.sh on CPUs, the DFlash paper's on GPUs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, refuse
from paceline.simulate.costs.roofline import Deployment, pass_seconds
from paceline.simulate.costs.shapes import FORMATS, Precisions
from paceline.train.config import DrafterShape, LoopConfig, TrainConfig
from paceline.train.plan.target_facts import BLOCK_BYTES, MachineFacts, TargetFacts
from paceline.train.run_file import value_of, with_defaults, with_value
from paceline.train.unused_settings import check_used

if TYPE_CHECKING:
    from paceline.draft.dflash.config import DFlashConfig

MOST_SHARE = 0.15
"""Largest drafting time as a share of the target's pass."""
CONTEXT = 512
"""Context length, in tokens, for which the times of drafting and verification are compared."""
SMALL_HEAD = 16384
"""Largest vocabulary that is drafted completely."""
RECIPE_SIZE, RECIPE_RATE, LEAST_RATE = 576, 2e-3, 6e-4
"""Hidden size and learning rate of the default drafter, and the DFlash paper's learning rate, for hidden sizes of 2,560
and 4,096."""
WIDTHS = (1.0, 0.75, 0.5, 0.25)
EAGLE3_VOCAB, EAGLE3_TAPS = 32000, 3
"""Draft vocabulary and number of taps of published EAGLE-3 drafters."""
MTP_BETA = 0.6
"""Ratio of each step's loss weight to that of the previous step (FastMTP, arXiv 2509.18362)."""
MTP_RATE = 5e-5
"""Peak learning rate for a layer that was already trained with its target."""
PART_RATE = 1.2e-3
"""Peak learning rate for a part of a drafter, twice the default. On a tiny model, the best of the tried rates was twice
that of all weights for the last layer, and two to four times for low-rank differences."""


def for_chains(config: TrainConfig) -> TrainConfig:
    """Returns the config with default settings for the drafter's type. They replace only settings that the user did not
    give:
    - eagle3, mtp (which draft token by token): one layer; cross entropy as the loss;
    - eagle3: a draft vocabulary;
    - mtp: a loss weight that falls from draft to draft; a small learning rate if the layer is the target's own;
    - other types: a larger learning rate if only a part of the drafter is trained (`loop.learn`).

    The block size of eagle3 and mtp drafters always becomes `ttt_steps` + 1 (the anchor). Raises ConfigError for
    settings that do not fit the drafter's type."""
    shape, loop, kind = config.shape, config.loop, config.shape.kind
    check_part(config)
    check_used(config, trained_kind(config))
    if not shape.is_chained:
        return config if loop.learn == "all" else with_defaults(config, {"loop.optim.lr": PART_RATE})
    is_eagle3 = kind == "eagle3"
    num_layers = shape.num_layers if config.is_given("shape.num_layers") else 1
    has_vocab = loop.loss.vocab is not None
    refuse(
        ConfigError,
        (num_layers > 1 and not is_eagle3, "num_layers above 1 is not implemented for mtp drafters: leave it out"),
        (shape.is_copied and is_eagle3, "start copied is not implemented for eagle3 drafters: leave it out"),
        (has_vocab and is_eagle3, "the loss vocabulary means nothing for an eagle3 drafter: give draft_vocab"),
        (loop.gradient_checkpointing, f"gradient_checkpointing is not implemented for {kind} drafters: leave it out"),
    )
    learning_rate = {"loop.optim.lr": MTP_RATE} if is_trained_already(shape) else {}
    config = with_defaults(config, {"shape.num_layers": 1, "loop.loss.name": "ce", **learning_rate})
    config = with_value(config, "shape.block_size", 1 + shape.ttt_steps)
    if shape.draft_vocab is None and is_eagle3:
        return with_value(config, "shape.draft_vocab", EAGLE3_VOCAB)
    if loop.loss.gamma is None and not is_eagle3 and config.loop.loss.name != "d-pace":
        return with_value(config, "loop.loss.gamma", -1 / math.log(MTP_BETA))
    return config


def trained_kind(config: TrainConfig) -> str:
    """Returns the drafting method of the drafter that is trained. It is `config.shape.kind`, unless the drafter in
    `config.init` is DFlash 2 or DSpark: training does not change their method."""
    if config.init is None or config.shape.is_chained:
        return config.shape.kind
    stored = _stored_config(config.init, config.target.model)
    return config.shape.kind if stored is None or stored.kind == "dflash" else stored.kind


def check_part(config: TrainConfig) -> None:
    """Checks the settings for training only a part of a drafter (`loop.learn` other than "all"). Raises ConfigError in
    these cases:
    - there is no `init`, or its drafter is neither DFlash nor DFlash 2;
    - another setting needs the whole drafter, such as sharded training;
    - `loop.rank` is set, but `loop.learn` is not "low-rank"."""
    loop, kind = config.loop, config.shape.kind
    has_rank, part = loop.rank != LoopConfig().rank, f"learn {loop.learn}"
    refuse(ConfigError, (has_rank and loop.learn != "low-rank", f"rank means nothing for {part}: leave it out"))
    if loop.learn == "all":
        return
    stored = None if config.init is None else _stored_config(config.init, config.target.model)
    is_known = stored is not None and not stored.markov and kind in ("dflash", "dflash2")
    refuse(
        ConfigError,
        (config.init is None, f"{part} trains a part of an existing drafter: give one with init"),
        (not is_known, f"{part} is implemented for DFlash and DFlash 2 drafters: leave it out"),
        (loop.parallel == "sharded", f"{part} is not implemented for parallel sharded: leave one out"),
    )
    if kind == "dflash2" and stored is not None and stored.second is None:
        raise ConfigError(f"{part} would not train what a DFlash 2 drafter adds: leave it out, or drafter_kind")


def is_trained_already(shape: DrafterShape) -> bool:
    """Returns True if a drafter without `init` still begins with trained weights. This holds for an mtp drafter that
    begins as the target's own mtp layer, not as a copy of another layer."""
    return shape.kind == "mtp" and not shape.is_copied


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a drafter (layers, heads, widths, vocabulary) that a plan needs."""

    num_layers: int
    block_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_taps: int
    draft_vocab: int
    """Number of rows of the LM head that drafting reads."""
    hidden_size: int
    target_hidden_size: int

    @property
    def features(self) -> int:
        """Number of values of the target's hidden states that the drafter reads per context position."""
        return self.num_taps * self.target_hidden_size

    @property
    def layer_parameters(self) -> int:
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def parameters(self) -> int:
        """Number of parameters in the drafter's matrices: its layers, and the projection of the target's hidden
        states."""
        return self.num_layers * self.layer_parameters + self.features * self.hidden_size

    def learned(self, loop: LoopConfig) -> int:
        """Number of matrix parameters that training changes. `loop.learn` selects them: all matrices, those of the last
        layer, or low-rank factors."""
        if loop.learn == "low-rank":
            attention = 4 * self.hidden_size + 2 * self.head_dim * (self.num_heads + self.num_kv_heads)
            return self.num_layers * loop.rank * (attention + 3 * (self.hidden_size + self.intermediate_size))
        return self.parameters if loop.learn == "all" else self.layer_parameters

    @property
    def context_parameters(self) -> int:
        """Number of parameters that are applied once to each context position: those of keys and values, and the
        projection of the target's hidden states."""
        keys = 2 * self.num_layers * self.hidden_size * self.num_kv_heads * self.head_dim
        return keys + self.features * self.hidden_size


def sizes_of(config: TrainConfig, target: TargetFacts) -> Sizes:
    """Returns the sizes of the drafter that a run trains. For a new drafter they are those in `config`; sizes that it
    leaves open are the target's. If `config.init` names a DFlash drafter, they are those of this drafter, except for a
    block size that the user gave. Raises ConfigError or ModelFileError if the drafter in `config.init` does not exist
    or is damaged."""
    shape, hidden = config.shape, target.shape.hidden_size
    stored = None if config.init is None else _stored_sizes(config.init, config.target.model, target.shape.vocab_size)
    if stored is not None:
        return replace(stored, block_size=shape.block_size) if config.is_given("shape.block_size") else stored
    heads, kv_heads, head_dim, inner = _of_target(target)
    num_heads = shape.num_heads or heads
    num_kv_heads = shape.num_kv_heads or max(1, num_heads * kv_heads // heads)
    num_taps = {"eagle3": EAGLE3_TAPS, "mtp": 1}.get(shape.kind, shape.num_taps or max(5, shape.num_layers))
    taps = len(shape.tap_layers) if shape.tap_layers else min(num_taps, target.shape.num_layers)
    vocab = target.shape.vocab_size
    return Sizes(
        shape.num_layers, shape.block_size, shape.intermediate_size or inner, num_heads, num_kv_heads, head_dim, taps,
        min(shape.draft_vocab or vocab, vocab), hidden, hidden,
    )  # fmt: skip


def _stored_config(init: str, target_name: str) -> DFlashConfig | None:
    """Returns the config of the drafter that --init names, or None if it is not DFlash. Needs PyTorch."""
    from paceline.draft.dflash.checkpoint import config_of
    from paceline.draft.dflash.config import is_dflash
    from paceline.model.checkpoint import read_json
    from paceline.train.learn.initial_weights import init_folder

    folder = init_folder(init, target_name)
    raw = {} if folder is None else read_json(folder / "config.json")
    return config_of(raw, folder) if folder is not None and is_dflash(raw) else None


def _stored_sizes(init: str, target_name: str, vocab_size: int) -> Sizes | None:
    """Returns None for a drafter that is not DFlash. Needs PyTorch."""
    from paceline.draft.dflash.checkpoint import read_draft_ids
    from paceline.train.learn.initial_weights import init_folder

    folder, drafter = init_folder(init, target_name), _stored_config(init, target_name)
    if folder is None or drafter is None:
        return None
    draft_ids = read_draft_ids(folder)
    shape = drafter.shape
    return Sizes(
        shape.num_layers, drafter.block_size, shape.intermediate_size, shape.num_heads, shape.num_kv_heads,
        shape.head_dim, len(drafter.target_layer_ids), vocab_size if draft_ids is None else len(draft_ids),
        shape.hidden_size, drafter.target_hidden_size,
    )  # fmt: skip


def _of_target(target: TargetFacts) -> tuple[int, int, int, int]:
    """Returns (query heads, key heads, head size, MLP width) of the target, as used by `initial_weights.config_for`."""
    hidden = target.shape.hidden_size
    if target.family is None:  # as checkpoint.new_config
        heads = max(1, hidden // 64)
        group = next(group for group in (4, 3, 2, 1) if heads % group == 0)
        return heads, heads // group, 64, -(-hidden * 8 // 3 // 64) * 64
    heads = target.size("num_attention_heads", 1)
    return (
        heads,
        target.size("num_key_value_heads", heads),
        target.size("head_dim", hidden // heads),
        target.size("intermediate_size", 4 * hidden),
    )


def deployment_of(target: TargetFacts, machine: MachineFacts) -> Deployment:
    """Returns the speeds of one device of the machine, and the number formats with which the target runs on it, to
    estimate times. For a quantised target, the format is the nearest one in bytes per weight of q4_1, q8_0 and
    bfloat16."""
    precisions = target.shape.precisions
    if target.is_quantised:
        near = min(("q4_1", "q8_0", "bfloat16"), key=lambda name: abs(FORMATS[name].num_bytes - target.value_bytes))
        precisions = Precisions(near, near)
    elif not machine.is_gpu and "bfloat16" not in machine.machine.flops_per_s:
        precisions = Precisions("float32", "float32")
    return Deployment(machine.decoding, precisions)


def draft_seconds(sizes: Sizes, deployment: Deployment, value_bytes: float) -> float:
    """Estimates the seconds in which a drafter of these sizes drafts one block (all drafts of a round) for one request.
    `deployment`: the machine's speeds; `value_bytes`: bytes per weight."""
    head = sizes.draft_vocab * sizes.hidden_size
    read = (sizes.parameters + head) * value_bytes / deployment.bytes_per_s
    products = sizes.num_layers * sizes.layer_parameters * sizes.block_size + head * (sizes.block_size - 1)
    flops = 2.0 * (products + 2 * sizes.context_parameters)
    return max(read, flops / deployment.flops_per_s("bfloat16"))


def share_of_pass(sizes: Sizes, target: TargetFacts, machine: MachineFacts) -> float:
    """Estimates the relative cost of drafting: the time in which the drafter drafts one block for one request, divided
    by the time in which the target verifies it."""
    deployment = deployment_of(target, machine)
    value_bytes = BLOCK_BYTES if target.is_quantised else FORMATS[deployment.precisions.weights].num_bytes
    check_s = sum(pass_seconds(target.shape, deployment, 1, sizes.block_size, CONTEXT).values())
    return draft_seconds(sizes, deployment, value_bytes) / check_s


@dataclass(frozen=True, slots=True)
class Choice:
    """A config field and the value that a plan chose for it, with the reason."""

    name: str
    """Name of the field, such as shape.num_layers."""
    value: Any
    why: str


def choices(config: TrainConfig, target: TargetFacts, machine: MachineFacts) -> Iterator[Choice]:
    """Yields the settings that a plan recommends for a new drafter: config field, value and reason. The caller must
    skip fields that the user has set, since the recommendations do not check this."""
    is_chained = config.shape.is_chained  # whose shape is the published one, or the target's own
    if not is_chained:
        yield from _shape_choices(config, target, machine)
    hidden, is_large = target.shape.hidden_size, target.shape.vocab_size > SMALL_HEAD
    if not is_chained and target.is_copyable and not config.remote.features_at:  # a remote target's layers are not here
        yield Choice("shape.start", "copied", "layers of the target know how to attend already")
    if config.shape.kind != "eagle3" and is_large and not config.loop.loss.needs_target_probs:
        why = "a sample of the vocabulary: the whole head would take most of a step"
        yield Choice("loop.loss.vocab", 8192, why)
    rate = max(LEAST_RATE, RECIPE_RATE * math.sqrt(RECIPE_SIZE / hidden))
    if not is_trained_already(config.shape):
        yield Choice("loop.optim.lr", float(f"{rate:.2g}"), f"falls with the root of the hidden size, {hidden}")
    if not machine.is_gpu:
        yield Choice("loop.blocks_per_step", 192, "more and smaller steps: blocks are dear on a processor")
        yield Choice("loop.anchors", 48, "a third of a usual answer: epochs differ")
        yield Choice("loop.heldout_every", 250, "a look costs about two steps")
    yield from machine_choices(machine)
    if config.minutes is not None:
        yield Choice("loop.epochs", 100.0, "the minutes end the run")
    yield Choice("loop.keep", "best", "what served held-out prompts best")


def machine_choices(machine: MachineFacts) -> Iterator[Choice]:
    """Yields the settings that a plan recommends because of the machine, for new and existing drafters. At present
    there is only one: no autocast on a processor that computes float32 faster than bfloat16."""
    if machine.is_slow_in_bfloat16:
        rates = machine.machine.flops_per_s
        reason = "float32 alone"
        if rates.get("bfloat16"):
            reason = f"float32 is {rates['float32'] / rates['bfloat16']:.1f} times as fast"
        yield Choice("loop.autocast", False, f"this processor has no products of bfloat16: {reason}")


def _shape_choices(config: TrainConfig, target: TargetFacts, machine: MachineFacts) -> Iterator[Choice]:
    vocab, block = target.shape.vocab_size, 16 if machine.is_gpu else 8
    if config.is_given("shape.block_size"):
        block = config.shape.block_size
    else:
        why = "positions are cheap on a GPU" if machine.is_gpu else "wide passes are dear"
        yield Choice("shape.block_size", block, why)
    layers = (5, 4, 3, 2, 1) if machine.is_gpu else (3, 2, 1)
    whole = _of_target(target)[3]
    vocabs = [0] if vocab <= SMALL_HEAD else [min(32768, max(8192, vocab // 4 // 4096 * 4096)), 16384, 12288, 8192]
    vocabs = [size for index, size in enumerate(vocabs) if size in (0, vocabs[0]) or size < vocabs[index - 1]]
    free = {
        "shape.draft_vocab": vocabs,
        "shape.num_layers": layers,
        "shape.intermediate_size": [int(share * whole) // 32 * 32 or whole for share in WIDTHS],
    }
    options = {name: [value_of(config, name)] if config.is_given(name) else values for name, values in free.items()}
    best: tuple[float, dict[str, Any]] | None = None
    # The draft vocabulary shrinks first, then layers, then width: what costs least acceptance for the time it saves.
    for values in itertools.product(*reversed(options.values())):
        chosen = dict(zip(options, reversed(values), strict=True))
        fields = chosen | {"shape.block_size": block}
        trial = functools.reduce(lambda changed, field: with_value(changed, *field), fields.items(), config)
        share = share_of_pass(sizes_of(trial, target), target, machine)
        if best is None or share < best[0]:
            best = share, chosen
        if share < MOST_SHARE:
            best = share, chosen
            break
    assert best is not None
    share, chosen = best
    why = f"drafting costs {share:.0%} of a target pass" + ("" if share < MOST_SHARE else ", the least that was found")
    for name, value in chosen.items():
        if name == "shape.intermediate_size" and value == whole:
            continue  # the target's, which is the default
        yield Choice(name, value, why)
