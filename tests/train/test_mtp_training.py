"""An MTP layer learns chains as they are drafted: training computes what drafting does, and drafts get better."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_models import target_of, text, write_model
from gguf_files import write_gguf
from model_folders import write_config
from mtp_models import Folder, mtp_folders, shaken
from round_loop import generate, ready
from small_training import assert_resumes
from torch import Tensor

from paceline.config import EngineConfig
from paceline.draft.base import NoDrafter, Observed
from paceline.draft.level import Level
from paceline.draft.mtp.checkpoint import find_mtp, read_mtp
from paceline.draft.mtp.drafter import MtpDrafter
from paceline.draft.registry import make_drafter
from paceline.draft.vocabulary import ALL_TOKENS
from paceline.errors import ConfigError, DrafterMismatchError, UnsupportedModelError
from paceline.model.checkpoint import load_config
from paceline.model.target import ForwardBatch, Target
from paceline.model.torch.experts import gating
from paceline.train import train
from paceline.train.config import DrafterShape, LoopConfig, LossConfig, OptimConfig, PromptsConfig, TrainConfig
from paceline.train.documents.dataset import Corpus, Document
from paceline.train.features.hidden_states import OnlineFeatures
from paceline.train.learn.initial_weights import scale_first_logits
from paceline.train.learn.loop import Trainer
from paceline.train.learn.losses import Slots, slot_weights
from paceline.train.learn.packs import Packer
from paceline.train.methods.kinds import check_drafter, initial_drafter
from paceline.train.methods.mtp import MtpNetwork, MtpTrainable, check_mtp, head_for, mtp_for, new_layer
from paceline.train.plan.choices import for_chains
from paceline.train.plan.training_plan import make_plan
from paceline.train.served import finished_drafter
from paceline.types import SamplingParams, Sequence

pytestmark = pytest.mark.slow
STEPS = 3
HELD = 6


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return mtp_folders(tmp_path_factory)


def documents(target: Target, number: int, length: int = 20) -> list[Document]:
    """The target's answers to random prompts."""
    prompts = [[1 + token % (target.vocab_size - 1) for token in text(4 + each % 3, each)] for each in range(number)]
    texts = [(prompt, prompt + generate(target, NoDrafter(), [prompt], length)[0][0]) for prompt in prompts]
    return [
        Document(f"{each}@0/0", np.array(whole, dtype=np.int32), len(prompt))
        for each, (prompt, whole) in enumerate(texts)
    ]


def forced(target: Target, drafter: MtpDrafter, document: Document, anchor: int) -> Tensor:
    """Logits [STEPS, V] of the decode path behind an anchor, told the text's own tokens: `extend`, then `step` by
    `step`."""
    tokens = document.tokens.tolist()
    ready(target, drafter)
    row = target.cache.allocate()
    assert row is not None
    taps = target.forward(ForwardBatch([row], [0], [anchor], tokens[:anchor], "none")).taps_TF
    sequence = Sequence(0, tokens[: anchor + 1], anchor + 1, SamplingParams())
    sequence.row = row
    drafter.start(sequence)
    drafter.observe([Observed(sequence, 0, anchor, taps)])
    drafter._sort()
    drafter._inject([row])
    state, logits = drafter._states[[row]], []
    for step in range(STEPS):
        logits.append(drafter._path.logits(state)[0])
        level = Level([row], [anchor], [step], [[list(range(step + 1))]])
        state = drafter._path.step(level, [tokens[anchor + 1 + step]], state)
    target.cache.free(row)
    return torch.stack(logits)


def pack_of(target: Target, texts: list[Document], chosen: list[Any]) -> Any:
    return Packer(1 + STEPS, texts, OnlineFeatures(target, texts, (target.num_layers - 1,), False)).pack(chosen)


def embedding_of(target: Target) -> Tensor:
    return target.matrix_embed(torch.arange(target.vocab_size)).clone()


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3.5", "qwen3.5-moe", "mixtral", "gemma2", "olmo2", "granite", "phi4-mini"]
)
def test_a_block_is_what_drafting_computes(name: str, folder_of: Folder) -> None:
    """Every step of every block, its tokens given; documents beside it change nothing. Every weight has a gradient."""
    folder = folder_of(name)
    target, layer = target_of(folder), shaken(new_layer(folder))
    layer = replace(layer, raw=layer.marked(STEPS))
    texts = documents(target, 3)
    chosen = [(0, np.array([5, 9])), (2, np.array([6, 13]))]
    trainable = MtpTrainable(network := MtpNetwork(layer), layer.raw, 1 + STEPS, target.ends.embedding)
    hidden_TD = trainable.hidden(pack_of(target, texts, chosen), embedding_of(target), False)
    logits_AKV = head_for(target).logits(hidden_TD).unflatten(0, (-1, STEPS))
    places = [(number, int(anchor)) for number, anchors in chosen for anchor in anchors]
    for block, (number, anchor) in enumerate(places):
        expected = forced(target, MtpDrafter(layer), texts[number], anchor)
        torch.testing.assert_close(logits_AKV[block], expected, atol=1e-5, rtol=1e-5)
    logits_AKV.square().sum().backward()
    without = [each for each, parameter in network.named_parameters() if parameter.grad is None]
    assert not without
    assert sum(parameter.grad.abs().sum() > 0 for parameter in network.parameters() if parameter.grad is not None) > 8


@pytest.mark.parametrize("activation", ["gelu_tanh", "clamped_swiglu"])
def test_gates_have_the_gradient_of_what_they_compute(activation: Any, folder_of: Folder) -> None:
    """The product is made in place, for decoding."""
    config = replace(load_config(folder_of("gemma2")), activation=activation)
    gate, up = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(gating(config), (gate, up))


def settings(**loop: Any) -> TrainConfig:
    options = {"blocks_per_step": 16, "anchors": 16, "autocast": False, "serve_share": 0.0, **loop}
    return for_chains(
        TrainConfig(shape=DrafterShape(kind="mtp"), loop=LoopConfig(optim=OptimConfig(lr=3e-3), **options))
    )


def trained(folder: Path, model: Path, texts: list[Document], **loop: Any) -> Trainer:
    config, target = settings(**loop), target_of(model)
    raw, network = mtp_for(target, replace(config, target=EngineConfig(str(model))))
    taps = (target.num_layers - 1,)
    trainer = Trainer(
        MtpTrainable(network, raw, 1 + STEPS, target.ends.embedding), Corpus(texts[HELD:], texts[:HELD]),
        OnlineFeatures(target, texts[HELD:], taps, False), embedding_of(target), head_for(target), config.loop,
        folder=folder,
    )  # fmt: skip
    trainer.heldout["heldout"] = texts[:HELD], OnlineFeatures(target_of(model), texts[:HELD], taps, False)
    return trainer


def test_what_is_learned_is_served(folder_of: Folder, tmp_path: Path) -> None:
    """By the engine's rounds, from memory and from disk; the text is plain decoding's, and the held-out
    loss falls."""
    model = folder_of("few+")
    target = target_of(model)
    texts = documents(target, 24, 24)
    trainer, figures = trained(tmp_path / "run", model, texts, max_steps=16, heldout_every=16), list[Any]()
    prompts = [each.tokens[: each.answer_start].tolist() for each in texts[:3]]

    def served(drafter: Any) -> float:
        num_rounds = 0
        for prompt, document in zip(prompts, texts, strict=False):
            answers, rounds = generate(target, drafter, [prompt], 20)
            assert answers[0] == document.tokens[document.answer_start :][:20].tolist()
            num_rounds += len(rounds)
        return 20 * len(prompts) / num_rounds

    first = trainer.evaluate(*trainer.heldout["heldout"])["loss"]
    assert trainer.run(figures.append)
    finished = finished_drafter(trainer.drafter.raw, trainer.parallel.weights(trainer.network), ALL_TOKENS)
    finished.save(tmp_path / "drafter")
    drafter = make_drafter(str(tmp_path / "drafter"), target)
    assert isinstance(drafter, MtpDrafter) and drafter.num_drafted == STEPS
    assert served(drafter) == served(finished), "the folder is the drafter"
    assert figures[-1]["heldout"]["loss"] < first


@pytest.mark.parametrize("name", ["ce", "kl"])
def test_the_loss_is_the_formula(name: str, folder_of: Folder, tmp_path: Path) -> None:
    """Weights .6^i of the steps; the teacher of kl is the target's own head over its own last hidden state."""
    model = folder_of("qwen3.5+")
    target = target_of(model)
    texts = documents(target, HELD + 2)
    trainer = trained(tmp_path, model, texts, loss=LossConfig(name))
    features = OnlineFeatures(target, texts, (target.num_layers - 1,), name == "kl")
    pack = Packer(1 + STEPS, texts, features).pack([(0, np.array([6, len(texts[0]) - 2])), (1, np.array([9]))])
    labels_AK, valid_AK = pack.slots.labels_AK, pack.slots.valid_AK
    assert not valid_AK.all(), "the test needs slots behind the end"
    loss, _ = trainer.pack_loss(pack, trainer.head, 10.0)
    hidden_TD = trainer.drafter.hidden(pack, trainer.embedding_VD, False)
    said_AKV = torch.log_softmax(trainer.head.logits(hidden_TD), -1).unflatten(0, labels_AK.shape)
    expected = torch.zeros(())
    for block, slot in valid_AK.nonzero().tolist():
        each = -said_AKV[block, slot, labels_AK[block, slot]]
        if name == "kl":
            assert pack.slots.final_AKD is not None
            theirs_V = torch.log_softmax(target.head(pack.slots.final_AKD[block, slot][None])[0], -1)
            each = (theirs_V.exp() * (theirs_V - said_AKV[block, slot])).sum()
        expected = expected + 0.6**slot * each / 10
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)


def test_a_resumed_run_follows_the_uninterrupted_one(folder_of: Folder, tmp_path: Path) -> None:
    model = folder_of("qwen3.5+")
    texts = documents(target_of(model), 12)
    assert_resumes(lambda folder: trained(folder, model, texts, max_steps=6), tmp_path)


def asks(model: Path, **shape: Any) -> TrainConfig:
    return TrainConfig(target=EngineConfig(str(model)), shape=DrafterShape(kind="mtp", **shape))


def test_a_target_without_such_a_layer_says_what_to_do(folder_of: Folder, tmp_path: Path) -> None:
    assert find_mtp(folder_of("qwen3")) is None
    with pytest.raises(
        ConfigError, match=r"holds no multi-token-prediction layer .*--first-layers copied.*--drafter-kind eagle3"
    ):
        check_mtp(asks(folder_of("qwen3")))
    check_mtp(asks(folder_of("qwen3"), start="copied"))
    check_mtp(asks(folder_of("qwen3.5+")))
    with pytest.raises(ConfigError, match="has a multi-token-prediction layer of its own: leave --first-layers out"):
        check_mtp(asks(folder_of("qwen3.5+"), start="copied"))
    for name, family in (("mistral", "mistral"), ("gemma4", "gemma4_text")):
        with pytest.raises(UnsupportedModelError, match=f"no layer of {family} can be copied for mtp"):
            check_mtp(asks(folder_of(name), start="copied"))
    with pytest.raises(UnsupportedModelError, match="attention sinks"):
        MtpNetwork(new_layer(folder_of("gpt-oss")))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="read from a GGUF file: begin a new one"):
        check_mtp(asks(tmp_path / "model.gguf"))
    MtpDrafter(read_mtp(folder_of("qwen3+"))).save(tmp_path / "drafter")
    target = target_of(folder_of("qwen3.5+"))
    target.vocab_size += 1
    with pytest.raises(DrafterMismatchError, match="vocabulary: the mtp layer has 258, the target 259"):
        mtp_for(target, replace(asks(folder_of("qwen3+")), init=str(tmp_path / "drafter")))
    write_config(tmp_path, vocab_size=259)
    with pytest.raises(DrafterMismatchError, match="--init .*drafter: .*: the mtp layer has"):
        check_drafter(replace(asks(tmp_path), init=str(tmp_path / "drafter")))


def test_a_new_layer_of_a_gguf_file_is_that_of_the_folder(tmp_path: Path) -> None:
    """Told the token and the hidden state added up, its last layer and final norm the target's."""
    _, model = write_model(tmp_path / "folder", "qwen2")
    write_gguf(tmp_path / "model.gguf", model, "qwen2")
    check_mtp(asks(tmp_path / "model.gguf", start="copied"))
    layer, again = new_layer(tmp_path / "folder"), new_layer(tmp_path / "model.gguf")
    assert layer.tensors.keys() == again.tensors.keys() and not layer.tells_normed
    for name, tensor in layer.tensors.items():
        torch.testing.assert_close(again.tensors[name].float(), tensor.float(), atol=0, rtol=0)
    last = model.model.layers[3].state_dict()
    assert all(torch.equal(layer.tensors[name], tensor) for name, tensor in last.items())
    assert torch.equal(layer.tensors["final_norm.weight"], model.model.norm.weight)
    size = layer.config.hidden_size
    torch.testing.assert_close(layer.tensors["fc.weight"], torch.eye(size).repeat(1, 2), atol=0.03, rtol=0)
    MtpDrafter(again).save(tmp_path / "drafter")
    assert MtpDrafter.from_folder(tmp_path / "drafter").layer.config.num_layers == 1


def test_only_a_new_layer_s_first_logits_are_scaled(folder_of: Folder) -> None:
    """By the whole of the norm's weight, of which families with an offset store what is beyond it."""
    for name, is_new in (("gemma2", True), ("qwen3.5+", False)):
        config = for_chains(asks(folder_of(name), **({"start": "copied"} if is_new else {})))
        begins = initial_drafter(config, target_of(folder_of(name)), None)
        norm = begins.first_norm
        assert (norm is not None) == is_new
        if norm is None:
            continue
        before = norm.weight.detach() + norm.offset
        labels_T = torch.arange(20)
        hidden_TD = 50 * torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
        slots = Slots(labels_T[:, None], torch.ones(20, 1, dtype=torch.bool))
        factor = scale_first_logits(norm, begins.head, hidden_TD, slots)
        assert norm.offset == 1.0 and factor < 0.5
        torch.testing.assert_close(norm.weight + norm.offset, before * factor)


@pytest.mark.parametrize(
    ("shape", "loop", "message"),
    [
        ({"draft_vocab": 100}, {}, "draft_vocab means nothing for mtp drafters"),
        ({"intermediate_size": 64}, {}, "intermediate_size means nothing for mtp drafters"),
        ({"num_layers": 2}, {}, "num_layers above 1 is not implemented for mtp"),
        ({}, {"gradient_checkpointing": True}, "gradient_checkpointing is not implemented for mtp"),
    ],
)
def test_settings_that_mean_nothing_are_refused(shape: dict[str, Any], loop: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        for_chains(TrainConfig(shape=DrafterShape(kind="mtp", **shape), loop=LoopConfig(**loop)))


def test_what_is_not_asked_for_is_fastmtp_s(folder_of: Folder) -> None:
    """Weights .6^i of the steps; a small rate for a layer that came with its target, and the plan leaves it so."""
    config = for_chains(asks(folder_of("qwen3.5+")))
    assert (config.shape.num_layers, config.shape.block_size, config.loop.loss.name, config.loop.optim.lr) == (
        1,
        4,
        "ce",
        5e-5,
    )
    weights_AK = slot_weights(config.loop.loss, torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool))
    torch.testing.assert_close(weights_AK, torch.tensor([[1.0, 0.6, 0.36]]))
    plan = make_plan(replace(asks(folder_of("qwen3.5+")), given=()))
    assert plan.config.loop.optim.lr == 5e-5 and (plan.sizes.num_layers, plan.sizes.num_taps, plan.expected) == (
        1,
        1,
        None,
    )
    new = make_plan(replace(asks(folder_of("qwen3"), start="copied"), given=("shape.start",)))
    assert new.config.loop.optim.lr > 5e-4 and new.config.shape.start == "copied"
    chain_config = replace(
        asks(folder_of("qwen3.5+")), loop=LoopConfig(loss=LossConfig("kl", gamma=4.0), optim=OptimConfig(lr=1e-3))
    )
    kept = for_chains(chain_config).loop
    assert (kept.loss.name, kept.loss.gamma, kept.optim.lr) == ("kl", 4.0, 1e-3)


def test_the_whole_run_and_one_that_goes_on_from_it(tmp_path: Path) -> None:
    """Prompts in, drafter out, for a target without such a layer; then --init."""
    shape, loop = DrafterShape(kind="mtp", start="copied"), LoopConfig(max_steps=3, autocast=False)
    config = TrainConfig(out=tmp_path / "run", scale="tiny", plan="off", shape=shape, loop=loop)
    config = replace(
        config, target=replace(config.target, device="cpu", dtype="float32"), prompting=PromptsConfig(limit=10)
    )
    result = train(config)
    drafter = MtpDrafter.from_folder(result.drafter)
    assert drafter.num_drafted == 3 and result.heldout["heldout"] >= 1.0
    steps = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    assert steps[0]["loss"] < math.log(260) + 1, "its logits begin small"
    card = (result.drafter / "README.md").read_text()
    assert (
        "Drafts 3 tokens a round" in card and "One multi-token-prediction layer, in the layout of DeepSeek-V3" in card
    )
    answers = (result.run / "regenerate" / "answers",)
    config = replace(config, out=tmp_path / "again", answers=answers, init=str(result.drafter), heldout_share=0.0)
    again = train(replace(config, shape=DrafterShape(kind="mtp")))
    assert MtpDrafter.from_folder(again.drafter).layer.config == drafter.layer.config
