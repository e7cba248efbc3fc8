"""Training of a multi-token-prediction layer to draft chains: FastMTP (arXiv 2509.18362), on the same blocks as other
drafters.

A block is an anchor and the K tokens after it; its K draft positions are K steps of the one layer. Step 0 reads the
target's last hidden states of all positions before the anchor, causally, each with the next token; step i reads the
hidden state of step i - 1 and the text's own token. As in drafting, step i attends to the keys of step 0 up to its
anchor, and to the chain's own.

    loss = sum over steps i of b^i * CE(the target's head of step i, token of the text), b = 0.6       (FastMTP,
    equation 2)

FastMTP divides by the sum of b^i, which changes only the size of the loss. Embedding and head are the target's and
frozen; the layer's weights are those in the target's file, or a copy of its last layer if the file has no mtp layer.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.draft.mtp.checkpoint import LAYER, MtpLayer, checked, find_mtp, one_layer, read_mtp
from paceline.errors import ConfigError, DrafterMismatchError, UnsupportedModelError
from paceline.hub import resolve
from paceline.model.adapter import base_of
from paceline.model.checkpoint import config_json, load_tensors
from paceline.model.config.decoder import DecoderConfig, decoder_config
from paceline.model.gguf.container import is_gguf
from paceline.model.layout import NORMS, as_ours, layer_shapes
from paceline.model.target import Target, head_weight
from paceline.model.torch.attention import Scores
from paceline.model.torch.experts import gating
from paceline.model.torch.fused import rms_norm, swiglu
from paceline.train.config import TrainConfig
from paceline.train.learn.initial_weights import init_folder
from paceline.train.learn.losses import Head
from paceline.train.learn.packs import Pack, Trainable
from paceline.train.methods.eagle3 import ChainAttention, chain_hidden

FIRST_DEVIATION = 0.02


class MtpNetwork(nn.Module):
    """The trainable network of a multi-token-prediction layer. Its `state_dict` uses the tensor names of
    `MtpLayer.tensors`. It must compute the same as draft/mtp/drafter.py, which drafts with the layer; a test compares
    them."""

    def __init__(self, layer: MtpLayer) -> None:
        """Copies the weights, as float32. Raises UnsupportedModelError for attention sinks."""
        super().__init__()
        self.config, self.tells_normed = layer.config, layer.tells_normed
        if layer.config.has_sinks:
            raise UnsupportedModelError(
                f"mtp layers of {layer.config.family} have attention sinks, and are not trained here: use "
                "--drafter-kind eagle3"
            )
        for name, tensor in layer.tensors.items():
            _put(self, name, nn.Parameter(tensor.float().clone()))
        self._names = frozenset(layer.tensors)

    def forward(self, embedded_TD: Tensor, hidden_TD: Tensor, attend: ChainAttention) -> tuple[Tensor, Tensor]:
        """Runs one step; returns (hidden states for the next step, inputs of the LM head), [T, D] each. `embedded_TD`:
        embeddings of T tokens. `hidden_TD`: for each of these, the hidden state of the position before it. In the first
        step they are the target's hidden states, later those that the previous step returned."""
        scale = self.config.residual_scale
        both_TX = torch.cat([self._norm("embedding_norm", embedded_TD), self._norm("hidden_norm", hidden_TD)], dim=-1)
        hidden_TD = self._linear("fc", both_TX).float()
        attended_TD = self._attention(self._at("input_norm", hidden_TD), attend)
        hidden_TD = hidden_TD + scale * self._at("attention_out_norm", attended_TD)
        normed_TD = self._at("mlp_norm", hidden_TD)
        mlp_TD = self._experts(normed_TD) if self.config.has_experts(0) else self._mlp("mlp", normed_TD)
        hidden_TD = hidden_TD + scale * self._at("mlp_out_norm", mlp_TD)
        normed_TD = self._norm("final_norm", hidden_TD)
        return normed_TD if self.tells_normed else hidden_TD, normed_TD

    def _attention(self, normed_TD: Tensor, attend: ChainAttention) -> Tensor:
        shape = self.config
        query, key, value = (self._linear(f"self_attn.{which}_proj", normed_TD) for which in "qkv")
        gate = None
        if shape.output_gate:
            pairs = query.unflatten(-1, (shape.num_heads, 2, shape.head_dim))
            query, gate = pairs[:, :, 0].flatten(1), pairs[:, :, 1].flatten(1)
        if shape.qk_norm and shape.is_qk_norm_whole:
            query, key = self._norm("self_attn.q_norm", query), self._norm("self_attn.k_norm", key)
        query_THD, key_THD, value_THD = (heads.unflatten(-1, (-1, shape.head_dim)) for heads in (query, key, value))
        if shape.qk_norm and not shape.is_qk_norm_whole:
            query_THD, key_THD = self._norm("self_attn.q_norm", query_THD), self._norm("self_attn.k_norm", key_THD)
        attended_TX = attend(0, query_THD, key_THD, value_THD)
        return self._linear("self_attn.o_proj", attended_TX if gate is None else attended_TX * torch.sigmoid(gate))

    def _mlp(self, name: str, normed_TD: Tensor) -> Tensor:
        gate, up = self._linear(f"{name}.gate_proj", normed_TD), self._linear(f"{name}.up_proj", normed_TD)
        both = swiglu(gate, up) if self.config.activation == "silu" else gating(self.config)(gate, up)
        return self._linear(f"{name}.down_proj", both)

    def _experts(self, normed_TD: Tensor) -> Tensor:
        """Runs every expert, even for zero tokens, so that each has a gradient, which several processes need."""
        shape, probs_TE = self.config, self._linear("mlp.gate", normed_TD).softmax(-1, torch.float32)
        share_TK, chosen_TK = probs_TE.topk(shape.experts_per_token, dim=-1)
        if shape.normed_experts:
            share_TK = share_TK / share_TK.sum(-1, keepdim=True)
        share_TE = torch.zeros_like(probs_TE).scatter(1, chosen_TK, share_TK)
        summed_TD = torch.zeros(normed_TD.shape, device=normed_TD.device)
        for expert in range(shape.num_experts):
            tokens_S = (chosen_TK == expert).any(1).nonzero()[:, 0]
            expert_SD = self._mlp(f"mlp.experts.{expert}", normed_TD[tokens_S]).float()
            summed_TD = summed_TD.index_add(0, tokens_S, expert_SD * share_TE[tokens_S, expert, None])
        if not shape.shared_expert_size:
            return summed_TD
        opened_T1 = torch.sigmoid(self._linear("mlp.shared_expert_gate", normed_TD))
        return summed_TD + self._mlp("mlp.shared_expert", normed_TD) * opened_T1

    def _norm(self, name: str, inputs: Tensor) -> Tensor:
        weight = self.get_parameter(f"{name}.weight") + self.config.norm_offset
        return rms_norm(inputs, weight, self.config.rms_norm_eps)

    def _at(self, place: str, inputs: Tensor) -> Tensor:
        """Applies the norm at this place of the layer, if there is one."""
        name = NORMS[self.config.norms].get(place)
        return inputs if name is None else self._norm(name, inputs)

    def _linear(self, name: str, inputs: Tensor) -> Tensor:
        bias = self.get_parameter(f"{name}.bias") if f"{name}.bias" in self._names else None
        return F.linear(inputs, self.get_parameter(f"{name}.weight"), bias)


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Registers a parameter under a dotted name, in nested modules."""
    *owners, own = name.split(".")
    for owner in owners:
        if owner not in module._modules:
            module.add_module(owner, nn.Module())
        module = module.get_submodule(owner)
    module.register_parameter(own, parameter)


class MtpTrainable(Trainable):
    """A multi-token-prediction layer in training; the target's head reads its output."""

    def __init__(self, network: MtpNetwork, raw: dict[str, Any], block_size: int, embedding_scale: float = 1.0) -> None:
        """`block_size`: 1 + the number of steps. `embedding_scale`: factor on the target's embeddings."""
        self.network, self.raw, self.block_size = network, raw, block_size
        self._own = network  # with its class, for the type checker
        self.layers = [module for name, module in network.named_modules() if _is_read_by_each(network.config, name)]
        self._scale = embedding_scale

    def hidden(self, pack: Pack, embedding_VD: Tensor, is_autocast: bool) -> Tensor:
        shape, dtype = self._own.config, torch.bfloat16 if is_autocast else torch.float32
        scores = Scores(shape.attention_scale, shape.attention_cap)
        attend = ChainAttention(shape, pack.layout, dtype, first=0, scores=scores)

        def embed(ids: Tensor) -> Tensor:
            return F.embedding(ids, embedding_VD).float() * self._scale

        with torch.autocast(embedding_VD.device.type, torch.bfloat16, enabled=is_autocast):
            return chain_hidden(self._own, attend, pack, pack.taps_NF.float(), embed)


def _is_read_by_each(shape: DecoderConfig, name: str) -> bool:
    """Returns True for a leaf module that every token passes through, and for the first `experts_per_token` experts."""
    expert = name.partition("mlp.experts.")[2].partition(".")[0]
    is_leaf = name.endswith(("_proj", "norm", "fc", "gate"))
    return is_leaf and (not expert or int(expert) < shape.experts_per_token)


def mtp_for(target: Target, config: TrainConfig) -> tuple[dict[str, Any], MtpNetwork]:
    """Returns (config.json, multi-token-prediction layer) with which training begins:
    - with --init, the layer of that drafter;
    - else, with `config.shape.is_copied`, a copy of the target's last layer of full attention;
    - else, the target's own multi-token-prediction layer.

    Raises ConfigError if the target has no such layer and none is copied, or if it has one although a copy is
    requested; DrafterMismatchError if --init belongs to another target; and the errors of reading the files."""
    init = init_folder(config.init, config.target.model)
    layer = read_mtp(init) if init is not None else _first_layer(config)
    for what, mine, theirs in (
        ("hidden size", layer.config.hidden_size, target.hidden_size),
        ("vocabulary", layer.config.vocab_size, target.vocab_size),
    ):
        if mine != theirs:
            raise DrafterMismatchError(f"{what}: the mtp layer has {mine}, the target {theirs}")
    return layer.marked(config.shape.ttt_steps), MtpNetwork(layer)


def check_mtp(config: TrainConfig) -> None:
    """Checks that the training of an mtp drafter has a multi-token-prediction layer to begin with, before time is spent
    on answers. Checks nothing for other drafters, with --init, or with --scale tiny. Raises:
    - ConfigError if the target has no such layer and no copy is requested (`config.shape.is_copied`), or if it has one
      and a copy is requested;
    - UnsupportedModelError if no layer of the target can be copied;
    - ModelNotFoundError, DownloadError or ModelFileError if the target cannot be read."""
    if config.shape.kind == "mtp" and config.init is None and config.scale == "default":
        _first_layer(config)


def _first_layer(config: TrainConfig) -> MtpLayer:
    path, is_copied = resolve(config.target.model), config.shape.is_copied
    from_gguf = is_gguf(base_of(path))
    layer = None if from_gguf else find_mtp(path)  # llama.cpp's names of such layers are not read
    where = " that is read from a GGUF file" if from_gguf else ""
    if layer is None and not is_copied:
        raise ConfigError(
            f"{config.target.model} holds no multi-token-prediction layer to be trained{where}: begin a new one as a "
            "copy of its last layer (--first-layers copied), or train another kind (--drafter-kind eagle3, or dflash)"
        )
    if layer is not None and is_copied:
        raise ConfigError(
            f"{config.target.model} has a multi-token-prediction layer of its own: leave --first-layers out, and it "
            "is trained"
        )
    return layer or new_layer(path, config.loop.seed)


@torch.no_grad()
def new_layer(path: Path, seed: int = 0) -> MtpLayer:
    """Creates a multi-token-prediction layer for a target without one, as a copy of the target's last layer of full
    attention and of its final norm. `path`: the target's folder or GGUF file. At first, the layer's input is about the
    sum of the normed embedding and the normed hidden state; `seed` draws a little noise. Raises UnsupportedModelError
    if no layer can be copied."""
    raw = config_json(path)
    config = decoder_config(raw, path)
    layer = one_layer(config)
    fits = [
        index
        for index in range(config.num_layers)
        if config.layer_sizes is None
        and not config.is_linear(index)
        and config.window(index) is None
        and config.rope(index) == "main"
        and config.has_experts(index) == layer.has_experts(0)
    ]
    if not fits:
        raise UnsupportedModelError(
            f"{path}: no layer of {config.family} can be copied for mtp: use --drafter-kind eagle3"
        )
    prefix = f"layers.{fits[-1]}."
    expected = {f"model.{prefix}{name}": shape for name, shape in layer_shapes(config, fits[-1]).items()}
    every = load_tensors(path, is_wanted=lambda name: prefix in name or ".layers." not in name)
    stored = (named for named in every if prefix in named[0] or named[0].endswith(".norm.weight"))
    ours = {**{name: LAYER + name.partition(prefix)[2] for name in expected}, "model.norm.weight": "final_norm.weight"}
    size, generator = config.hidden_size, torch.Generator().manual_seed(seed)
    both = torch.cat([torch.eye(size), torch.eye(size)], dim=1)
    tensors = {
        "fc.weight": both + FIRST_DEVIATION * torch.randn(both.shape, generator=generator) / math.sqrt(size),
        **{f"{which}_norm.weight": torch.full((size,), 1.0 - config.norm_offset) for which in ("embedding", "hidden")},
        **{ours[name]: tensor for name, tensor in as_ours(config, expected, stored, path) if name in ours},
    }
    return MtpLayer(layer, checked(layer, tensors, path), config.delta is not None, raw)


def head_for(target: Target) -> Head:
    """Returns the target's LM head, with its logit scale and soft cap."""
    return Head(head_weight(target), target.ends.logits, target.ends.cap, target=target.ends)
