"""Describes the contents of a drafter's folder as a table of properties, for `paceline inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from paceline.draft.dflash.checkpoint import PACKED, StoredDrafter, weights_file
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.eagle3.checkpoint import Eagle3Checkpoint
from paceline.draft.mtp.checkpoint import MtpLayer
from paceline.model.config.decoder import DecoderConfig, decoder_config


class Fact(NamedTuple):
    what: str
    value: Any
    meaning: str = ""
    """Explanation of the value, as text."""


def described(stored: StoredDrafter, folder: Path) -> list[Fact]:
    """Returns the properties of a DFlash, DFlash 2 or DSpark drafter that determine its drafts, with explanations for
    the user. `folder`: where the drafter was read from."""
    config, shape = stored.config, stored.config.shape
    ids, head_VD = stored.vocabulary
    packed = ", read from blocks of 8 bits" if weights_file(folder).name == PACKED else ""
    head = "with the target's head" if head_VD is None else "with a head of its own"
    head += ", whose rows embed tokens too" if config.has_own_width else ""
    taps = ", ".join(map(str, config.target_layer_ids))
    one_more = ", ".join(str(each + 1) for each in config.target_layer_ids)
    aligned = f"position k predicts the token {'after' if config.from_anchor else 'at'} its place"
    facts = [
        Fact("format", stored.form, _tensors(stored.tensors) + packed),
        Fact("kind", kind_of(config), _second(stored)),
        Fact("made for", _target(stored)),
        Fact(
            "network",
            f"{shape.num_layers} layers",
            f"hidden size {shape.hidden_size}, {_heads(shape)}, MLP {shape.intermediate_size}",
        ),
        Fact("taps", taps, f"outputs of these target layers, counted from 0; hidden_states[{one_more}]"),
        Fact("block", config.block_size, f"drafts {config.num_slots} tokens per round; {aligned}"),
        Fact("mask token", config.mask_token_id, "input at the positions to be drafted"),
        Fact("draft vocabulary", "all tokens" if ids is None else f"{len(ids)} tokens", head),
        Fact("rotary", f"theta {shape.rope_theta:g}", _rotary(stored)),
        Fact("window", _windows(stored), _causality(stored)),
        Fact("norms", f"mean weight {_norm_mean(stored):.2f}", _norms(stored)),
    ]
    flags = (
        ("embedding scale", config.input_embedding_scale, 1.0, "embeddings of the block are multiplied by it"),
        ("output multiplier", config.output_multiplier, 1.0, "logits are multiplied by it"),
        ("soft cap", config.final_logit_softcapping, 0.0, "logits are kept within it, by tanh"),
        ("biases", shape.qkv_bias, False, "in attention, as attention_bias says"),
    )
    facts += [Fact(what, value, meaning) for what, value, usual, meaning in flags if value != usual]
    unread = (*stored.unread, *stored.others)
    return facts + ([Fact("not read", ", ".join(unread), "nothing here knows what to do with it")] if unread else [])


def kind_of(config: DFlashConfig) -> str:
    """Returns "DFlash v1", "DFlash 2" or "DSpark"."""
    return "DFlash 2" if config.second else "DSpark" if config.markov else "DFlash v1"


def described_mtp(layer: MtpLayer, folder: Path) -> list[Fact]:
    """Returns the properties of an MTP layer in a folder that holds only this layer, with explanations for the user."""
    shape = layer.config
    layout = "Qwen3-Next's and Qwen3.5's" if layer.tells_normed else "DeepSeek-V3's"
    mlp = (
        f"{shape.num_experts} experts of {shape.expert_size}"
        if shape.has_experts(0)
        else f"MLP {shape.intermediate_size}"
    )
    of_target = decoder_config(layer.raw, folder)
    position = "after" if layer.tells_normed else "before"
    return [
        Fact("format", f"{layout} names", _tensors(layer.tensors)),
        Fact("kind", "MTP layer", "drafts token after token; embedding and head are the target's"),
        Fact("made for", f"{shape.family}, {of_target.num_layers} layers, {shape.vocab_size} tokens"),
        Fact("network", "1 layer", f"hidden size {shape.hidden_size}, {_heads(shape)}, {mlp}"),
        Fact("taps", of_target.num_layers - 1, "the target's last hidden state, after its final norm"),
        Fact("drafts", layer.steps, "tokens per round, one after another: the steps that it was trained for"),
        Fact("hidden state", f"{position} the final norm", "passed to the next drafting step"),
    ]


def described_eagle3(stored: Eagle3Checkpoint) -> list[Fact]:
    """Returns the properties of an EAGLE-3 drafter, with explanations for the user."""
    config, shape, raw = stored.config, stored.config.shape, stored.config.raw
    style = "speculators' names" if "transformer_layer_config" in raw else "SpecForge's names"
    residual = "the normed features" if config.norm_before_residual else "the features"
    position = "after" if config.norm_output else "before"
    norms = "one for each layer" if config.fc_norm else "one over all" if config.norm_before_fc else "none"
    has_own = "embed_tokens.weight" in stored.tensors
    return [
        Fact("format", style, _tensors(stored.tensors)),
        Fact("kind", "EAGLE-3", "drafts token after token, chains and trees"),
        Fact("made for", f"{_named(raw)}hidden size {config.target_hidden_size}, {shape.vocab_size} tokens"),
        Fact(
            "network", f"{shape.num_layers} layers", f"{shape.family}, hidden size {shape.hidden_size}, {_heads(shape)}"
        ),
        Fact(
            "taps",
            ", ".join(map(str, config.tap_layers)) or "not given",
            "target layers; not given: as engines choose them",
        ),
        Fact("features' norms", norms, "before they are put together (fc_norm, norm_before_fc)"),
        Fact("adds to", residual, f"norm_before_residual {str(config.norm_before_residual).lower()}"),
        Fact(
            "hidden state",
            f"{position} the final norm",
            f"norm_output {str(config.norm_output).lower()}: passed to the next drafting step",
        ),
        Fact("rotary", f"theta {shape.rope_theta:g}", f"scaling {shape.rope_scaling}" if shape.rope_scaling else ""),
        Fact("head", f"{config.draft_vocab_size} tokens", "of its own, among which it drafts"),
        Fact("embedding", "of its own" if has_own else "the target's"),
    ]


def _tensors(tensors: Mapping[str, Tensor]) -> str:
    size = sum(tensor.nbytes for tensor in tensors.values())
    dtypes = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}))
    return f"{len(tensors)} tensors, {size / 1e6:.1f} MB, {dtypes}"


def _heads(shape: DecoderConfig) -> str:
    return f"{shape.num_heads} heads of {shape.head_dim}, {shape.num_kv_heads} for keys"


def _named(raw: Mapping[str, Any]) -> str:
    """The target's name in a config.json of `speculators`, followed by a colon; "" without a name."""
    name = ((raw.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    return f"{name}: " if name else ""


def _target(stored: StoredDrafter) -> str:
    config = stored.config
    layers = f"{config.num_target_layers} layers" if config.num_target_layers else "number of layers not given"
    tokens = f"{config.vocab_size} tokens" if config.vocab_size else "number of tokens not given"
    named = _named(config.raw.get("speculators") or {})
    return f"{named}hidden size {config.target_hidden_size}, {layers}, {tokens}"


def _second(stored: StoredDrafter) -> str:
    sizes, markov = stored.config.second, stored.config.markov
    if markov is not None:
        confidence = "with" if markov.has_confidence else "without"
        return f"a Markov head of rank {markov.rank}, {confidence} a confidence head{_books(stored)}"
    if sizes is None:
        return "positions are drafted independently of each other"
    return (
        f"convolutions of {sizes.conv_kernel_size} taps in groups of {sizes.conv_group_size}, "
        f"a selector of rank {sizes.selector_rank} among {sizes.selector_top_k} candidates per position{_books(stored)}"
    )


def _books(stored: StoredDrafter) -> str:
    """Count of tokens with nonzero codebook rows, in words, if the file lacks rows (`packed.py`)."""
    book_VR = next(tensor for name, tensor in stored.tensors.items() if "predecessor_codebook" in name)
    num_rows, num_tokens = int(book_VR.any(dim=1).sum()), len(book_VR)
    if num_rows == num_tokens:
        return ""
    return f"; its codebooks have rows of {num_rows} tokens: behind others it adds nothing"


def _rotary(stored: StoredDrafter) -> str:
    shape = stored.config.shape
    scaling = shape.rope_scaling
    scaled = "not scaled" if scaling is None else ", ".join(f"{name} {value}" for name, value in scaling.items())
    return f"{scaled}; made for {shape.max_position} positions"


def _windows(stored: StoredDrafter) -> str:
    shape = stored.config.shape
    windows = [shape.window(layer) for layer in range(shape.num_layers)]
    if not any(windows):
        raw = stored.config.raw
        is_off = bool(raw.get("sliding_window")) and not raw.get("use_sliding_window")
        return f"none (sliding_window {raw['sliding_window']} is switched off)" if is_off else "none"
    return ", ".join(str(each or "full") for each in windows)


def _causality(stored: StoredDrafter) -> str:
    causal = stored.config.is_causal
    if not any(causal):
        return "positions attend to their whole block"
    numbers = ", ".join(str(layer) for layer, is_so in enumerate(causal) if is_so)
    layers = "all layers" if all(causal) else f"layers {numbers}"
    return f"in {layers} a position attends only to earlier ones"


def _norm_mean(stored: StoredDrafter) -> float:
    norms = [tensor.float().mean() for name, tensor in stored.tensors.items() if name.endswith("norm.weight")]
    return float(sum(norms) / len(norms))


def _norms(stored: StoredDrafter) -> str:
    if abs(_norm_mean(stored)) < 0.3:
        return "around zero, as where 1 is added to them: they are used as they are here"
    return "used as they are"
