"""DSpark's heads: their formulas, the walk of the drafts, and the format of `speculators`."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_drafters import drafted
from tiny_dflash import HIDDEN, VOCAB, loud_, needs_native, raw_config, tiny_target
from tiny_dspark import network_3, raw_3

from paceline.draft.dflash.checkpoint import read_stored, write_checkpoint
from paceline.draft.dflash.config import DFlashConfig, is_dflash
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork
from paceline.draft.dflash2.codebooks import BOOKS
from paceline.draft.dspark.drafter import DSparkDrafter, DSparkNetwork
from paceline.draft.dspark.heads import ConfidenceHead, MarkovHead, pick
from paceline.draft.formats.export import export, rows_of
from paceline.draft.formats.family import drafter_from, read_drafter
from paceline.draft.formats.speculators import with_their_names
from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.native.decoder import NativeDecoder
from paceline.model.torch.decoder import Decoder

IDS = torch.tensor([0, 2, 3, 5, 8, 9, 10])


def heads() -> tuple[MarkovHead, ConfidenceHead]:
    network = network_3(raw_3())
    assert network.confidence_head is not None
    return network.markov_head, network.confidence_head


@pytest.mark.parametrize("ids", [None, IDS])
def test_a_draft_changes_the_logits_of_the_next_position(ids: torch.Tensor | None) -> None:
    """W2 W1[a] is added; greedy drafts are the largest sums over all tokens, not over the candidates alone."""
    markov, confidence = heads()
    num_columns = VOCAB if ids is None else len(ids)
    hidden_BKD, logits_BKV = torch.randn(2, 4, HIDDEN), torch.randn(2, 4, num_columns)
    picks = pick(markov, confidence, hidden_BKD, logits_BKV, torch.tensor([3, 7]), ids)
    w1, w2 = (markov.get_parameter(book) for book in BOOKS)
    columns = torch.arange(VOCAB) if ids is None else ids
    assert picks.sure_BK is not None
    for row, before in enumerate((3, 7)):
        for place in range(4):
            sums_V = logits_BKV[row, place] + w2[columns] @ w1[before]
            assert picks.tokens_BKM[row, place, 0] == columns[sums_V.argmax()]
            features = torch.cat([hidden_BKD[row, place], w1[before]])
            chance = (confidence.proj.weight[0] @ features + confidence.proj.bias[0]).sigmoid()
            torch.testing.assert_close(picks.sure_BK[row, place].exp(), chance)
            origins = [before] if place == 0 else picks.tokens_BKM[row, place - 1].tolist()
            for number, origin in enumerate(origins):
                expected_M = (logits_BKV[row, place] + w2[columns] @ w1[origin])[picks.chosen_BKM[row, place]]
                torch.testing.assert_close(picks.scores_BKPM[row, place, number], expected_M)
            before = int(picks.tokens_BKM[row, place, 0])


def test_factored_codebooks_add_what_whole_ones_do() -> None:
    config = DFlashConfig.from_json(raw_3())
    factored, whole, embedding_VD = MarkovHead(config, factored=True), MarkovHead(config), torch.randn(VOCAB, HIDDEN)
    loud_(factored)
    whole.load_state_dict({book: embedding_VD @ factored.get_parameter(f"{book[:-9]}_factor").T for book in BOOKS})
    before = torch.tensor([[1, 4], [9, 0]])
    for ids in (None, IDS):
        torch.testing.assert_close(factored.added(before, ids, embedding_VD), whole.added(before, ids))


def drafts(drafter: DSparkDrafter, kind: Any = Decoder) -> tuple[list[list[int]], list[float]]:
    """Drafts of every round of an answer, and the first round's confidence."""
    blocks, propose = list[Any](), drafter.propose

    def recorded(batch: Any) -> Any:
        blocks.append(propose(replace(batch, whole_blocks=False)))
        return blocks[-1]

    drafter.propose = recorded
    tokens = drafted(tiny_target(kind=kind), drafter)
    return tokens, blocks[0].confidence_B[0]


@needs_native
def test_native_calls_draft_the_same() -> None:
    torch.testing.assert_close(
        *(drafts(DSparkDrafter(network_3(raw_3())), kind)[0] for kind in (Decoder, NativeDecoder))
    )


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("from_anchor", [False, True])
def test_speculators_format_there_and_back(ids: torch.Tensor | None, from_anchor: bool, tmp_path: Path) -> None:
    raw = raw_3(**({"sample_from_anchor": True} if from_anchor else {}))
    drafter = DSparkDrafter(network_3(raw), draft_ids=ids)
    drafter.save(tmp_path / "own")
    export(
        read_stored(tmp_path / "own"),
        "speculators",
        tmp_path / "theirs",
        head_rows=rows_of(tiny_target(1).matrix_embed(torch.arange(VOCAB))),
    )
    theirs = read_stored(tmp_path / "theirs")
    assert theirs.form == "speculators" and theirs.unread == () and is_dflash(theirs.config.raw)
    assert theirs.config.from_anchor is from_anchor
    assert theirs.config.markov == drafter.config.markov
    for name, tensor in read_stored(tmp_path / "own").tensors.items():
        other = theirs.tensors[name]
        if name.endswith("successor_codebook") and ids is not None:
            tensor, other = tensor[ids], other[ids]
        torch.testing.assert_close(other, tensor)


def test_slots_say_the_token_behind_them_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    """The default of DSpark in `speculators`, other than that of DFlash."""
    DSparkDrafter(network_3(raw_3(sample_from_anchor=True))).save(tmp_path / "own")
    export(read_stored(tmp_path / "own"), "speculators", tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    config = json.loads(file.read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 8
    del config["sample_from_anchor"]
    file.write_text(json.dumps(config))
    assert read_stored(tmp_path / "theirs").config.from_anchor
    assert read_drafter(tmp_path / "theirs").num_drafted == 8


def test_deepspecs_files_are_read(tmp_path: Path) -> None:
    """Names of the codebooks as in `speculators`, keys at the top level, and other defaults."""
    drafter = DSparkDrafter(network_3(raw_3(sample_from_anchor=True)))
    raw = drafter.config.raw | drafter.config.raw["dflash_config"]
    raw = {name: value for name, value in raw.items() if name not in ("dflash_config", "sample_from_anchor")}
    raw["architectures"] = ["Qwen3DSparkModel"]
    write_checkpoint(tmp_path, raw, with_their_names(drafter.network.of_file(), None))
    theirs = read_drafter(tmp_path)
    assert theirs.config.from_anchor
    assert drafted(tiny_target(), theirs) == drafted(tiny_target(), drafter)
    del raw["enable_confidence_head"]
    without = DFlashConfig.from_json(raw)
    assert without.markov is not None
    assert not without.markov.has_confidence


@pytest.mark.parametrize("form", ["z-lab", "gguf"])
def test_other_formats_are_refused(form: str, tmp_path: Path) -> None:
    DSparkDrafter(network_3(raw_3())).save(tmp_path / "own")
    with pytest.raises(UnsupportedModelError, match="use the speculators format"):
        export(read_stored(tmp_path / "own"), form, tmp_path / ("out.gguf" if form == "gguf" else "out"))


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"markov_head_type": "gated"}, UnsupportedModelError, "markov_head_type .*gated.* is not implemented"),
        ({"markov_rank": 0}, ModelFileError, "markov_rank"),
        ({"enable_confidence_head": "yes"}, ModelFileError, "enable_confidence_head must be true or false"),
    ],
)
def test_what_is_not_understood_is_refused(keys: dict[str, Any], error: type[Exception], message: str) -> None:
    raw = raw_3()
    with pytest.raises(error, match=message):
        DFlashConfig.from_json({**raw, "dflash_config": raw["dflash_config"] | keys})


def test_keys_of_dspark_in_another_drafter_are_refused() -> None:
    with pytest.raises(ModelFileError, match="markov_rank is of DSpark"):
        DFlashConfig.from_json({**raw_3(), "architectures": ["DFlashDraftModel"]})


def test_without_a_confidence_head_the_scores_say_how_sure_a_draft_is(tmp_path: Path) -> None:
    raw = raw_3()
    raw["dflash_config"]["enable_confidence_head"] = False
    DSparkDrafter(network_3(raw)).save(tmp_path)
    stored = read_stored(tmp_path)
    assert not any(name.startswith("confidence") for name in stored.tensors)
    tokens, confidence = drafts(drafter_from(stored))  # pyright: ignore[reportArgumentType]
    with_head = drafts(DSparkDrafter(network_3(raw_3())))
    assert tokens == with_head[0]
    assert confidence != pytest.approx(with_head[1])


def test_a_new_drafter_drafts_as_its_body() -> None:
    network = DSparkNetwork.random(DFlashConfig.from_json(raw_3()))
    tokens, confidence = drafts(DSparkDrafter(network))
    assert confidence == pytest.approx([math.log(0.5)] * 7)
    body = {name: tensor for name, tensor in network.state_dict().items() if "_head." not in name}
    plain = DFlashDrafter(DFlashNetwork.of(DFlashConfig.from_json(raw_config()), body))
    assert tokens == drafted(tiny_target(), plain)
