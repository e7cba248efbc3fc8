"""MTP drafters against Transformers' layers, draft by draft, in both layouts of files; and what is refused by name."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import ByteTokenizer
from engine_runs import run
from family_models import Written, model_of, target_of, text
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.draft.base import Drafter
from paceline.draft.mtp.checkpoint import read_mtp
from paceline.draft.mtp.drafter import MtpDrafter
from paceline.draft.registry import make_drafter
from paceline.engine.engine import Engine
from paceline.engine.round import RuleJudge
from paceline.errors import ConfigError, DrafterMismatchError, ModelFileError, UnsupportedModelError
from paceline.plan.planner import FixedPlanner
from paceline.plan.trees import Likely
from paceline.types import Batch, DraftBlock, SamplingParams
from paceline.verify.rules import RULES

PROMPTS = [text(5), text(19, 1), text(12, 2)]
NUM_TOKENS = 14
HIDDEN = 32
QWEN = {
    "fc": "mtp.fc",
    "embedding": "mtp.pre_fc_norm_embedding",
    "hidden": "mtp.pre_fc_norm_hidden",
    "final": "mtp.norm",
}
LAST = "model.layers.4."
DEEPSEEK = {
    "fc": f"{LAST}eh_proj",
    "embedding": f"{LAST}enorm",
    "hidden": f"{LAST}hnorm",
    "final": f"{LAST}shared_head.norm",
}


def block_of(name: str, config: Any) -> tuple[Any, Any]:
    """Transformers' decoder layer with attention, and its rotary embedding."""
    from transformers.models.qwen3 import modeling_qwen3 as qwen3
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    one = copy.deepcopy(config)
    one.num_hidden_layers, one.layer_types, one._attn_implementation = 1, ["full_attention"], "eager"
    if name == "qwen3-next":
        one.mlp_only_layers = []
        return qwen3_next.Qwen3NextDecoderLayer(one, 0), qwen3_next.Qwen3NextRotaryEmbedding(one)
    if name == "qwen3.5":
        return qwen3_5.Qwen3_5DecoderLayer(one, 0), qwen3_5.Qwen3_5TextRotaryEmbedding(one)
    if name == "qwen3.5-moe":
        return qwen3_5_moe.Qwen3_5MoeDecoderLayer(one, 0), qwen3_5_moe.Qwen3_5MoeTextRotaryEmbedding(one)
    return qwen3.Qwen3DecoderLayer(one, 0), qwen3.Qwen3RotaryEmbedding(one)


@dataclass
class Reference:
    """The whole of it anew for each draft: no cache, no rows."""

    model: Any
    block: Any
    rotary: Any
    own: dict[str, Tensor]
    offset: float
    tells_normed: bool

    def norm(self, which: str, hidden_TD: Tensor) -> Tensor:
        scale = (hidden_TD.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt()
        return hidden_TD * scale * (self.own[which] + self.offset)

    @torch.no_grad()
    def logits(self, tokens: list[int], drafts: list[int]) -> list[Tensor]:
        """Logits of each draft, and of one more."""
        out = self.model(torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False)
        hidden_TD, logits = out.hidden_states[-1][0], list[Tensor]()
        for step in range(len(drafts) + 1):
            following = torch.tensor([*tokens[1:], *drafts[:step]])
            embedded = self.model.get_input_embeddings()(following)
            z = torch.cat([self.norm("embedding", embedded), self.norm("hidden", hidden_TD)], dim=-1) @ self.own["fc"].T
            count = len(z)
            mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
            places = torch.arange(count)[None]
            block_output = self.block(z[None], position_embeddings=self.rotary(z[None], places), attention_mask=mask)
            u = (block_output[0] if isinstance(block_output, tuple) else block_output)[0]
            normed = self.norm("final", u)
            logits.append(self.model.lm_head(normed[-1]))
            hidden_TD = torch.cat([hidden_TD, (normed if self.tells_normed else u)[-1:]])
        return logits


Made = tuple[Path, Reference]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """A family's tiny model with a layer of random weights in its file, and the reference of it."""
    written: Written = {}
    cache: dict[str, Made] = {}

    def one(name: str) -> Made:
        if name not in cache:
            cache[name] = _write(
                *model_of(name, written, tmp_path_factory), name, tmp_path_factory.mktemp("mtp") / "model"
            )
        return cache[name]

    return one


def _write(source: Path, model: Any, name: str, folder: Path) -> Made:
    is_qwen, generator = name != "qwen3", torch.Generator().manual_seed(3)

    def drawn(shape: torch.Size | tuple[int, ...], std: float = 0.3) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    block, rotary = block_of(name, model.config)
    state = {
        key: drawn(tensor.shape) if tensor.ndim > 1 else tensor + drawn(tensor.shape)
        for key, tensor in block.state_dict().items()
    }
    block.load_state_dict(state)
    own = {
        "fc": drawn((HIDDEN, 2 * HIDDEN)),
        **{which: 1.0 - is_qwen + drawn((HIDDEN,)) for which in ("embedding", "hidden", "final")},
    }
    names = QWEN if is_qwen else DEEPSEEK
    stored = {f"{names[which]}.weight": tensor for which, tensor in own.items()}
    stored |= {("mtp.layers.0." if is_qwen else LAST) + key: tensor for key, tensor in state.items()}
    shutil.copytree(source, folder)
    if not is_qwen:
        embedding = model.get_input_embeddings().weight.detach()
        stored |= {f"{LAST}embed_tokens.weight": embedding.clone(), f"{LAST}shared_head.head.weight": embedding.clone()}
        change_config(folder, num_nextn_predict_layers=1)
    save_file(load_file(source / "model.safetensors") | stored, folder / "model.safetensors")
    return folder, Reference(model, block.eval(), rotary, own, float(is_qwen), is_qwen)


def change_config(folder: Path, **keys: Any) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | keys))


class Recording(MtpDrafter):
    """Keeps what was drafted behind which text, and the drafts' distributions."""

    rounds: list[tuple[list[int], list[int], Tensor | None]]
    branches: list[tuple[list[int], dict[tuple[int, ...], Likely]]]

    def propose(self, batch: Batch) -> DraftBlock:
        block = super().propose(batch)
        for seq, candidates in zip(batch.sequences, block.candidates_B or [], strict=False):
            if candidates and candidates.branches:
                self.branches.append((list(seq.tokens), candidates.branches))
        self.rounds += [
            (list(seq.tokens), tokens, probs)
            for seq, tokens, probs in zip(batch.sequences, block.tokens_B, block.probs_B, strict=True)
            if tokens
        ]
        return block


def recording(folder: Path, num_drafted: int = 3) -> Recording:
    drafter = Recording(read_mtp(folder), num_drafted=num_drafted)
    drafter.rounds, drafter.branches = [], []
    return drafter


def texts(
    folder: Path, drafter: Drafter | None, params: SamplingParams, rule: str = "auto", nodes: int = 0
) -> list[list[int]]:
    target = target_of(folder, num_rows=3, max_len=64)
    planner = FixedPlanner(0 if drafter is None else None, most_chunk=8, num_nodes=nodes)
    engine = Engine(target, ByteTokenizer(), drafter, judge=RuleJudge(RULES[rule]), planner=planner)
    return [seq.output_ids for seq in run(engine, PROMPTS, params)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5", "qwen3.5-moe", "qwen3"])
def test_drafts_are_the_reference_s_and_the_text_is_plain_decoding_s(name: str, make: Callable[[str], Made]) -> None:
    folder, reference = make(name)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    drafter = recording(folder)
    assert texts(folder, drafter, params) == texts(folder, None, params)
    assert sum(len(drafts) == 3 for _, drafts, _ in drafter.rounds) > 20
    for tokens, drafts, _ in drafter.rounds[::3]:
        reference_logits = reference.logits(tokens, drafts[:-1])
        for draft, logits_V in zip(drafts, reference_logits, strict=True):
            assert logits_V.max() - logits_V[draft] < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3"])
def test_branches_are_the_reference_s_and_trees_keep_the_text(name: str, make: Callable[[str], Made]) -> None:
    folder, reference = make(name)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    drafter = recording(folder)
    assert texts(folder, drafter, params, nodes=6) == texts(folder, None, params)
    assert len(drafter.branches) > 20 and any(len(branches) > 3 for _, branches in drafter.branches)
    for tokens, branches in drafter.branches[::5]:
        for path, (likely, logprobs) in branches.items():
            logprobs_V = reference.logits(tokens, list(path))[-1].float().log_softmax(-1)
            torch.testing.assert_close(logprobs_V[likely], torch.tensor(logprobs), atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(
                logprobs_V.topk(len(likely)).values, torch.tensor(logprobs), atol=1e-3, rtol=1e-3
            )


@pytest.mark.slow
def test_sampled_requests_are_told_what_the_drafts_were_drawn_from(make: Callable[[str], Made]) -> None:
    folder, reference = make("qwen3.5")
    drafter = recording(folder)
    texts(folder, drafter, SamplingParams(max_tokens=8, temperature=0.7, ignore_eos=True), "rejection")
    assert len(drafter.rounds) > 5
    for tokens, drafts, probs_KV in drafter.rounds:
        expected = torch.stack(reference.logits(tokens, drafts[:-1])) / 0.7
        assert probs_KV is not None
        torch.testing.assert_close(probs_KV.float(), expected.softmax(-1), atol=1e-3, rtol=1e-2)


@pytest.mark.slow
def test_a_seed_s_text_is_plain_decoding_s(make: Callable[[str], Made]) -> None:
    folder, _ = make("qwen3-next")
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, seed=11, ignore_eos=True)
    assert texts(
        folder, make_drafter("mtp", target_of(folder), target_name=str(folder), num_drafted=2), params
    ) == texts(folder, None, params)


def copied(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    shutil.copytree(folder, to)
    save_file(change(load_file(folder / "model.safetensors")), to / "model.safetensors")
    return to


def test_a_target_without_one_says_so(make: Callable[[str], Made], tmp_path: Path) -> None:
    def without(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}

    folder = copied(make("qwen3.5")[0], tmp_path / "model", without)
    with pytest.raises(
        ModelFileError, match=r"holds no multi-token-prediction layer .*choose another drafter, such as default"
    ):
        make_drafter("mtp", target_of(folder), target_name=str(folder))
    with pytest.raises(ConfigError, match="say with target_name which model it is"):
        make_drafter("mtp", target_of(folder))


def test_what_is_not_implemented_or_does_not_fit_is_named(make: Callable[[str], Made], tmp_path: Path) -> None:
    qwen, deepseek = make("qwen3.5")[0], make("qwen3")[0]
    second = copied(
        qwen, tmp_path / "two", lambda tensors: tensors | {"mtp.layers.1.input_layernorm.weight": torch.ones(HIDDEN)}
    )
    with pytest.raises(UnsupportedModelError, match="mtp of more than one layer is not implemented"):
        read_mtp(second)
    latent = f"{LAST}self_attn.kv_a_proj_with_mqa.weight"
    with pytest.raises(UnsupportedModelError, match="attention is MLA, which is not implemented"):
        read_mtp(copied(deepseek, tmp_path / "mla", lambda tensors: tensors | {latent: torch.ones(4, HIDDEN)}))
    with pytest.raises(
        ModelFileError, match=r"'fc.weight' of the mtp layer has shape \(32, 32\), the config asks for \(32, 64\)"
    ):
        read_mtp(
            copied(qwen, tmp_path / "narrow", lambda tensors: tensors | {"mtp.fc.weight": torch.ones(HIDDEN, HIDDEN)})
        )
    shutil.copytree(deepseek, tmp_path / "other")
    change_config(tmp_path / "other", architectures=["DeepseekV3ForCausalLM"])
    with pytest.raises(
        UnsupportedModelError, match="DeepseekV3ForCausalLM is not implemented .*its mtp layer is not read then"
    ):
        read_mtp(tmp_path / "other")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        read_mtp(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="num_drafted must be between 0 and 1024"):
        MtpDrafter.of_target(str(qwen), num_drafted=-1)


def test_another_target_is_refused(make: Callable[[str], Made]) -> None:
    drafter, target = MtpDrafter.of_target(str(make("qwen3.5")[0])), target_of(make("qwen3.5")[0])
    target.vocab_size += 1
    with pytest.raises(DrafterMismatchError, match="vocabulary: the mtp layer has 258, the target 259"):
        drafter.bind(target)
