"""Served figures, and the whole loop closed: of a sample learned in part the engine accepts what training expects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file
from small_training import embedding, head_of

from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.formats.family import read_drafter
from paceline.engine.llm import LLM
from paceline.model.checkpoint import load_config, random_tensors
from paceline.train.config import DrafterShape, LoopConfig, LossConfig, OptimConfig
from paceline.train.documents.dataset import Corpus, Document, loop_start
from paceline.train.features.hidden_states import OnlineFeatures
from paceline.train.learn.initial_weights import FirstNorm, network_for, scale_first_logits
from paceline.train.learn.loop import Trainer
from paceline.train.learn.packs import DFlashTrainable
from paceline.train.served import agreement, length_for, serve_heldout, starts_of, walked
from paceline.train.tiny import write_tiny_target
from paceline.types import SamplingParams

BLOCK = 8
ANSWER = 1 + 8 * BLOCK
"""The prefill gives the first token, then eight whole blocks."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The tiny target, so loud that each token of its text is a surprise."""
    folder = write_tiny_target(tmp_path_factory.mktemp("served") / "target")
    tensors = random_tensors(load_config(folder), seed=1)
    save_file(
        {name: tensor if "norm" in name else 8 * tensor for name, tensor in tensors}, folder / "model.safetensors"
    )
    return LLM(str(folder), drafter="none", dtype="float32", device="cpu", max_batch=4, max_len=256)


def sample(llm: LLM, prompt: str) -> Document:
    prompt_ids = llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    (answer,) = llm.generate_ids([prompt_ids], SamplingParams(max_tokens=ANSWER))
    tokens = np.array(prompt_ids + list(answer.token_ids), dtype=np.int32)
    return Document(f"{prompt}@0/0", tokens, len(prompt_ids))


def learned(llm: LLM, document: Document, folder: Path, steps: int) -> DFlashDrafter:
    target = llm.target
    raw, network = network_for(target, "none", DrafterShape(num_layers=2, block_size=BLOCK, num_taps=2), None, 0)
    config = LoopConfig(
        max_steps=steps,
        blocks_per_step=64,
        anchors=64,
        autocast=False,
        loss=LossConfig("ce"),
        optim=OptimConfig(lr=3e-3),
    )
    features = OnlineFeatures(target, [document], network.config.target_layer_ids, needs_final=False)
    head = head_of(target, network)
    trainer = Trainer(
        DFlashTrainable(network, raw), Corpus([document], []), features, embedding(target), head, config, folder=folder
    )
    scale_first_logits(FirstNorm(network.norm.weight), head, *trainer.first_slots())
    trainer.run()
    return read_drafter(folder / f"step-{steps:06d}")


@pytest.mark.slow
def test_an_untrained_drafter_gains_nothing_and_changes_nothing(llm: LLM) -> None:
    documents = [sample(llm, prompt) for prompt in ("One", "Two", "Three", "Four", "Five")]
    llm.use_drafter("none")
    plain = [
        llm.generate_ids([each.tokens[: each.answer_start].tolist()], SamplingParams(max_tokens=12))[0]
        for each in documents
    ]
    served, _ = serve_heldout(
        llm, DFlashDrafter.random(llm.target, head_dim=16, block_size=4), documents, max_tokens=12
    )
    assert served.num_prompts == 5 and served.texts == tuple(answer.text for answer in plain[:3])
    assert served.num_tokens == sum(len(answer.token_ids) for answer in plain)
    assert sum(served.accepted_histogram) == served.num_rounds
    accepted = sum(count * rounds for count, rounds in enumerate(served.accepted_histogram))
    assert served.tokens_per_round == pytest.approx(1.0 + accepted / served.num_rounds)
    assert 1.0 <= served.tokens_per_round < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("room", [1, 8])
def test_an_answer_ends_at_the_targets_context(llm: LLM, room: int) -> None:
    context = llm.target.max_position
    prompt = Document("long@0/0", np.full(context, 65, dtype=np.int32), context - room)
    assert length_for(llm.config, [prompt], 96) == context and length_for(llm.config, [prompt], room - 1) == context - 1
    longest = LLM.of(replace(llm.config, max_len=length_for(llm.config, [prompt], 96)))
    figures, _ = serve_heldout(longest, DFlashDrafter.random(llm.target, head_dim=16, block_size=4), [prompt], 96)
    assert figures.num_tokens == room


def test_a_round_takes_the_accepted_drafts_and_one_token_more() -> None:
    assert starts_of(np.array([2, 9, 9, 0, 3, 9, 9, 9, 1])).tolist() == [0, 3, 4, 8]
    assert starts_of(np.array([0, 0, 0])).tolist() == [0, 1, 2]
    assert starts_of(np.array([], dtype=np.int64)).tolist() == []


@pytest.mark.slow
def test_teacher_forced_blocks_gone_through_as_the_engine_goes_give_what_was_served(llm: LLM, tmp_path: Path) -> None:
    """Through the checkpoint and the real engine. One is half learned, the others are not, so drafts are rejected now
    and then: the two must be one figure, to the end of each answer, and the text the target's own."""
    llm.use_drafter("none")
    documents = [sample(llm, prompt) for prompt in ("Tell me a secret", "One", "Two")]
    own = documents[0].tokens[documents[0].answer_start :].tolist()
    assert loop_start(own) == len(own) == ANSWER and len(set(own)) > ANSWER // 3, "the text must not repeat itself"
    drafter = learned(llm, documents[0], tmp_path, steps=60)
    figures, answers = serve_heldout(llm, drafter, documents, max_tokens=ANSWER)
    random = DFlashDrafter.random(llm.target, head_dim=16, block_size=BLOCK)
    untrained, _ = serve_heldout(llm, random, documents, max_tokens=ANSWER)
    assert untrained.tokens_per_round < figures.tokens_per_round < BLOCK, "some stand, some do not"
    llm.use_drafter("none")
    assert walked(llm.target, drafter, answers) == pytest.approx(figures.tokens_per_round, rel=0.01)
    llm.use_drafter(drafter)
    prompt = documents[0].tokens[: documents[0].answer_start].tolist()
    (again,) = llm.generate_ids([prompt], SamplingParams(max_tokens=ANSWER))
    assert list(again.token_ids) == own


def test_both_figures_are_told_and_a_warning_where_they_disagree() -> None:
    near = agreement({"teacher_forced": 2.0, "served_of_walked": 2.05}) or ""
    assert near == "teacher-forced blocks give 2.00 tokens a round, the engine 2.05 on the same 8 answers, 2.5% apart"
    assert agreement({}) is None
    warning = agreement({"teacher_forced": 2.0, "served_of_walked": 1.9}) or ""
    assert (
        warning.startswith("warning: ")
        and "2.00 tokens a round, the engine 1.90" in warning
        and "more than 3% apart" in warning
    )
