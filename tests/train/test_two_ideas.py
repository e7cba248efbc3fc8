"""experiments/two_ideas.py: four cells, of which none sees a token that it must predict; chains as they are drafted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import two_ideas as script
from known_machine import KNOWN
from small_studies import ANCHOR, LENGTH, VOCAB, loud, packed, taps_of, words_for
from tiny_eagle3 import Formulas
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, few = tmp_path_factory.mktemp("ideas"), {"steps": 4, "seeds": 2, "pilot_share": 0.5, "draft_vocab": 128}
    return [*words_for(folder, **few), "--rates", "1e-3", "2e-3"]


@pytest.fixture(scope="module")
def study(words: list[str]) -> script.Study:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "this_machine", lambda device: KNOWN)
        return script.Study(script.arguments(words))


def rotated(heads_THD: Tensor, positions: list[int]) -> Tensor:
    half = heads_THD.shape[-1] // 2
    angles = torch.tensor(positions)[:, None, None] * 10000.0 ** -(torch.arange(half) / half)
    first, second = heads_THD.split(half, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def next_by_injection(study: script.Study, network: Any, tokens: list[int], taps_NF: Tensor, drafts: list[int]) -> int:
    """The draft after these, from the whole chain again: no cache, one product over context and chain."""
    chain, places = [tokens[-1], *drafts], list(range(len(tokens) + len(drafts)))
    own_places = places[-len(chain) :]

    def attend(layer: int, query: Tensor, own: Any, context: Any) -> Tensor:
        key_SHD, value_SHD = torch.cat([context[0], own[0]]), torch.cat([context[1], own[1]])
        heads = (rotated(query, own_places), rotated(key_SHD, places), value_SHD)
        is_seen = torch.tensor(own_places)[:, None] >= torch.tensor(places)
        inputs = (each.transpose(0, 1)[None] for each in heads)
        attended = F.scaled_dot_product_attention(*inputs, attn_mask=is_seen, enable_gqa=True)
        return attended[0].transpose(0, 1).flatten(1)

    hidden_TD = network(study.embedding_VD[chain].float(), taps_NF, attend)
    return int(study.ids[study.head.in_float32().logits(hidden_TD[-1:]).argmax()])


def next_by_fusion(study: script.Study, network: Any, tokens: list[int], taps_NF: Tensor, drafts: list[int]) -> int:
    """The draft after these by the formulas of EAGLE-3."""
    formulas = Formulas(network, study.embedding_VD)
    formulas.weights["lm_head.weight"] = study.head.weight_VD.double()
    return int(study.ids[formulas.chain(tokens, taps_NF, [*drafts, 0])[-1].argmax()])


@torch.no_grad()
@pytest.mark.parametrize("name", script.NAMES[2:])
def test_chains_are_those_of_a_step_by_step_drafter(study: script.Study, name: str) -> None:
    """A text that continues with the reference's drafts has the longest acceptance length; a change ends it there."""
    drafter, taps_NF, draw = loud(study, name), taps_of(study), np.random.default_rng(2)
    tokens = draw.integers(0, VOCAB, ANCHOR + 1).tolist()
    next_draft, drafts = next_by_injection if name.endswith("injection") else next_by_fusion, list[int]()
    while len(drafts) < script.NUM_DRAFTS:
        drafts.append(next_draft(study, drafter.network, tokens, taps_NF[:ANCHOR], drafts))
    assert len(set(drafts)) > 2
    rest = draw.integers(0, VOCAB, LENGTH - len(tokens) - len(drafts)).tolist()
    measured = (study.embedding_VD.float(), study.head.in_float32(), False)
    for wrong in (None, 0, 4):
        text = tokens + [token + (place == wrong) for place, token in enumerate(drafts)] + rest
        pack = packed(study, text, [ANCHOR, ANCHOR + 6], taps_NF)
        lengths_A = script.acceptance_lengths(drafter, pack, *measured)
        assert int(lengths_A[0]) == 1 + (script.NUM_DRAFTS if wrong is None else wrong)


@torch.no_grad()
@pytest.mark.parametrize("name", script.NAMES)
def test_no_cell_sees_a_token_that_it_must_predict(study: script.Study, name: str) -> None:
    drafter, taps_NF = loud(study, name), taps_of(study)
    tokens = np.random.default_rng(3).integers(0, VOCAB, LENGTH).tolist()

    def hidden(tokens: list[int], taps_NF: Tensor) -> Tensor:
        """Returns the hidden states of the first block's draft positions. Later blocks bring context into the pack."""
        pack = packed(study, tokens, [ANCHOR, ANCHOR + 5, 30], taps_NF)
        return drafter.hidden(pack, study.embedding_VD.float(), False)[: script.NUM_DRAFTS]

    before, later_NF = hidden(tokens, taps_NF), taps_NF.clone()
    later_NF[ANCHOR:] += 1.0
    for place in range(script.NUM_DRAFTS):  # draft position `place` predicts the token at ANCHOR + 1 + place
        first = ANCHOR + 1 + place
        changed = hidden(tokens[:first] + [token + 1 for token in tokens[first:]], later_NF)
        is_seen = not name.startswith("block") and place + 1 < script.NUM_DRAFTS
        torch.testing.assert_close(changed[: place + 1], before[: place + 1], atol=1e-4, rtol=1e-4)
        assert torch.allclose(changed[place + 1 :], before[place + 1 :], atol=1e-3) != is_seen
    earlier_NF = taps_NF.clone()
    earlier_NF[ANCHOR - 1] += 1.0
    assert not torch.isclose(hidden(tokens, earlier_NF), before, atol=1e-3).all(dim=1).any(), "the context is read"


def test_the_table_has_four_cells(
    study: script.Study, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pilots, seeds and tables; the same command a second time trains nothing."""
    monkeypatch.setattr(script, "this_machine", lambda device: KNOWN)
    script.main(words)
    first = capsys.readouterr().out
    stored = json.loads((Path(words[words.index("--out") + 1]) / "results.json").read_text())
    assert len(stored["runs"]) == 4 * (2 + 2)
    cells = [stored["figures"][name] for name in script.NAMES]
    assert all(1.0 <= cell["value"] <= 8.0 and len(cell["seeds"]) == 2 for cell in cells)
    assert first.count("seeds") == 4 + len(script.RATIOS) and "token by token" in first
    monkeypatch.delattr(script.Study, "train")
    script.main(words)
    assert capsys.readouterr().out == first
