"""EAGLE-3 learns by test-time training: the chain in training is the chain in drafting, and it gets better."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from round_loop import admit, generate, ready
from small_training import assert_resumes
from tiny_dflash import VOCAB, tiny_target
from tiny_eagle3 import IDS, Formulas, loud_network, raw_eagle3

from paceline.config import EngineConfig
from paceline.draft.base import NoDrafter
from paceline.draft.eagle3.checkpoint import Eagle3Config
from paceline.draft.eagle3.drafter import Eagle3Drafter, Eagle3Network
from paceline.draft.vocabulary import Vocabulary
from paceline.errors import ConfigError
from paceline.model.target import ForwardBatch
from paceline.train import train
from paceline.train.config import DrafterShape, LoopConfig, LossConfig, OptimConfig, PromptsConfig, TrainConfig
from paceline.train.documents.dataset import Corpus, Document
from paceline.train.features.hidden_states import OnlineFeatures, ScaledFeatures, measure_scale
from paceline.train.learn.loop import Trainer
from paceline.train.learn.packs import Packer
from paceline.train.methods.eagle3 import Eagle3Trainable, eagle3_for, target_head, use_scaled_eagle3_units
from paceline.train.plan.choices import for_chains
from paceline.train.plan.training_plan import make_plan
from paceline.train.served import finished_drafter
from paceline.train.tiny import write_tiny_target
from paceline.types import Batch, SamplingParams

pytestmark = pytest.mark.slow
STEPS = 3


@cache
def documents(number: int, length: int = 24) -> list[Document]:
    """The tiny target's answers to random prompts."""
    generator, target = np.random.default_rng(0), tiny_target()
    prompts = [generator.integers(0, VOCAB, 4 + each % 3).tolist() for each in range(number)]
    texts = [(prompt, prompt + generate(target, NoDrafter(), [prompt], length)[0][0]) for prompt in prompts]
    return [
        Document(f"{each}@0/0", np.array(text, dtype=np.int32), len(prompt))
        for each, (prompt, text) in enumerate(texts)
    ]


def packed(config: Eagle3Config, texts: list[Document], chosen: list[Any], needs_final: bool = False) -> Any:
    features = OnlineFeatures(tiny_target(), texts, config.tap_layers, needs_final)
    return Packer(1 + STEPS, texts, features).pack(chosen)


@pytest.mark.parametrize(
    "changes", [{}, {"num_hidden_layers": 2, "norm_output": False}, {"draft_vocab_size": len(IDS)}], ids=str
)
def test_a_block_is_a_chain_of_the_formulas(changes: dict[str, Any]) -> None:
    """Every slot of every block, its tokens given: documents of other lengths beside it change nothing."""
    network, texts = loud_network(raw_eagle3(**changes)), documents(3)
    chosen = [(0, np.array([5, 9])), (2, np.array([6, 12, 20]))]
    pack, target = packed(network.config, texts, chosen), tiny_target()
    embedding_VD = target.embed(torch.arange(VOCAB)).clone()
    hidden_TD = Eagle3Trainable(network, {}, 1 + STEPS).hidden(pack, embedding_VD, False)
    logits_AKV = network.lm_head(hidden_TD).unflatten(0, (-1, STEPS)).double()
    target.set_taps(network.config.tap_layers)
    formulas, block = Formulas(network, embedding_VD), 0
    for number, anchors in chosen:
        tokens = texts[number].tokens.tolist()
        for anchor in anchors:
            row = target.cache.allocate()
            taps = target.forward(ForwardBatch([row], [0], [anchor], tokens[:anchor], "none")).taps_TF.clone()
            target.cache.free(row)
            expected = formulas.chain(tokens[: anchor + 1], taps, tokens[anchor + 1 : anchor + 1 + STEPS])
            torch.testing.assert_close(logits_AKV[block, : len(expected)], torch.stack(expected), atol=2e-4, rtol=2e-4)
            block += 1


@pytest.mark.parametrize("name", ["ce", "kl", "d-pace"])
def test_the_loss_is_the_formula(name: str) -> None:
    """Weights 0.8^i; tokens outside the draft vocabulary teach nothing; the teacher is the target over that
    vocabulary."""
    network, texts, target = loud_network(raw_eagle3(draft_vocab_size=len(IDS))), documents(2), tiny_target()
    pack = packed(network.config, texts, [(0, np.array([6, 27])), (1, np.arange(6, 12))], needs_final=name == "kl")
    embedding_VD = target.embed(torch.arange(VOCAB)).clone()
    trainable, head = Eagle3Trainable(network, {}, 1 + STEPS), target_head(target, IDS)
    settings = LossConfig(name)
    loss, metrics = trainable.loss(pack, embedding_VD, head, settings, 10.0, is_autocast=False, is_measured=True)
    labels_AK, valid_AK = pack.slots.labels_AK, pack.slots.valid_AK
    assert not valid_AK.all() and not torch.isin(labels_AK, IDS).all(), "the test needs slots that teach nothing"
    hidden_TD = trainable.hidden(pack, embedding_VD, False)
    log_probs = torch.log_softmax(network.lm_head(hidden_TD), -1).unflatten(0, labels_AK.shape)
    expected = 0.0
    for block, slot in valid_AK.nonzero().tolist():
        token = int(labels_AK[block, slot])
        if token not in IDS or name == "d-pace":
            continue
        own = log_probs[block, slot]
        each = -own[IDS.tolist().index(token)]
        if name == "kl":
            logprobs = torch.log_softmax(target.head(pack.slots.final_AKD[block, slot][None])[0, IDS], -1)
            each = (logprobs.exp() * (logprobs - own)).sum()
        expected = expected + 0.8**slot * each / 10
    if name != "d-pace":
        torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in network.parameters())
    assert metrics.sums_4K[0].tolist() == valid_AK.sum(0).tolist() and 1.0 <= metrics.rates()["eal"] <= 1 + STEPS


def trained(
    folder: Path, texts: list[Document], steps: int, version: str = "3.1", **changes: Any
) -> tuple[Trainer, list[Any]]:
    target = tiny_target()
    shape = DrafterShape(num_layers=1, kind="eagle3", eagle_version=version)
    ids = torch.arange(VOCAB)
    raw, network = eagle3_for(target, shape, None, ids, 0)
    source = OnlineFeatures(target, texts[8:], network.config.tap_layers, False)
    scale_F = use_scaled_eagle3_units(network, *measure_scale(source, texts[8:]), is_new=True)
    settings = LoopConfig(
        max_steps=steps, blocks_per_step=16, anchors=16, autocast=False, heldout_every=steps, **changes
    )
    settings = replace(settings, loss=LossConfig("ce"), optim=OptimConfig(lr=1e-2), serve_share=0.0)
    head, embedding_VD = target_head(target, ids), target.embed(torch.arange(VOCAB)).clone()
    trainer = Trainer(
        Eagle3Trainable(network, raw, 1 + STEPS), Corpus(texts[8:], texts[:8]), ScaledFeatures(source, scale_F),
        embedding_VD,
        head, settings, folder=folder,
    )  # fmt: skip
    held = OnlineFeatures(tiny_target(), texts[:8], network.config.tap_layers, False)
    trainer.heldout["heldout"] = texts[:8], ScaledFeatures(held, scale_F)
    steps_seen: list[Any] = []
    return trainer, steps_seen


@pytest.mark.parametrize("version", ["3.1", "3"])
def test_what_is_learned_is_served(version: str, tmp_path: Path) -> None:
    """By the real engine's rounds; the text is plain decoding's. The file is in the network's own units
    (test_teacher_forced_drafts_are_those_of_the_engine), and the held-out loss falls."""
    texts = documents(20)
    trainer, figures = trained(tmp_path, texts, 16, version)
    first = trainer.evaluate(*trainer.heldout["heldout"])["loss"]
    assert trainer.run(figures.append)
    assert figures[-1]["heldout"]["loss"] < first
    drafter = finished_drafter(
        trainer.drafter.raw, trainer.parallel.weights(trainer.network), Vocabulary(torch.arange(VOCAB))
    )
    for text in texts[:2]:
        answers, _ = generate(tiny_target(), drafter, [text.tokens[: text.answer_start].tolist()], 20)
        assert answers[0] == text.tokens[text.answer_start :][:20].tolist()


def test_teacher_forced_drafts_are_those_of_the_engine(tmp_path: Path) -> None:
    """Training and serving compute the same: at a document's anchor both take the same first token, before and after
    saving."""
    texts = documents(20)
    trainer, _ = trained(tmp_path, texts, 6)
    trainer.run()
    weights = trainer.parallel.weights(trainer.network)
    network = Eagle3Network.of(Eagle3Config.from_json(trainer.drafter.raw), weights)
    drafter, target = Eagle3Drafter(network, num_drafted=STEPS), tiny_target()
    drafter.save(tmp_path / "drafter")
    drafter = Eagle3Drafter.from_folder(tmp_path / "drafter", num_drafted=STEPS)
    ready(target, drafter)
    for text in texts[:3]:
        prompt, tokens = text.tokens[: text.answer_start].tolist(), text.tokens.tolist()
        seq = admit(target, drafter, prompt, SamplingParams(max_tokens=9))
        assert seq.tokens[-1] == tokens[text.answer_start]
        drafts = drafter.propose(Batch([seq])).tokens_B[0]
        pack = packed(network.config, [text], [(0, np.array([text.answer_start]))])
        hidden_TD = Eagle3Trainable(network, {}, 1 + STEPS).hidden(pack, trainer.embedding_VD, False)
        forced = network.lm_head(hidden_TD).argmax(-1).tolist()
        pairs = zip(forced, tokens[text.answer_start + 1 :], strict=False)
        same = next((at for at, (token, label) in enumerate(pairs) if token != label), STEPS - 1)
        assert forced[: same + 1] == drafts[: same + 1], "alike up to the first draft that the text does not say"
        drafter.drop(seq)
        target.cache.free(seq.row)


def test_a_resumed_run_follows_the_uninterrupted_one(tmp_path: Path) -> None:
    texts = documents(20)
    assert_resumes(lambda folder: trained(folder, texts, 6)[0], tmp_path)


@pytest.mark.parametrize(
    ("shape", "loop", "message"),
    [
        ({"start": "copied"}, {}, "start copied is not implemented"),
        ({"sliding_window": 4}, {}, "sliding_window means nothing for eagle3 drafters"),
        ({}, {"gradient_checkpointing": True}, "gradient_checkpointing is not implemented"),
        ({}, {"loss": LossConfig("ce", vocab=50)}, "the loss vocabulary means nothing"),
    ],
)
def test_settings_that_mean_nothing_are_refused(shape: dict[str, Any], loop: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        for_chains(TrainConfig(shape=DrafterShape(kind="eagle3", **shape), loop=LoopConfig(**loop)))


def test_what_is_not_asked_for() -> None:
    def of(config: TrainConfig) -> tuple[Any, ...]:
        shape = (changed := for_chains(config)).shape
        return shape.num_layers, shape.block_size, shape.draft_vocab, changed.loop.loss.name

    assert of(TrainConfig(shape=DrafterShape(kind="eagle3"))) == (1, 4, 32000, "ce")
    shape = DrafterShape(kind="eagle3", num_layers=2, draft_vocab=0, ttt_steps=5)
    assert of(TrainConfig(shape=shape, loop=LoopConfig(loss=LossConfig("kl")))) == (2, 6, 0, "kl")


def test_the_plan_is_of_an_eagle3_drafter(tmp_path: Path) -> None:
    """Its own shape, and no expectation from a DFlash drafter's curve."""
    config = TrainConfig(
        shape=DrafterShape(kind="eagle3"), target=EngineConfig(str(write_tiny_target(tmp_path / "target")))
    )
    plan = make_plan(config)
    assert (plan.sizes.num_layers, plan.sizes.block_size, plan.sizes.num_taps, plan.expected) == (1, 4, 3, None)
    assert not any(name.startswith("shape.") or name == "loop.loss.vocab" for name in plan.chosen)


def test_the_whole_run_and_one_that_goes_on_from_it(tmp_path: Path) -> None:
    """Prompts in, drafter out: card, figures of the engine, a folder that other programs read; then --init."""
    shape, loop = DrafterShape(kind="eagle3", draft_vocab=100), LoopConfig(max_steps=4, autocast=False)
    config = TrainConfig(out=tmp_path / "run", scale="tiny", plan="off", shape=shape, loop=loop)
    config = replace(
        config, target=replace(config.target, device="cpu", dtype="float32"), prompting=PromptsConfig(limit=10)
    )
    result = train(config)
    raw = json.loads((result.drafter / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and raw["draft_vocab_size"] == 100
    drafter = Eagle3Drafter.from_folder(result.drafter)
    assert len(drafter.ids) == 100 and result.heldout["heldout"] >= 1.0
    assert "EAGLE-3 in SpecForge's format" in (result.drafter / "README.md").read_text()
    answers = (result.run / "regenerate" / "answers",)
    again = train(replace(config, out=tmp_path / "again", answers=answers, init=str(result.drafter), heldout_share=0.0))
    assert Eagle3Drafter.from_folder(again.drafter).ids.tolist() == drafter.ids.tolist()
