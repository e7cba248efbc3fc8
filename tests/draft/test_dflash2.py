"""DFlash 2 on disk, in its parts and in batches; in rounds against the authors' package: test_dflash2_reference.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from native_models import ISAS, restored, use
from round_loop import admit, generate, ready
from safetensors.torch import load_file, save_file
from tiny_dflash import HIDDEN, KINDS, PROMPT, VOCAB, loud_, needs_native, raw_config, tiny_target
from tiny_dflash2 import Recording2, network_2, raw_2, reference_of

from paceline.draft.base import NoDrafter
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork
from paceline.draft.dflash2 import selector as dflash2_selector
from paceline.draft.dflash2.drafter import DFlash2Drafter, DFlash2Network
from paceline.draft.dflash2.paths import DFlash2NativePath, DFlash2Path
from paceline.draft.dflash2.selector import WalkedReading, score
from paceline.draft.formats.family import drafter_of, read_drafter
from paceline.draft.registry import make_drafter
from paceline.errors import ModelFileError
from paceline.model.native.decoder import NativeDecoder
from paceline.train.learn.attention import Layout, make_attention
from paceline.types import Batch, SamplingParams


@pytest.mark.slow
def test_a_new_one_says_what_its_v1_body_says() -> None:
    """Identity at the start: logits and drafts of the v1 drafter, bit for bit where nothing is rounded."""
    raw = raw_2()
    network = DFlash2Network.random(DFlashConfig.from_json(raw))
    body = DFlashNetwork.of(
        DFlashConfig.from_json(raw_config()),
        {
            name: network.state_dict()[name]
            for name in DFlashNetwork.random(DFlashConfig.from_json(raw_config())).state_dict()
        },
    )
    loud_(body)
    network.load_state_dict(body.state_dict(), strict=False)
    block, taps = torch.randn(16, HIDDEN), torch.randn(9, len(body.config.target_layer_ids) * HIDDEN)
    layout = Layout((9,), (torch.tensor([4, 9]),), 8)
    attend = make_attention("split", body.config, layout, torch.float32)
    torch.testing.assert_close(network(block, taps, attend), body(block, taps, attend), atol=1e-6, rtol=1e-6)
    target = tiny_target()
    assert (
        generate(target, drafter := Recording2(network), [PROMPT], 30)[0]
        == generate(target, DFlashDrafter(body), [PROMPT], 30)[0]
    )
    assert drafter.drafts == [
        logits.argmax(-1).tolist()[: len(each)] for logits, each in zip(drafter.logits, drafter.drafts, strict=True)
    ]


@pytest.mark.slow
@needs_native
def test_native_calls_where_channels_are_grouped_by_sixteen() -> None:
    """Other groups run in PyTorch beside a native target, to the same text."""
    target = tiny_target(kind=NativeDecoder)
    by_16, by_4 = (Recording2(network_2(raw_2(group=group))) for group in (16, 4))
    texts = [generate(target, drafter, [PROMPT], 30)[0] for drafter in (by_16, by_4, NoDrafter())]
    assert isinstance(by_16._path, DFlash2NativePath) and isinstance(by_4._path, DFlash2Path)
    assert texts[0] == texts[1] == texts[2]


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_many_rows_do_not_touch(dtype: str) -> None:
    """Three blocks of eight are more tokens than a thread makes inputs of by itself: mixed together, yet each for
    itself."""
    target = tiny_target(kind=NativeDecoder, dtype=getattr(torch, dtype))
    drafter = Recording2(network_2(raw_2()))
    ready(target, drafter)
    prompts = [PROMPT, PROMPT[::-1], PROMPT[3:] + PROMPT]
    rows = [admit(target, drafter, prompt, SamplingParams(max_tokens=40)) for prompt in prompts]
    drafter.propose(Batch(rows))
    together, alone = drafter.logits, []
    for row in rows:
        drafter.logits = []
        drafter.propose(Batch([row]))
        alone += drafter.logits
    assert len(together) == 3 and all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


def books_of(network: DFlash2Network) -> list[torch.Tensor]:
    return [network.candidate_selector.get_parameter(book) for book in dflash2_selector.BOOKS]


def slots_of(drafter: DFlash2Drafter, seq: Any) -> torch.Tensor:
    """Hidden states that the row's drafts were read from."""
    path = drafter._path
    assert isinstance(path, DFlash2Path | DFlash2NativePath)
    return path.read([seq.row], [seq.tokens[-1]], 7, 8)[0].flatten(0, -2).clone()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_has_the_scores_of_each_branchs_parent(kind: Any) -> None:
    target = tiny_target(kind=kind)
    drafter = Recording2(network_2(raw_2()))
    ready(target, drafter)
    seq = admit(target, drafter, PROMPT, SamplingParams(max_tokens=40, temperature=0.7, seed=1))
    block = drafter.propose(Batch([seq], num_candidates=4))
    assert block.candidates_B is not None
    candidates = block.candidates_B[0]
    assert candidates is not None
    network, logits = drafter.network, drafter.logits[0]
    reading = drafter._read([seq.row], [seq.tokens[-1]], 7, 8, True)
    assert isinstance(reading, WalkedReading)
    hidden = slots_of(drafter, seq)
    selector, (before_book, behind_book) = network.candidate_selector, books_of(network)
    for slot in (1, 4):
        for before in candidates.tokens_KM[slot - 1]:
            tokens, logprobs = candidates.at([0] * (slot - 1) + [before])
            unary, ids = logits[slot].topk(6)
            gated = before_book[before] * selector.hidden_projection(hidden[slot])
            expected = torch.log_softmax((unary + behind_book[ids] @ gated) / 0.7, dim=-1).sort(descending=True)
            assert tokens == ids[expected.indices[:4]].tolist()
            torch.testing.assert_close(torch.tensor(logprobs), expected.values[:4], atol=1e-4, rtol=1e-4)
    seen = {tuple(candidates.at([0, 0, 0, before])[0]) for before in candidates.tokens_KM[3]}
    assert len(seen) > 1, "the test needs parents that matter"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_vocabulary_keeps_codebook_rows(kind: Any) -> None:
    """Candidates are rows of a smaller head; codebooks are asked for their tokens."""
    ids = torch.tensor([1, 2, 4, 5, 8, 9])
    target = tiny_target(kind=kind)
    drafter = Recording2(network_2(raw_2()), draft_ids=ids)
    ready(target, drafter)
    rows = [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.8)]
    block = drafter.propose(Batch([admit(target, drafter, PROMPT, params) for params in rows]))
    full = Recording2(drafter.network)
    ready(target, full)
    seq = admit(target, full, PROMPT, rows[0])
    full.propose(Batch([seq]))
    selector, before, path = drafter.network.candidate_selector, seq.tokens[-1], []
    before_book, behind_book = books_of(drafter.network)
    for slot, hidden in enumerate(slots_of(full, seq)):
        gated = before_book[before] * selector.hidden_projection(hidden)
        scores = full.logits[0][slot][ids] + behind_book[ids] @ gated
        path.append(before := int(ids[scores.argmax()]))
    assert block.tokens_B[0] == path
    assert block.probs_B[1] is not None and block.probs_B[1].shape == (7, VOCAB)
    assert not block.probs_B[1][:, [0, 3, 6, 7, 10]].any()


class TestFiles:
    @pytest.mark.slow
    @pytest.mark.parametrize("suffix", ["", ".weight"])
    def test_read_and_written_unchanged(self, tmp_path: Path, suffix: str) -> None:
        raw = raw_2(unknown_key=[1, 2])
        network = network_2(raw)
        network.codebook_suffix = suffix
        DFlash2Drafter(network).save(tmp_path / "one")
        drafter = make_drafter(str(tmp_path / "one"), tiny_target())
        assert isinstance(drafter, DFlash2Drafter) and drafter.num_drafted == 7
        drafter.save(tmp_path / "two")
        assert (tmp_path / "one/config.json").read_bytes() == (tmp_path / "two/config.json").read_bytes()
        first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
        assert f"candidate_selector.successor_codebook{suffix}" in first and first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)

    @pytest.mark.slow
    def test_the_package_reads_what_is_written(self, tmp_path: Path) -> None:
        raw = raw_2()
        authors, reference = reference_of(raw, network := network_2(raw))
        network.codebook_suffix = ""
        DFlash2Drafter(network).save(tmp_path / "drafter")
        loaded = authors.DFlash2DraftModel.from_pretrained(tmp_path / "drafter")
        for name, tensor in reference.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name

    def test_it_is_not_run_as_v1(self) -> None:
        with pytest.raises(
            ModelFileError, match="conv_kernel_size is of DFlash 2, the architecture is DFlashDraftModel"
        ):
            DFlashConfig.from_json({**raw_2(), "architectures": ["DFlashDraftModel"]})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"selector_top_k": None}, "'selector_top_k' as a whole number"),
            ({"conv_group_size": 5}, "conv_group_size 5 does not divide hidden_size 32"),
            (
                {"sample_from_anchor": True, "shift_label": False},
                "sample_from_anchor and shift_label must be true or false",
            ),
        ],
    )
    def test_impossible_configs(self, changes: dict[str, Any], message: str) -> None:
        raw = raw_2()
        with pytest.raises(ModelFileError, match=message):
            DFlashConfig.from_json({**raw, "dflash_config": {**raw["dflash_config"], **changes}})

    @pytest.mark.slow
    def test_a_missing_codebook_is_named(self, tmp_path: Path) -> None:
        DFlash2Drafter(network_2(raw_2())).save(tmp_path / "drafter")
        tensors = load_file(file := tmp_path / "drafter/model.safetensors")
        save_file({name: tensor for name, tensor in tensors.items() if "predecessor" not in name}, file)
        with pytest.raises(ModelFileError, match=r"'candidate_selector.predecessor_codebook' has shape None"):
            read_drafter(tmp_path / "drafter")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [1, 2])
def test_slots_that_say_the_token_behind_them(version: int, kind: Any) -> None:
    """With the flag a block of 8 drafts 8, the first from the anchor's own slot: the same hidden states, one slot
    earlier."""
    target = tiny_target(kind=kind)
    blocks = []
    for flag in (False, True):
        raw = (raw_2 if version == 2 else raw_config)(sample_from_anchor=flag)
        network = (
            DFlashNetwork.random(DFlashConfig.from_json(raw))
            if version == 1
            else DFlash2Network.random(DFlashConfig.from_json(raw))
        )
        loud_(network)
        if isinstance(network, DFlash2Network):
            books_of(network)[1].data.zero_()
        drafter = drafter_of(network)
        ready(target, drafter)
        blocks.append(
            drafter.propose(Batch([admit(target, drafter, PROMPT, SamplingParams(max_tokens=40))])).tokens_B[0]
        )
        assert generate(target, drafter, [PROMPT], 30)[0] == generate(target, NoDrafter(), [PROMPT], 30)[0]
    assert len(blocks[1]) == 8 and blocks[1][1:] == blocks[0]


def test_random_drafters_have_the_right_shape(tmp_path: Path) -> None:
    target = tiny_target()
    drafter = make_drafter("random-dflash2", target, head_dim=8, conv_group_size=None)
    assert isinstance(drafter, DFlash2Drafter) and drafter.config.second is not None
    drafter.save(tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter/config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"] and config["dflash_config"]["selector_rank"] == 64


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_instruction_set_scores_alike(isa: str, dtype: str) -> None:
    """Convolutions and selector on each against PyTorch, one row and three (another way through the pass)."""
    target, drafter = tiny_target(kind=NativeDecoder, dtype=getattr(torch, dtype)), Recording2(network_2(raw_2()))
    with restored():
        use(isa, 2)
        ready(target, drafter)
        rows = [
            admit(target, drafter, prompt, SamplingParams(max_tokens=40))
            for prompt in (PROMPT, PROMPT[::-1], PROMPT[3:])
        ]
        for batch in (rows[:1], rows):
            drafter.propose(Batch(batch))
            numbers = [row.row for row in batch], [row.tokens[-1] for row in batch]
            assert isinstance(drafter._path, DFlash2NativePath)
            hidden_BKD, logits_BKV = drafter._path.read(*numbers, 7, 8)
            picks = drafter._path.pick(*numbers, 7, 8)
            anchors = torch.tensor(numbers[1])
            selector = drafter.network.candidate_selector
            expected = score(selector, hidden_BKD, torch.log_softmax(logits_BKV, dim=-1), anchors)
            assert torch.equal(picks.chosen_BKM.long(), expected.chosen_BKM)
            close = {"atol": 1e-4, "rtol": 1e-4} if dtype == "float32" else {"atol": 0.05, "rtol": 0.05}
            torch.testing.assert_close(picks.scores_BKPM, expected.scores_BKPM, **close)
            if dtype == "float32":
                twin = tiny_target()
                plain = DFlash2Drafter(drafter.network)
                ready(twin, plain)
                own = [admit(twin, plain, row.tokens[: row.prompt_len], SamplingParams(max_tokens=40)) for row in batch]
                plain.propose(Batch(own))
                assert isinstance(plain._path, DFlash2Path)
                reference = plain._path.read([row.row for row in own], numbers[1], 7, 8)
                torch.testing.assert_close(hidden_BKD, reference[0], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(logits_BKV, reference[1], atol=1e-4, rtol=1e-4)
