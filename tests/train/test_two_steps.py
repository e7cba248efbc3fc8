"""experiments/two_steps.py: inputs with revealed tokens, loss on the others alone, counts of accepted drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import two_ideas
import two_steps as script
from known_machine import KNOWN
from small_studies import ANCHOR, LENGTH, VOCAB, loud, packed, words_for

from paceline.train.config import LossConfig
from paceline.train.learn.loop import Trainer
from paceline.train.learn.losses import Slots, head_loss
from paceline.train.learn.packs import DFlashTrainable

pytestmark = pytest.mark.slow
NUM_DRAFTS = 7
COUNTS = torch.tensor([0, 2, 6])


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return words_for(tmp_path_factory.mktemp("steps"), steps=3, verify_cost=1, draft_cost=0.1)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_ideas, "this_machine", lambda device: KNOWN)


@pytest.fixture
def study(words: list[str]) -> script.Steps:
    return script.Steps(script.arguments(words))


def some_tokens(seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, LENGTH).tolist()


@torch.no_grad()
def test_input_holds_the_revealed_tokens(study: script.Steps) -> None:
    drafter, tokens = loud(study, "two"), some_tokens()
    anchors, options = [10, 15, 30], (study.embedding_VD.float(), False)
    pack, mask = packed(study, tokens, anchors), study.block.mask_token_id
    inputs_AB = drafter.input_tokens(pack, pack.slots.labels_AK, COUNTS)
    expected = [
        tokens[anchor : anchor + 1 + count] + [mask] * (NUM_DRAFTS - count)
        for anchor, count in zip(anchors, COUNTS.tolist(), strict=True)
    ]
    assert inputs_AB.tolist() == expected
    plain_TD = DFlashTrainable(drafter.network, drafter.raw).hidden(pack, *options)
    none_TD, some_TD = (
        drafter.hidden_after(pack, pack.slots.labels_AK, num_A, *options) for num_A in (0 * COUNTS, COUNTS)
    )
    assert torch.equal(none_TD, plain_TD) and torch.equal(some_TD[:NUM_DRAFTS], plain_TD[:NUM_DRAFTS])
    assert not torch.isclose(some_TD[NUM_DRAFTS:], plain_TD[NUM_DRAFTS:], atol=1e-3).all(dim=1).any()


def test_only_unrevealed_slots_are_learned(study: script.Steps) -> None:
    """A block's loss and gradient are those of a block that begins behind the revealed tokens, times its share of K."""
    pack, config, head = packed(study, some_tokens(), [10, 15, 35]), LossConfig(), study.head.in_float32()
    hidden_TD = torch.randn(3 * NUM_DRAFTS, study.target.hidden_size, generator=torch.Generator().manual_seed(2))
    hidden_TD.requires_grad_()
    rows_T, slots = script.unrevealed_first(pack.slots, COUNTS)
    loss, _ = head_loss(hidden_TD[rows_T], slots, head, config, 1.0)
    (grad_TD,) = torch.autograd.grad(loss, hidden_TD)
    expected, expected_TD = 0.0, torch.zeros_like(hidden_TD)
    for block, count in enumerate(COUNTS.tolist()):
        part = Slots(pack.slots.labels_AK[block : block + 1, count:], pack.slots.valid_AK[block : block + 1, count:])
        rows, share = slice(block * NUM_DRAFTS + count, (block + 1) * NUM_DRAFTS), (NUM_DRAFTS - count) / NUM_DRAFTS
        partial, _ = head_loss(hidden_TD[rows], part, head, config, 1.0)
        expected += share * float(partial.detach())
        expected_TD += share * torch.autograd.grad(partial, hidden_TD)[0]
    assert float(loss.detach()) == pytest.approx(expected)
    torch.testing.assert_close(grad_TD, expected_TD)
    is_learned_AK = (grad_TD.view(3, NUM_DRAFTS, -1) != 0).any(-1)
    number_K = torch.arange(NUM_DRAFTS)
    # Block 0 and 1 are in the text; of the last, whose anchor is 4 tokens before its end, all valid slots are revealed.
    assert torch.equal(is_learned_AK, (number_K >= COUNTS[:, None]) & pack.slots.valid_AK)
    assert is_learned_AK.sum(1).tolist() == [7, 5, 0]


def test_network_one_is_trained_as_dflash(study: script.Steps, tmp_path: Path) -> None:
    pack, losses = packed(study, some_tokens(), list(range(8, 32))), dict[str, float]()
    for name, kind in (("plain", Trainer), ("one", script.RevealingTrainer), ("two", script.RevealingTrainer)):
        study.trainer = kind
        study.args.out, study.args.steps = tmp_path / name, 1
        trainer, _ = study.train("two" if name == "two" else "one", 0, 1e-3, 1.0)
        losses[name] = float(trainer.pack_loss(pack, study.head, 100.0)[0].detach())
    assert losses["plain"] == losses["one"] != losses["two"]
    counts_A = script.drawn_counts(packed(study, some_tokens(), [*range(8, 32)] * 50), 0.5, 0, 1)
    assert set(counts_A.tolist()) == set(range(7)) and 0.4 < (counts_A > 0).float().mean() < 0.6
    assert not torch.equal(counts_A, script.drawn_counts(packed(study, some_tokens(), [*range(8, 32)] * 50), 0.5, 0, 2))


def test_loss_of_the_last_slot_by_hand(study: script.Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With six of seven tokens revealed, a block's loss is d-pace of one slot: CE * (1 + exp(-CE)) / 2, over K."""
    monkeypatch.setattr(script, "drawn_counts", lambda pack, *rest: torch.full((len(pack.anchors_A),), 6))
    study.args.out, study.args.steps = tmp_path, 1
    trainer, _ = study.train("two", 0, 1e-3, 1.0)
    pack = packed(study, some_tokens(), [10, 15, 20])
    loss, _ = trainer.pack_loss(pack, study.head, 100.0)
    labels_AK, drafter = pack.slots.labels_AK, trainer.drafter
    assert isinstance(drafter, script.Revealing)
    inputs_AB = torch.cat([pack.anchors_A[:, None], labels_AK[:, :6], torch.full((3, 1), study.block.mask_token_id)], 1)
    hidden_TD = drafter.hidden_of(inputs_AB, pack, study.embedding_VD, study.is_autocast)
    logits_AV = study.head.logits(hidden_TD[NUM_DRAFTS - 1 :: NUM_DRAFTS]).float()
    probs_A = logits_AV.softmax(-1)[torch.arange(3), labels_AK[:, -1]]  # all tokens can be drafted
    expected = (-probs_A.log() * (1 + probs_A) / 2).sum() / NUM_DRAFTS / 100.0
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-2)


def test_the_rule_is_chosen_on_the_tuning_documents() -> None:
    """Two documents of ten blocks. A second pass costs a tenth of the round with one, v + c."""
    rules = (script.ONE_PASS, *script.TRUE, script.BEST, *script.OWN, *script.SURE)

    def run(best_tuned: str, best: str, length: int) -> dict[str, Any]:
        uses = {"tune": best_tuned, "measure": best}
        return {
            use: {"anchors": {"lengths": [10, 10]}}
            | {
                rule: {"lengths": [length + 4 * (rule == uses[use])] * 2, "passes": [5 * (rule != script.ONE_PASS)] * 2}
                for rule in rules
            }
            for use in uses
        }

    runs = {"one": [run("own first 1", "own first 2", 16)], "two": [run(script.ONE_PASS, "own first 3", 20)]}
    figures = script.summary(runs, {"verify": 0.9, "draft": 0.1})
    assert figures["chosen"] == {"one": "own first 1", "two": script.ONE_PASS}
    row = figures["networks"]["one"]["own first 2"]
    assert row["length"]["value"] == 2.0 and row["gain"]["value"] == 1.25 and row["second_passes"] == 0.5
    assert row["needed"] == pytest.approx(1.05) and row["pays"] == "yes"
    assert figures["networks"]["one"]["own first 1"]["pays"] == "no"
    both = figures["two over one pass of one"]
    assert both["one pass"]["gain"]["value"] == 1.25 and both["one pass"]["needed"] == 1.0


def test_counts_of_a_case_by_hand() -> None:
    """Two blocks of four drafts. In the first, pass 1 has one draft right, and all follow if one token is revealed; in
    the second none is, and true tokens, which would help, cannot be revealed."""
    right_AR = torch.tensor([[1, 4, 2, 3], [0, 3, 4, 3]])
    sure_AK = torch.tensor([[0.9, 0.5, 0.3, 0.1], [0.9, 0.9, 0.9, 0.9]])
    rules = {
        name: (length_A.tolist(), second_A.tolist())
        for name, (length_A, second_A) in script.by_rule(right_AR, sure_AK).items()
    }
    assert rules[script.ONE_PASS] == ([2, 1], [False, False])
    assert rules["ceiling: true first 1"] == ([5, 4], [True, True])
    assert rules["ceiling: true first 2"] == ([3, 5], [True, True])
    assert rules[script.BEST] == ([5, 1], [True, False])
    assert rules["own first 1"] == ([5, 1], [True, True]) and rules["own first 2"] == ([2, 1], [True, True])
    assert rules["own while probability >= 0.6"] == ([5, 1], [True, False]), "all four are sure: one pass"
    assert rules["own while probability >= 0.4"] == ([2, 1], [True, False])


@torch.no_grad()
@pytest.mark.parametrize("wrong", [None, 0, 1, 4])
def test_lengths_are_those_of_two_passes(study: script.Steps, wrong: int | None) -> None:
    """The text continues with two drafts of pass 1 and five of pass 2, which sees them; a change ends it there."""
    drafter, tokens, head = loud(study, "two"), some_tokens(), study.head.in_float32()
    options = (study.embedding_VD.float(), False)

    def drafts(inputs: list[int]) -> tuple[list[int], list[float]]:
        pack = packed(study, tokens, [ANCHOR])
        probs_KV = head.logits(drafter.hidden_of(torch.tensor([inputs]), pack, *options)).softmax(-1)
        return study.ids[probs_KV.argmax(-1)].tolist(), probs_KV.amax(-1).tolist()

    mask, anchor = study.block.mask_token_id, tokens[ANCHOR]
    first, probs = drafts([anchor, *[mask] * NUM_DRAFTS])
    second, _ = drafts([anchor, *first[:2], *[mask] * (NUM_DRAFTS - 2)])
    assert first[2:] != second[2:]
    block = [token + (place == wrong) for place, token in enumerate(first[:2] + second[2:])]
    text = tokens[: ANCHOR + 1] + block + tokens[ANCHOR + 1 + NUM_DRAFTS :]
    passes = script.seven_passes(drafter, packed(study, text, [ANCHOR]), options[0], head, False)
    rules = script.by_rule(*passes)
    torch.testing.assert_close(passes[1][0], torch.tensor(probs).cumprod(0))
    assert int(rules["own first 2"][0]) == 1 + (NUM_DRAFTS if wrong is None else wrong)
    same = [ours == theirs for ours, theirs in zip(first, block, strict=True)]
    assert int(rules[script.ONE_PASS][0]) == 1 + same.index(False)


def test_the_whole_study(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two networks and tables; the same command a second time trains nothing, also with other costs."""
    script.main(words)
    first = capsys.readouterr().out
    stored = json.loads((Path(words[words.index("--out") + 1]) / "results.json").read_text())
    assert len(stored["runs"]) == 2 * 2
    rules = stored["figures"]["networks"]["two"]
    assert rules["own first 1"]["needed"] == pytest.approx(1.2 / 1.1) and rules["one pass"]["needed"] == 1.0
    assert rules[script.BEST]["length"]["value"] >= max(rules[rule]["length"]["value"] for rule in script.OWN)
    assert first.count("own first 1") >= 2 and "network two over one pass of one" in first
    monkeypatch.delattr(two_ideas.Study, "train")
    script.main(words)
    assert capsys.readouterr().out == first
    script.main([*words, "--draft-cost", "0.3"])
    assert "1.231" in capsys.readouterr().out
