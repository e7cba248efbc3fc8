"""Our EAGLE-3 beside that of the PyPI package `speculators`: hidden states and logits over three steps of one text.

    python -m venv build/peer && build/peer/bin/pip install torch==2.13.0 transformers speculators==0.9.0
    build/peer/bin/pip install -e '.[train]' && build/peer/bin/python experiments/eagle3_interop.py

The package's own module, with its config class and its names, gets random weights; its state is written as a
`speculators` folder and read by ours. Both run test-time training's three steps over the same random features and
tokens: all positions at once, step i attending to the keys of step 0 up to its position and to the diagonal ones of
steps 1 to i. Prints the largest difference of logits by variant, and a JSON line; exit code 1 above 1e-5.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.draft.eagle3.drafter import Eagle3Drafter
from paceline.train.documents.dataset import Document
from paceline.train.features.hidden_states import Features, FeatureSource
from paceline.train.learn.packs import Packer
from paceline.train.methods.eagle3 import Eagle3Trainable

HIDDEN, VOCAB, DRAFT_VOCAB, LENGTH, STEPS, MOST = 64, 200, 50, 24, 3, 1e-5
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "3, llama": ("llama", {}, {}),
    "3.1, llama": ("llama", {"fc_norm": True, "norm_output": True}, {}),
    "3.1, qwen3": ("qwen3", {"fc_norm": True, "norm_output": True}, {}),
    "norm before residual": ("llama", {"norm_before_residual": True}, {}),
    "one norm before fc": ("llama", {"norm_before_fc": True}, {}),
    "two layers": ("llama", {"norm_output": True}, {"num_hidden_layers": 2}),
    "biased": ("llama", {}, {"attention_bias": True}),
}


class _Anything(types.ModuleType):
    """A module of which any name may be imported: the package's loaders of data, which are not wanted here, need
    one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_package() -> Any:
    for missing in ("hs_connectors", "datasets"):
        if importlib.util.find_spec(missing) is None:
            sys.modules[missing] = _Anything(missing)
    core = importlib.import_module("speculators.models.eagle3")

    return core.Eagle3DraftModel, core.Eagle3SpeculatorConfig


def package_model(kind: str, flags: dict[str, Any], sizes: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    model_class, config_class = import_package()
    parts, greedy = (importlib.import_module(f"speculators.{name}") for name in ("config", "proposals.greedy"))
    layer = (LlamaConfig if kind == "llama" else Qwen3Config)(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128, rms_norm_eps=1e-6, **{"num_hidden_layers": 1, **sizes},
    )  # fmt: skip
    layer._attn_implementation = "eager"
    proposal = greedy.GreedyTokenProposalConfig(proposal_type="greedy", speculative_tokens=3)
    config = config_class(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=[2, 4, 6],
        speculators_config=parts.SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy",
            verifier=parts.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **flags,
    )  # fmt: skip
    torch.manual_seed(0)
    model = model_class(config).eval().float()
    for name, parameter in model.named_parameters():
        noise = torch.empty_like(parameter).normal_(0, min(0.3, 1.3 * parameter.shape[-1] ** -0.5))
        parameter.data = 1 + noise if "norm" in name else noise
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    model.d2t = ids - torch.arange(DRAFT_VOCAB)
    model.t2d = torch.isin(torch.arange(VOCAB), ids)
    return model


@torch.no_grad()
def package_steps(model: Any, taps: Tensor, tokens: Tensor) -> list[Tensor]:
    """Logits [LENGTH, DRAFT_VOCAB] of every step, as its forward makes them."""
    step_logits: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: step_logits.append(output[0].clone()))
    model(
        hidden_states=taps[None],
        input_ids=tokens[None],
        document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
        ttt_steps=STEPS,
    )
    handle.remove()
    return step_logits


@torch.no_grad()
def our_steps(drafter: Eagle3Drafter, taps: Tensor, tokens: Tensor) -> list[Tensor]:
    """The same by our training: a block of STEPS drafts begins behind every position of the text."""
    network, features = drafter.network, cast(FeatureSource, SimpleNamespace(of=lambda number: Features(taps, None)))
    text = np.array([0, *tokens.tolist(), *[0] * STEPS], dtype=np.int32)
    pack = Packer(1 + STEPS, [Document("text", text, 1)], features).pack([(0, np.arange(1, LENGTH + 1))])
    trainable = Eagle3Trainable(network, drafter.config.raw, 1 + STEPS)
    hidden = trainable.hidden(pack, network.embed_tokens.weight, is_autocast=False)
    return [*network.lm_head(hidden).unflatten(0, (LENGTH, STEPS)).unbind(1)]


def difference(name: str, folder: Path) -> float:
    """Largest difference of the logits of a variant."""
    model = package_model(*VARIANTS[name])
    skipped = ("verifier_norm.weight", "verifier_lm_head.weight")
    state = {key: tensor.clone() for key, tensor in model.state_dict().items() if key not in skipped}
    save_file({**state, "d2t": model.d2t, "t2d": model.t2d}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(LENGTH, 3 * HIDDEN, generator=generator)
    tokens = torch.randint(VOCAB, (LENGTH,), generator=generator)
    theirs, ours = package_steps(model, taps, tokens), our_steps(Eagle3Drafter.from_folder(folder), taps, tokens)
    assert len(theirs) == len(ours) == STEPS
    return max(
        float((one[: LENGTH - step] - other[: LENGTH - step]).abs().max())
        for step, (one, other) in enumerate(zip(theirs, ours, strict=True))
    )


def main() -> int:
    differences: dict[str, float] = {}
    for name in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            differences[name] = difference(name, Path(folder))
        print(f"{name:24} {differences[name]:.2e}", flush=True)
    print(json.dumps({"steps": STEPS, "largest_difference": differences, "allowed": MOST}))
    return int(max(differences.values()) > MOST)


if __name__ == "__main__":
    sys.exit(main())
