"""experiments/refinement.py: what ways to draft keep, what their rounds take, and that a plain block is the drafter's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_dflash import KINDS, PROMPT, loud_, network, raw_config, tiny_target

from paceline.draft.checkpoint import DFlashConfig, as_dflash2
from paceline.draft.dflash import DFlashDrafter
from paceline.draft.dflash2 import DFlash2Network, drafter_of
from paceline.model.target import ForwardBatch

TEXT = [4, 1, 2, 3, 9, 9, 9, 5, 6]


@pytest.fixture
def script() -> Iterator[ModuleType]:
    before = [*sys.path]
    sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
    import refinement

    yield refinement
    sys.path[:] = before


class TestPure:
    def test_drafts_stand_as_far_as_they_agree(self, script: ModuleType) -> None:
        pairs: list[Any] = [([1, 2], [1, 2, 3]), ([1, 2], [1, 3]), ([4], [1]), ([1, 2], [1]), ([], [1])]
        assert [script.kept(*pair) for pair in pairs] == [2, 1, 0, 1, 0]

    def test_as_many_passes_as_slots_are_the_walk_and_each_pass_settles_a_slot(self, script: ModuleType) -> None:
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            best_KP = torch.randint(5, (6, 5), generator=generator)
            best_KP[0] = best_KP[0, 0]
            walk, before = [], 0
            for row in best_KP.tolist():
                walk.append(before := row[before])
            assert script.jacobi(best_KP, 6) == script.jacobi(best_KP, 9) == walk
            assert script.jacobi(best_KP, 0) == [0] * 6
            for passes in range(6):
                assert script.jacobi(best_KP, passes)[:passes] == walk[:passes]

    def test_each_way_has_rounds_of_its_own_and_some_at_the_first_ways_anchors(self, script: ModuleType) -> None:
        """Of nine tokens eight are drafted; a round never brings more than the answer has."""
        asked: list[tuple[str, int]] = []

        def stands(way: str, place: int) -> int:
            asked.append((way, place))
            return {"plain": 1, "better": 3, "perfect": 7}[way]

        found = script.walk_all(TEXT, ["plain", "better", "perfect"], stands)
        assert [(own.rounds, own.tokens) for own, _ in found.values()] == [(4, 8), (2, 8), (1, 8)]
        assert [(at.rounds, at.tokens) for _, at in found.values()] == [(4, 8), (4, 4 + 4 + 4 + 2), (4, 8 + 6 + 4 + 2)]
        places = [place for _, place in asked]
        assert places == sorted(places) and len(set(asked)) == len(asked)
        assert script.walk_all([4], ["plain"], stands)["plain"][0].rounds == 0

    def test_a_round_takes_its_passes(self, script: ModuleType) -> None:
        times = {"target": 10.0, "observe": 1.0, "draft": 2.0, "selector": 0.5, "jacobi": 0.1}
        way: Any = script.Way
        assert script.round_seconds(way("plain", None), times) == 13.0
        assert script.round_seconds(way("network 2", None, 2), times) == 17.0
        assert script.round_seconds(way("jacobi 4", None, 0, 4), times) == pytest.approx(13.9)
        tally = script.Tally()
        tally.add(script.Walk(8, 4, 8), script.Walk(8, 2, 5))
        tally.add(script.Walk(9, 6, 12), script.Walk(9, 2, 5))
        row = script.row_of(way("plain", None), tally, times)
        assert (row["tokens_per_round"], row["at_plain_anchors"], row["round_ms"]) == (2.0, 2.5, 13000.0)
        assert row["tokens_per_s"] == pytest.approx(2 / 13) and "1.00x" in script.table([row])


def bound(script: ModuleType, drafter: DFlashDrafter, kind: Any) -> Any:
    """The tiny target's features of a prompt, seen by the drafter, and the blocks behind it."""
    target = tiny_target(kind=kind)
    drafter.bind(target)
    target.set_taps(drafter.tap_layers)
    row = target.cache.allocate()
    taps_TF = target.forward(ForwardBatch([row], [0], [len(PROMPT)], PROMPT, "none")).taps_TF
    drafter._path.inject([row], [0], [len(PROMPT)], taps_TF)
    return script.Blocks(drafter, row)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", [{}, {"input_embedding_scale": 2.5, "output_multiplier": 0.7}])
def test_a_block_of_masks_is_the_drafters_own_to_the_bit(
    script: ModuleType, kind: Any, variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = DFlashDrafter(network(raw_config(**variant)), draft_ids=torch.tensor([0, 2, 3, 5, 6, 7, 9]))
    blocks = bound(script, drafter, kind)
    anchor, width = 5, drafter.num_drafted
    best_BK, logits_BKV, _ = drafter._path.draft([blocks.row], [anchor], width, 1 + width, True)
    assert logits_BKV is not None
    one = script.Block(blocks, anchor, [3, 5, 6])
    assert torch.equal(one.read, script.scale_logits(logits_BKV[0], drafter.config))
    assert one.plain == [[0, 2, 3, 5, 6, 7, 9][best] for best in best_BK[0]] == one.network(0) == one.left_to_right(0)
    assert one.oracle() == [3, *one.plain[1:]]
    assert one.oracle_of_16() == [3, 5, 6, *one.plain[3:]], "of seven tokens all are among sixteen"
    monkeypatch.setattr(script, "NEAR", 2)
    second = [0, 2, 3, 5, 6, 7, 9][int(logits_BKV[0, 1].topk(2).indices[1])]
    missed = script.Block(blocks, anchor, [4, second])
    assert missed.oracle_of_16() == [one.plain[0], second, *one.plain[2:]], "the drafter lacks 4"
    before = one.read.clone()
    seen = blocks.read(blocks.masked(anchor, [3]))
    assert not torch.allclose(seen[1:], before[1:], atol=1e-3), "slots behind it see the token"
    assert one.left_to_right(2)[:1] == one.plain[:1] and len(one.left_to_right(2)) == width
    again = script.Block(blocks, anchor, [3, 5, 6])
    assert torch.equal(again.read, before), "a block leaves nothing behind"


@pytest.mark.parametrize("kind", KINDS)
def test_the_selectors_walk_is_what_dflash_2_serves(script: ModuleType, kind: Any) -> None:
    raw = as_dflash2({**raw_config(), "vocab_size": 11}, rank=4)
    raw["dflash_config"]["conv_group_size"] = 16
    settings = DFlashConfig.from_json(raw)
    made = DFlash2Network.random(settings)
    loud_(made)
    drafter = drafter_of(made)
    blocks = bound(script, drafter, kind)
    width, differ = drafter.num_drafted, 0
    for anchor in range(11):
        one = script.Block(blocks, anchor, [3, 5, 6])
        served, _ = drafter._read([blocks.row], [anchor], width, 1 + width, False).certain(0, width, False)
        assert one.jacobi(width) == served
        assert one.jacobi(0) == one.plain and len(one.network(1)) == width
        differ += served != one.plain
    assert differ, "the selector says something"
    ways = [way.name for way in script.ways_of(drafter, [1, 4])]
    assert ways[4:7] == ["jacobi 1", "jacobi 4", "walk, as served"] and ways[0] == "plain"
    v1 = [way.name for way in script.ways_of(DFlashDrafter(network(raw_config())), [1, 4])]
    assert v1 == [
        "plain",
        "oracle",
        "oracle of 16",
        "oracle, seen",
        "network 1",
        "network 4",
        "left to right 1",
        "left to right 4",
    ]
