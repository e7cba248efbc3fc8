"""Finds out why a drafter drafts badly for a target: varies its settings one at a time and ranks them by acceptance
length.

    requests = ask(llm, prompts)
    ranked = rank(llm, stored, requests)        # the first is the drafter unchanged

A drafter that reads a wrong layer, mask token or position raises no error: it only drafts badly. Acceptance rises when
the wrong setting is corrected. The answers are the target's own, greedy, so that `score` is exact."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.bench.config import BUILTIN_PROMPTS
from paceline.draft.base import Drafter
from paceline.draft.dflash.checkpoint import StoredDrafter
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.eagle3.checkpoint import Eagle3Checkpoint
from paceline.draft.eagle3.drafter import Eagle3Drafter, Eagle3Network
from paceline.draft.formats.family import drafter_from
from paceline.draft.vocabulary import Vocabulary
from paceline.engine.llm import LLM
from paceline.errors import PacelineError
from paceline.loop.adapt.gate.score import score
from paceline.loop.adapt.servers.mismatch_eagle3 import changes
from paceline.loop.adapt.traffic.stored import Request
from paceline.model.target import Target
from paceline.model.text.tokenizer import Tokenizer
from paceline.report.statistics import Rounds, bootstrap, ratio_of_sums
from paceline.types import SamplingParams

LOW = 2.0
"""Acceptance length below which a setting may be wrong."""
LEAST_GAIN, LEAST_FACTOR = 0.2, 1.15
"""Smallest gain of a reported variation, in acceptance length and as a factor."""
LEAST_CONFIRMED = 1.05
"""Smallest gain of a reported variation, as a factor, if the bootstrap over prompts confirms the gain."""
FIRST_LOOK, FINALISTS = 6, 4
"""Number of prompts that every variation is measured on first, and number of best variations that are then measured on
all prompts."""
THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
"""Published values of rope_theta."""
PROMPTS = (
    *(json.loads(line)["prompt"] for line in BUILTIN_PROMPTS.read_text(encoding="utf-8").splitlines()),
    "Write a Python function that merges two sorted lists.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey?",
    "Summarise in two sentences why the Roman Empire fell.",
    "List five vegetables that grow in winter.",
)
"""Test prompts: questions, stories, code and sums."""


@dataclass(frozen=True, slots=True)
class Variation:
    """Copy of a drafter with one setting changed, to find out why the drafter does not fit its target."""

    kind: str
    """Fault that this change would fix, such as "rotary length"."""
    change: str
    """The changed setting and its new value, as text."""
    stored: StoredDrafter | Eagle3Checkpoint


@dataclass(frozen=True, slots=True)
class Ranked:
    kind: str
    change: str
    tokens_per_round: float
    num_prompts: int
    is_confirmed: bool = False
    """True if acceptance length is higher than that of the unchanged drafter in 97.5% of bootstrap samples of prompts.
    Only for variations measured on all prompts."""


def encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Encodes a prompt to token ids, as a chat message if the tokenizer has a chat template."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])


def ask(llm: LLM, prompts: Sequence[list[int]], max_tokens: int = 48) -> list[Request]:
    """Generates the target's greedy answers, of at most `max_tokens` tokens, to prompts given as token ids. Returns
    prompts and answers as requests for `rank` and `measure`. Answers of fewer than two tokens are left out."""
    params = SamplingParams(max_tokens=max_tokens)
    answers = llm.generate_ids(list(prompts), params)
    return [
        Request(f"prompt-{number}", "", 0, list(prompt), list(answer.token_ids), params, 0, "length")
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        if len(answer.token_ids) > 1
    ]


def measure(llm: LLM, drafter: Drafter, requests: Sequence[Request]) -> float:
    """Computes the acceptance length that a drafter would have had on the stored answers of these requests, if every
    round verifies all drafts."""
    return Rounds.sum(_rounds(llm, drafter, requests)).tokens_per_round


def _rounds(llm: LLM, drafter: Drafter, requests: Sequence[Request]) -> list[Rounds]:
    return [result.figures for result in score(llm, drafter, requests)]


def drafter_of(stored: StoredDrafter | Eagle3Checkpoint) -> Drafter:
    """Builds the drafter from a checkpoint in memory."""
    if isinstance(stored, StoredDrafter):
        return drafter_from(stored)
    return Eagle3Drafter(Eagle3Network.of(stored.config, stored.tensors), ids=stored.ids)


def rank(
    llm: LLM,
    stored: StoredDrafter | Eagle3Checkpoint,
    requests: Sequence[Request],
    tell: Callable[[str], None] = lambda text: None,
) -> list[Ranked]:
    """Compares a drafter with its variations (copies with one setting changed), to find a wrong setting. Measures the
    acceptance length of each on `requests`.

    Returns one `Ranked` per drafter: first the unchanged drafter, then the variations, the highest acceptance length
    first. All variations are measured on the first six requests, the best four then on all. Variations that cannot run
    are left out.

    `tell`: function that receives the description of each variation, to show progress. Raises DrafterMismatchError if
    the unchanged drafter does not fit the target."""
    few = list(requests)[:FIRST_LOOK]
    own = _rounds(llm, drafter_of(stored), requests)
    as_is = Ranked("as it is", "", Rounds.sum(own).tokens_per_round, len(requests))
    tried: list[tuple[list[Rounds], Variation]] = []
    for variation in variations(stored, llm.target, _special_tokens(llm)):
        tell(variation.change)
        try:
            tried.append((_rounds(llm, drafter_of(variation.stored), few), variation))
        except PacelineError:
            continue  # a network of another shape, or a layer that the target lacks
    tried.sort(key=lambda pair: -Rounds.sum(pair[0]).tokens_per_round)
    ranked = []
    for place, (rounds, variation) in enumerate(tried):
        is_finalist = place < FINALISTS
        if is_finalist and len(few) < len(requests):
            rounds = _rounds(llm, drafter_of(variation.stored), requests)
        is_confirmed = is_finalist and _is_higher(rounds, own)
        length, num_prompts = Rounds.sum(rounds).tokens_per_round, len(requests if is_finalist else few)
        ranked.append(Ranked(variation.kind, variation.change, length, num_prompts, is_confirmed))
    return [as_is, *sorted(ranked, key=lambda one: -one.tokens_per_round)]


def _is_higher(rounds: Sequence[Rounds], baseline: Sequence[Rounds]) -> bool:
    """True if acceptance length is higher than `baseline` in 97.5% of paired bootstrap draws over requests."""

    def gain(items: list[tuple[float, ...]]) -> float:
        return ratio_of_sums([item[:2] for item in items]) - ratio_of_sums([item[2:] for item in items])

    pairs = zip(rounds, baseline, strict=True)
    items = [(one.num_accepted, one.num_rounds, other.num_accepted, other.num_rounds) for one, other in pairs]
    low, _ = bootstrap(items, gain)
    return low is not None and low > 0


def named(ranked: Sequence[Ranked]) -> Ranked | None:
    """Returns the variation in `ranked` (a result of `rank`) that shows which setting is wrong: the best one, if its
    acceptance length is clearly above the unchanged drafter's. Otherwise returns None."""
    as_is, *others = ranked
    if not others:
        return None
    best, least = others[0], max(as_is.tokens_per_round * LEAST_FACTOR, as_is.tokens_per_round + LEAST_GAIN)
    if best.is_confirmed:
        least = min(least, as_is.tokens_per_round * LEAST_CONFIRMED)
    return best if best.tokens_per_round >= least else None


def variations(
    stored: StoredDrafter | Eagle3Checkpoint, target: Target, special_tokens: Sequence[int] = ()
) -> Iterator[Variation]:
    """Yields copies of a DFlash or EAGLE-3 drafter, each with one setting changed that is often wrong.
    `special_tokens`: token ids to try as the mask token of a DFlash drafter."""
    if isinstance(stored, Eagle3Checkpoint):
        theta = getattr(getattr(target, "config", None), "rope_theta", None)
        thetas = [theta, *THETAS] if isinstance(theta, float) and theta not in THETAS else THETAS
        yield from (Variation(*change) for change in changes(stored, target, thetas))
        return
    for make in (_layer_ids, _rotary, _windows, _norms, _heads, _second):
        yield from make(stored, target)
    yield from _mask_tokens(stored, target, special_tokens)
    from_anchor = not stored.config.from_anchor
    change = f"position k predicts the token {'after' if from_anchor else 'at'} its place"
    change = f"sample_from_anchor {str(from_anchor).lower()}: {change}"
    yield _with(stored, "anchor slot", change, sample_from_anchor=from_anchor)
    for scale in {1.0, stored.config.shape.hidden_size**0.5} - {stored.config.input_embedding_scale}:
        yield _with(stored, "embedding scale", f"input_embedding_scale {scale:g}", input_embedding_scale=scale)


def _layer_ids(stored: StoredDrafter, target: Target) -> Iterator[Variation]:
    for step, how in ((-1, "counted from 1"), (1, "counted from -1, or shifted twice")):
        ids = [layer + step for layer in stored.config.target_layer_ids]
        if min(ids) >= 0 and max(ids) < target.num_layers:
            change = f"target_layer_ids {', '.join(map(str, ids))}: they were {how}"
            yield _with(stored, "layer ids off by one", change, target_layer_ids=ids)
    num_taps = len(stored.config.target_layer_ids)
    if num_taps > 1 and (fc := stored.tensors.get("fc.weight")) is not None:
        turned = fc.unflatten(1, (num_taps, -1)).flip(1).flatten(1)
        tensors = {**stored.tensors, "fc.weight": turned}
        yield Variation("layer order", "the last layer's features come first", replace(stored, tensors=tensors))


def _mask_tokens(stored: StoredDrafter, target: Target, special_tokens: Sequence[int]) -> Iterator[Variation]:
    own = stored.config.mask_token_id
    for token in dict.fromkeys((target.vocab_size - 1, *special_tokens, own - 1, own + 1)):
        if token != own and 0 <= token < target.vocab_size:
            yield _with(stored, "mask token", f"mask_token_id {token}", mask_token_id=token)


def _rotary(stored: StoredDrafter, target: Target) -> Iterator[Variation]:
    shape, of_target = stored.config.shape, getattr(target, "config", None)
    theta = getattr(of_target, "rope_theta", None)
    own = [theta] if isinstance(theta, float) else []
    for theta_value in dict.fromkeys((*own, *THETAS)):
        if theta_value != shape.rope_theta:
            yield _rope(stored, f"rope_theta {theta_value:g}", theta_value, shape.rope_scaling)
    scaling = getattr(of_target, "rope_scaling", None)
    if scaling and scaling["rope_type"] == "longrope":  # fits only the target's lengths and maybe a part of its heads
        scaling = shape.rope_scaling
    for scaling_value, change in ((None, "no rope_scaling"), (scaling, "the target's rope_scaling")):
        if scaling_value != shape.rope_scaling:
            yield _rope(stored, change, shape.rope_theta, scaling_value)
    order = torch.cat([torch.arange(0, shape.head_dim, 2), torch.arange(1, shape.head_dim, 2)])
    for channels, change in (
        (order, "pairs of neighbours are rotated"),
        (order.argsort(), "halves are rotated, twice permuted"),
    ):
        tensors = {name: _permuted(name, tensor, channels) for name, tensor in stored.tensors.items()}
        yield Variation("rotary style", f"weights as where {change}", replace(stored, tensors=tensors))


def _rope(stored: StoredDrafter, change: str, theta: float, scaling: dict[str, Any] | None) -> Variation:
    return _with(stored, "rotary length", change, rope_parameters=None, rope_theta=theta, rope_scaling=scaling)


def _permuted(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    """Reorders the channels of queries and keys within each head."""
    if not any(f".{which}." in name for which in ("q_proj", "k_proj", "q_norm", "k_norm")):
        return tensor
    return tensor.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)


def _windows(stored: StoredDrafter, target: Target) -> Iterator[Variation]:
    raw, num_layers = stored.config.raw, stored.config.shape.num_layers
    other, types = raw.get("use_sliding_window") is not True, raw.get("layer_types")
    sliding = ["sliding_attention"] * num_layers
    if raw.get("sliding_window"):
        yield _with(stored, "window flag", f"use_sliding_window {str(other).lower()}", use_sliding_window=other)
        if types and types != sliding:
            yield _with(stored, "window flag", "layer_types all sliding", layer_types=sliding, use_sliding_window=True)
    for causal in (False, True):
        if set(stored.config.is_causal) != {causal}:
            yield _with(stored, "window flag", f"is_causal {str(causal).lower()} on all layers", is_causal=causal)


def _norms(stored: StoredDrafter, target: Target) -> Iterator[Variation]:
    for step, change in (
        (1, "1 is added to the norms' weights"),
        (-1, "1 is taken from the norms' weights: it was added already"),
    ):
        names = [name for name in stored.tensors if name.endswith("norm.weight")]
        tensors = {**stored.tensors, **{name: stored.tensors[name] + step for name in names}}
        yield Variation("norm flags", change, replace(stored, tensors=tensors))


def _heads(stored: StoredDrafter, target: Target) -> Iterator[Variation]:
    ids, head_VD = stored.vocabulary
    if head_VD is not None:
        change = "the target's head in place of its own"
        yield Variation("head", change, replace(stored, vocabulary=Vocabulary(ids, None)))
    if ids is None:
        return
    yield Variation("head", "all tokens, with the target's head", replace(stored, vocabulary=Vocabulary()))
    offsets = ids - torch.arange(len(ids))
    if bool((offsets[1:] > offsets[:-1]).all()):
        change = "d2t holds token ids in place of offsets"
        yield Variation("head", change, replace(stored, vocabulary=Vocabulary(offsets, head_VD)))


def _second(stored: StoredDrafter, target: Target) -> Iterator[Variation]:
    """DFlash 2 variations: taps and sides of its convolutions, and its two codebooks."""
    sizes = stored.config.second
    if sizes is None:
        return
    for axis, change in (
        (1, "taps of the convolutions in the other order"),
        (0, "input and output side of the convolutions exchanged"),
    ):
        tensors = {name: _turned(name, tensor, axis, sizes.conv_kernel_size) for name, tensor in stored.tensors.items()}
        yield Variation("convolution", change, replace(stored, tensors=tensors))
    before, behind = (f"candidate_selector.{which}_codebook" for which in ("predecessor", "successor"))
    exchanged = {**stored.tensors, before: stored.tensors[behind], behind: stored.tensors[before]}
    yield Variation("selector", "its two codebooks exchanged", replace(stored, tensors=exchanged))


def _turned(name: str, tensor: Tensor, axis: int, num_taps: int) -> Tensor:
    """Flips a kernel [2 sides, taps, channels], or its projection [2 sides * taps * groups, D], along an axis."""
    if name.endswith("_conv.base_kernel"):
        return tensor.flip(axis)
    if name.endswith("_conv.kernel_projection.weight"):
        return tensor.unflatten(0, (2, num_taps, -1)).flip(axis).flatten(0, 2)
    return tensor


def _with(stored: StoredDrafter, kind: str, change: str, **keys: Any) -> Variation:
    """Changes keys of the config, within dflash_config if that has them; None removes a key."""
    raw = {**stored.config.raw}
    nested = {**(raw.get("dflash_config") or {})}
    for name, value in keys.items():
        place = nested if name in nested or name in ("target_layer_ids", "mask_token_id") else raw
        place.pop(name, None)
        if value is not None:
            place[name] = value
    raw["dflash_config"] = nested
    if "sample_from_anchor" in keys:
        raw.pop("shift_label", None)
        nested.pop("shift_label", None)
    return Variation(kind, change, replace(stored, config=DFlashConfig.from_json(raw)))


def _special_tokens(llm: LLM) -> list[int]:
    """Tokens often used as a mask: end tokens, names with "mask" or "pad", and the first id without text."""
    tokenizer = llm.tokenizer
    texts = tokenizer.backend.get_added_tokens_decoder()
    named = [token for token, text in texts.items() if re.search("mask|pad|fim", str(text).lower())]
    return [*tokenizer.eos_token_ids, tokenizer.vocab_size, *named]
