"""Documents, held-out prompts, anchors and steps: nothing lost, nothing twice, the same on any number of processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_training import document, documents

from paceline.data.answers import Answer, AnswerShards
from paceline.errors import PromptError
from paceline.train.documents.dataset import (
    Corpus,
    Document,
    Place,
    StepPlanner,
    check_vocabulary,
    draw_anchors,
    epoch_order,
    heldout_prompts,
    labels_of,
    loop_start,
    num_valid_slots,
    prompt_of,
    read_corpus,
)
from paceline.train.learn.packs import PackBudget, heldout_anchors, split_into_packs


def answers(folder: Path, *rows: Answer) -> Path:
    AnswerShards(folder).write(list(rows))
    return folder


def answer(key: str, answer_ids: list[int], turn: int = 0, prompt_ids: tuple[int, ...] = (1, 2, 3)) -> Answer:
    return Answer(key, "here", turn, 0.0, list(prompt_ids), answer_ids, "stop", "")


def planner(**changes: int) -> StepPlanner:
    values = {"blocks_per_step": 10, "anchors": 4, "block_size": 4, "seed": 3} | changes
    return StepPlanner(documents(), **values)


class TestLoops:
    def test_text_without_a_loop_stays(self) -> None:
        assert loop_start(list(range(50))) == 50
        assert loop_start([]) == 0 and loop_start([1]) == 1
        assert loop_start([1, 2, 3] * 3 + [7]) == 10, "a loop that ended is no loop"
        assert loop_start([5, 6, 7, 7, 7, 7]) == 6, "a short repetition is no loop"

    @pytest.mark.parametrize("period", [1, 2, 3, 7, 30, 64])
    @pytest.mark.parametrize("before", [0, 1, 40])
    def test_two_repetitions_of_a_tail_are_kept(self, period: int, before: int) -> None:
        head, loop = list(range(1000, 1000 + before)), list(range(period))
        for tail in (12 * loop, 12 * loop + loop[: period // 2]):
            assert loop_start(head + tail) == before + max(12, 2 * period)

    def test_longer_periods_are_not_looked_for(self) -> None:
        assert loop_start(list(range(65)) * 5) == 65 * 5


class TestCorpus:
    def test_loops_are_cut_and_short_answers_left_out(self, tmp_path: Path) -> None:
        folder = answers(tmp_path, answer("a@0", [9, 8] + [7] * 40), answer("b@0", [5]), answer("c@0", [5, 6, 4]))
        corpus = read_corpus([folder], max_len=100)
        assert (corpus.num_loops_cut, corpus.num_too_short) == (1, 1)
        assert sorted(len(each) for each in corpus.train) == [6, 3 + 2 + 12] and corpus.heldout == []
        assert [each.answer_start for each in corpus.train] == [3, 3]
        assert corpus.token_counts(10).tolist() == [0, 0, 0, 0, 1, 1, 1, 12, 1, 1]

    def test_long_documents_are_cut_and_answers_read_twice_count_once(self, tmp_path: Path) -> None:
        folder = answers(tmp_path, answer("a@0", list(range(30))), answer("a@0", list(range(40)), turn=1))
        corpus = read_corpus([folder, folder], max_len=8)
        assert [(each.key, len(each), each.num_anchors) for each in corpus.train] == [("a@0/0", 8, 4), ("a@0/1", 8, 4)]
        with pytest.raises(PromptError, match="no answers to learn from"):
            read_corpus([folder], max_len=4)
        with pytest.raises(PromptError, match="there are no answers at .*nowhere: make them with paceline regenerate"):
            read_corpus([tmp_path / "nowhere"], max_len=8)

    def test_all_temperatures_and_turns_of_a_prompt_are_held_out_together(self, tmp_path: Path) -> None:
        rows = [answer(f"p{n}@{heat}", [4, 5, 6], turn) for n in range(40) for heat in ("0", "0.7") for turn in (0, 1)]
        corpus = read_corpus([answers(tmp_path, *rows)], max_len=20, heldout_share=0.1)
        out = {prompt_of(each.key) for each in corpus.heldout}
        assert len(out) == 4 and len(corpus.heldout) == 16
        assert not out & {prompt_of(each.key) for each in corpus.train}

    def test_a_text_is_held_out_wherever_it_stands(self, tmp_path: Path) -> None:
        rows = [answer(f"{file}/{n}#{n % 20:08x}@0", [4, 5, 6]) for file in ("a", "b") for n in range(40)]
        corpus = read_corpus([answers(tmp_path, *rows)], max_len=20, heldout_share=0.1)
        assert len(corpus.heldout) == 8 and corpus.num_prompts == 18
        assert not {each.prompt for each in corpus.heldout} & {each.prompt for each in corpus.train}

    def test_what_is_held_out_stays_so_when_answers_are_added(self) -> None:
        few, many = ([f"p{n}@0" for n in range(number)] for number in (200, 220))
        chosen = heldout_prompts(few, 0.1, 256)
        assert len(chosen) == 20 and chosen == heldout_prompts(reversed(few), 0.1, 256)
        assert chosen == heldout_prompts([key.replace("@0", "@0.7") for key in few], 0.1, 256), (
            "temperature does not matter"
        )
        assert len(chosen & heldout_prompts(many, 0.1, 256)) >= 17
        assert len(heldout_prompts(few, 0.1, 7)) == 7
        assert len(heldout_prompts(few, 0.01, 256, 16)) == 16 and len(heldout_prompts(few[:20], 0.01, 256, 16)) == 10
        assert heldout_prompts(few, 0.0, 256, 16) == set()
        assert heldout_prompts(few[:9], 0.5, 256) == set() and len(heldout_prompts(few[:10], 0.01, 256)) == 1

    def test_tokens_that_the_target_lacks_are_refused(self) -> None:
        check_vocabulary(Corpus([document(0)], [document(1)]), 24)
        foreign = Document("other@0/0", np.array([1, 2, 99], dtype=np.int32), 1)
        for corpus in (Corpus([document(0), foreign], []), Corpus([document(0)], [foreign])):
            with pytest.raises(
                PromptError, match="answer other@0/0 holds token 99, the target has 24.*regenerate them with this"
            ):
                check_vocabulary(corpus, 24)


class TestAnchors:
    def test_they_are_distinct_ascending_within_the_answer_and_have_a_next_token(self) -> None:
        for number in range(20):
            one = document(number, prompt=5, answer=30)
            anchors = draw_anchors(one, 12, seed=0, epoch=0)
            assert len(set(anchors)) == 12 and sorted(anchors) == anchors.tolist()
            assert anchors.min() >= 5 and anchors.max() <= len(one) - 2
        assert draw_anchors(document(0, 5, 6), 12, 0, 0).tolist() == [5, 6, 7, 8, 9]

    def test_every_place_is_reached_sooner_or_later(self) -> None:
        one = document(0, prompt=5, answer=30)
        reached = {int(place) for epoch in range(60) for place in draw_anchors(one, 6, 0, epoch)}
        assert reached == set(range(5, 34))

    def test_they_are_redrawn_every_epoch_and_for_every_document_and_seed(self) -> None:
        one, other = document(1, 5, 60), document(1, 5, 60, key="other")
        draws = [
            draw_anchors(*each).tolist() for each in ((one, 8, 0, 0), (one, 8, 0, 1), (one, 8, 1, 0), (other, 8, 0, 0))
        ]
        assert len({tuple(draw) for draw in draws}) == 4
        assert draw_anchors(one, 8, 0, 0).tolist() == draws[0]

    def test_a_seed_draws_the_blocks_that_it_always_drew(self) -> None:
        """A run of an earlier version goes on with its own blocks."""
        assert draw_anchors(document(1, 5, 40), 8, 0, 0).tolist() == [5, 9, 11, 12, 13, 33, 38, 43]
        one = StepPlanner(documents(), blocks_per_step=10, anchors=4, block_size=4, seed=3)
        chosen, num_slots, place = one.step(Place(1, 3))
        assert [(number, anchors_A.tolist()) for number, anchors_A in chosen] == [
            (8, [4, 8, 10, 11]), (5, [4, 6, 7, 12]), (0, [3, 5]),
        ]  # fmt: skip
        assert (num_slots, place, one.steps_per_epoch) == (29, Place(1, 6), 3.4)

    def test_labels_stand_at_their_own_places_and_end_with_the_document(self) -> None:
        one = document(3, prompt=2, answer=6)
        labels, valid = labels_of(one, np.array([2, 5, 6]), 4)
        assert valid.tolist() == [[True] * 3, [True, True, False], [True, False, False]]
        assert labels[0].tolist() == one.tokens[3:6].tolist() and labels[1][:2].tolist() == one.tokens[6:8].tolist()
        assert num_valid_slots(one, np.array([2, 5, 6]), 4) == valid.sum() == 6

    def test_heldout_anchors_are_always_the_same(self) -> None:
        chosen = heldout_anchors(documents(), 8)
        assert [number for number, _ in chosen] == list(range(10))
        for (_, anchors), one in zip(chosen, documents(), strict=True):
            assert anchors[0] == one.answer_start and anchors[-1] == len(one) - 2 and len(anchors) <= 8
            assert (np.diff(anchors) > 0).all()


class TestSteps:
    @pytest.mark.parametrize("size", [1, 3, 7, 10, 1000])
    def test_an_epoch_is_every_document_once_with_its_anchors(self, size: int) -> None:
        plan, place, seen = planner(blocks_per_step=size), Place(), []
        num_steps = 0
        while place.epoch == 0 and num_steps < 100:
            begun = place
            chosen, num_slots, place = plan.step(place)
            blocks = sum(len(anchors) for _, anchors in chosen)
            assert blocks == size
            assert num_slots == sum(num_valid_slots(plan.documents[number], anchors, 4) for number, anchors in chosen)
            left = len(plan.documents) - begun.index
            seen += [number for number, _ in chosen[:left]]
            num_steps += 1
        assert seen == epoch_order(10, 3, 0).tolist() and sorted(seen) == list(range(10))
        if size < 40:
            assert num_steps - 1 <= plan.steps_per_epoch <= num_steps
        else:
            assert plan.steps_per_epoch == 1.0

    def test_order_and_anchors_change_with_the_epoch(self) -> None:
        plan = planner(blocks_per_step=4)
        first, again, second = plan.step(Place()), plan.step(Place()), plan.step(Place(1))
        assert [number for number, _ in first[0]] == [number for number, _ in again[0]]
        assert all((one[1] == two[1]).all() for one, two in zip(first[0], again[0], strict=True))
        assert epoch_order(10, 3, 0).tolist() != epoch_order(10, 3, 1).tolist() and second[2].epoch == 1

    @pytest.mark.parametrize("world", [2, 3])
    def test_processes_share_what_one_would_do(self, world: int) -> None:
        chosen, _, _ = planner().step(Place())
        shares = [chosen[rank::world] for rank in range(world)]
        assert sorted(number for share in shares for number, _ in share) == sorted(number for number, _ in chosen)

    def test_packs_hold_whole_documents_up_to_their_size(self) -> None:
        chosen, _, _ = planner(blocks_per_step=38).step(Place())
        packs = list(split_into_packs(chosen, PackBudget(9)))
        assert [each for pack in packs for each in pack] == chosen
        assert all(sum(len(anchors) for _, anchors in pack) <= 9 for pack in packs) and len(packs) == 5
        assert [len(pack) for pack in split_into_packs(chosen, PackBudget(1))] == [1] * len(chosen)
