"""The planner: the most tokens per second by what is known, never below plain decoding, nothing decided by the drawn
token."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Set as AbstractSet

import pytest
from simulated_rounds import FLAT, STEEP, Machine, counts, row, stats

from paceline.errors import ConfigError
from paceline.plan.chances import Chances
from paceline.plan.chunks import LEAST_CHUNK, ChunkSizes
from paceline.plan.costs import PassCosts, RoundCosts
from paceline.plan.history import PLAIN_EVERY
from paceline.plan.planner import AdaptivePlanner, FixedPlanner, Offer, Row
from paceline.plan.speculate import Speculation
from paceline.types import Take


class TestFixed:
    @pytest.mark.parametrize(("text", "number"), [("full", None), ("off", 0), ("0", 0), ("5", 5)])
    def test_names(self, text: str, number: int | None) -> None:
        speculation = Speculation.of(text)
        assert speculation.planner().num_drafted == speculation.num_drafted == number
        assert speculation.is_off == speculation.adapts == (number == 0)

    @pytest.mark.parametrize(
        "text", ["", "-1", "٣", "5:", ":5", "fixed", "fixed:5", "auto:3", "tree:", "tree:0", "tree:129", "tree:tree:2"]
    )
    def test_other_names_are_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="auto, full, off, N"):
            Speculation.of(text)

    def test_the_same_in_every_round_whatever_rounds_took(self) -> None:
        for number, most, expected in ((None, 7, 7), (3, 7, 3), (9, 7, 7), (0, 7, 0), (None, 0, 0)):
            planner = FixedPlanner(number, 64)
            for seconds in (1e-3, 10.0):
                plan = planner.next([row(planner, most=most, lookup=0.9 if most else 0.0)], prompt_left=100)
                assert counts(plan) == [expected] and plan.chunk == 64 and plan.whole_blocks
                assert planner.narrow(plan, [[-9.0] * most]) == counts(plan)
                planner.learn(plan, stats(plan, [0], seconds))


class TestChoice:
    def test_free_drafts_are_all_taken_and_dear_ones_none(self) -> None:
        assert counts((planner := AdaptivePlanner(FLAT)).next([row(planner)])) == [7]
        assert counts((planner := AdaptivePlanner(STEEP)).next([row(planner, most=0, lookup=0.9)])) == [0]

    @pytest.mark.parametrize("slope", [0.02, 0.05, 0.1, 0.2, 0.35])
    def test_the_best_number_by_the_formula(self, slope: float) -> None:
        """A lookup whose drafts stand with a chance of 0.75: the count that brings the most over the plain rate."""
        costs = [1.0 + slope * count for count in range(17)]
        surplus = [sum(0.75**place for place in range(1, count + 1)) - (costs[count] - 1.0) for count in range(17)]
        best = max(range(17), key=surplus.__getitem__)
        planner = AdaptivePlanner(PassCosts(list(enumerate(costs, start=1))))
        assert counts(planner.next([row(planner, most=0, lookup=0.75)])) == [best]

    def test_a_lookup_wins_where_it_promises_more_for_its_time(self) -> None:
        planner = AdaptivePlanner(PassCosts(((1, 1.0), (32, 1.6))))
        machine = Machine(planner, PassCosts(((1, 1.0), (32, 1.6))), 0.4)
        machine.rounds(100, [0.7] * 7)
        assert planner.next([row(planner, lookup=0.95)]).drafts[0].source == "ngram"
        assert planner.next([row(planner, lookup=0.1)]).drafts[0].source == "dflash"

    def test_several_rows_share_a_pass_by_what_each_promises(self) -> None:
        """Few positions are cheap: they go to the row whose drafts stand."""
        planner = AdaptivePlanner(PassCosts(((1, 1.0), (8, 1.2), (9, 2.2), (16, 2.4))))
        rows = [row(planner, most=0, lookup=0.3), row(planner, most=0, lookup=0.8)]
        few, many = counts(planner.next(rows))
        assert few + many == 6 and many > few

    def test_a_prompt_that_ends_in_this_step_counts_and_others_do_not(self) -> None:
        planner = AdaptivePlanner(PassCosts(((1, 1.0), (2, 1.05), (3, 9.0))), most_chunk=64)
        for prompt_left, num_rows, expected in ((0, 1, 1), (65, 1, 1), (64, 2, 0)):
            plan = planner.next([row(planner, most=0, lookup=0.9)], prompt_left)
            assert (plan.num_rows, counts(plan)) == (num_rows, [expected])
            assert FixedPlanner(most_chunk=64).next([row(planner)], prompt_left).num_rows == num_rows

    def test_beside_a_chunk_drafts_do_not_lengthen_the_round(self) -> None:
        planner = AdaptivePlanner(PassCosts(((1, 1.0), (16, 2.0))))
        machine = Machine(planner, PassCosts(((1, 1.0), (16, 2.0))), 0.1)
        machine.rounds(40, [0.0] * 7)
        assert counts(planner.next([row(planner, most=0, lookup=0.98)]))[0] > 5
        assert counts(planner.next([row(planner, most=0, lookup=0.98)], prompt_left=500))[0] <= 2


BAD, WEAK = [0.02] * 7, [0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1]
GOOD = [0.8, 0.75, 0.7, 0.7, 0.6, 0.6, 0.6]


class TestNeverBelowPlain:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("table", "num_rows", "chances"),
        [
            *((table, num_rows, BAD) for table, num_rows in (("right", 1), ("flat", 4), ("steep", 8))),
            *((table, num_rows, WEAK) for table, num_rows in (("right", 4), ("flat", 8), ("steep", 1))),
            *((table, num_rows, GOOD) for table, num_rows in (("right", 8), ("flat", 1), ("steep", 4))),
        ],
    )
    def test_whatever_the_drafter_and_the_start_up_table(self, chances: list[float], table: str, num_rows: int) -> None:
        """A bad drafter, or a table measured while another program ran: from the first round on at least 0.97 of
        plain."""
        true = PassCosts(((1, 3.0), (2, 3.2), (4, 3.9), (8, 6.0), (16, 11.0), (32, 22.0), (64, 44.0)))
        costs = {
            "right": true,
            "flat": PassCosts(((1, 100.0), (64, 115.0))),
            "steep": PassCosts(((1, 1.0), (64, 64.0))),
        }[table]
        machine = Machine(AdaptivePlanner(costs), true, 1.4, num_rows=num_rows)
        first = machine.rounds(300, chances)
        later = machine.rounds(2000, chances)
        plain = num_rows / (true.seconds(num_rows) * 1.015)
        assert first > 0.93 * plain and later > 0.97 * plain
        if chances[0] > 0.5 and num_rows == 1:
            assert later > 1.2 * plain

    @pytest.mark.parametrize("num_rows", [1, 4])
    def test_lookups_too_are_weighed_against_rounds_without_drafts(self, num_rows: int) -> None:
        """The plain pass was measured while another program ran, so that lookups seem free; they are not."""
        true = PassCosts(((1, 23.0), (2, 27.0), (4, 36.0), (6, 44.0), (8, 52.0), (32, 140.0)))
        costs = PassCosts(((1, 44.0), (4, 44.0), (6, 44.0), (8, 52.0), (32, 140.0)))
        machine = Machine(AdaptivePlanner(costs), true, 0.0, num_rows=num_rows)
        machine.rounds(100, [], lookup=0.1)
        assert machine.rounds(500, [], lookup=0.1) > 0.97 * num_rows / (true.seconds(num_rows) * 1.015)

    @pytest.mark.slow
    @pytest.mark.parametrize(("num_rows", "draft_s"), [(1, 0.2), (1, 0.8), (4, 0.2), (4, 0.4)])
    def test_a_good_drafter_that_turns_bad_is_soon_left(self, num_rows: int, draft_s: float) -> None:
        """Another text: what hundreds of rounds taught is doubted after a few; trials are not saved up for that
        moment."""
        true = PassCosts(((1, 1.0), (8, 1.6), (16, 2.6), (64, 9.0)))
        machine = Machine(AdaptivePlanner(true), true, draft_s, num_rows=num_rows)
        machine.rounds(600, [0.9] * 7)
        machine.rounds(30, [0.02] * 7)
        before = machine.num_drafting
        machine.rounds(100, [0.02] * 7)
        assert machine.num_drafting - before <= 10

    @pytest.mark.slow
    def test_where_no_drafter_could_pay_trials_are_rare(self) -> None:
        true = PassCosts(((1, 1.0), (8, 1.6), (16, 3.2), (64, 12.8)))
        few, many = (Machine(AdaptivePlanner(true), true, 0.4, num_rows=rows) for rows in (1, 8))
        assert few.rounds(2000, [0.02] * 7) > 0.99 / 1.015 and few.num_drafting > 10
        assert many.rounds(2000, [0.02] * 7) > 0.995 * 8 / (1.6 * 1.015) and 0 < many.num_drafting < 10

    @pytest.mark.slow
    def test_drafting_stops_within_a_few_rounds_and_comes_back(self) -> None:
        true = PassCosts(((1, 1.0), (8, 1.6), (16, 2.6)))
        machine = Machine(AdaptivePlanner(true), true, 0.4)
        good, bad = [0.85] * 7, [0.03] * 7
        assert machine.rounds(300, good) > 1.5
        machine.rounds(60, bad)
        before = machine.num_drafting
        assert machine.rounds(1000, bad) > 0.97 * 0.985
        assert machine.num_drafting - before < 60
        machine.rounds(700, good)
        assert machine.rounds(200, good) > 1.5

    def test_a_busy_machine_is_no_reason_to_stop_or_to_begin(self) -> None:
        true = PassCosts(((1, 1.0), (8, 1.6), (16, 2.6)))
        quiet, busy = (Machine(AdaptivePlanner(true), true, 0.4) for _ in range(2))
        chances = [0.8, 0.7, 0.6, 0.5, 0.5, 0.5, 0.5]
        quiet.rounds(400, chances)
        for slow in (1.0, 3.0, 1.0, 7.0, 2.0, 1.0, 4.0, 1.0):
            busy.rounds(50, chances, slow=slow)
        assert busy.tokens == pytest.approx(quiet.tokens, rel=0.15)

    def test_a_round_without_drafts_now_and_then_tells_what_one_takes(self) -> None:
        planner, plain = AdaptivePlanner(FLAT), []
        for number in range(400):
            plan = planner.next([row(planner)])
            plain += [number] * (counts(plan) == [0])
            planner.learn(plan, stats(plan, counts(plan), 1.0))
        gaps = [later - sooner for sooner, later in itertools.pairwise(plain)]
        assert plain[0] <= 8 and max(gaps) <= PLAIN_EVERY + 1 and len(plain) < 14


class TestAsking:
    """Offers take time to make: a planner asks a row for those alone that it will look at."""

    @pytest.mark.parametrize(("num_rows", "most_share"), [(1, 0.35), (4, 0.2), (8, 0.2)])
    def test_computed_drafts_that_do_not_pay_are_seldom_asked_for(self, num_rows: int, most_share: float) -> None:
        requests: list[set[str]] = []
        planner = AdaptivePlanner(true := PassCosts(((1, 1.0), (8, 1.6), (16, 3.2), (64, 12.8))))

        def ask(unwanted: AbstractSet[str]) -> list[Offer]:
            requests.append({"dflash", "ngram"} - unwanted)
            return [] if "dflash" in unwanted else [planner.offer("dflash", "greedy", 7)]

        for _ in range(900):
            plan = planner.next([Row(key, "greedy", ask=ask) for key in range(num_rows)])
            drafting = any(counts(plan))
            planner.learn(plan, stats(plan, [0] * num_rows, true.seconds(num_rows + sum(counts(plan))), 0.4 * drafting))
        share = sum("dflash" in each for each in requests) / (900 * num_rows)
        assert 0.05 < share <= most_share and all("ngram" in each for each in requests)

    def test_what_disappointed_is_not_asked_for_while_it_pauses(self) -> None:
        planner = AdaptivePlanner(FLAT)
        planner._histories["greedy"].pauses._pauses["ngram"] = 3, 64
        requests = []
        for _ in range(4):
            plan = planner.next([Row(0, "greedy", ask=lambda unwanted: requests.append("ngram" not in unwanted) or [])])
            planner.learn(plan, stats(plan, [0], 1.0))
        assert requests == [False, False, True, True]

    def test_a_fixed_plan_without_drafts_asks_for_none(self) -> None:
        def ask(unwanted: AbstractSet[str]) -> list[Offer]:
            raise AssertionError("asked")

        assert counts(FixedPlanner(0).next([Row(0, "greedy", ask=ask)])) == [0]


class TestSureness:
    """A confident slot gets a higher chance once rounds have confirmed the drafter's confidence."""

    def taught(self) -> AdaptivePlanner:
        planner, draws = AdaptivePlanner(PassCosts(((1, 1.0), (8, 2.4)))), random.Random(1)
        for _ in range(600):
            plan = planner.next([row(planner)])
            if not counts(plan)[0]:
                plan.drafts[0] = Take("dflash", 7)
            sure = [math.log(draws.choice([0.1, 0.5, 0.95])) for _ in range(7)]
            kept = next((place for place, each in enumerate(sure) if draws.random() >= math.exp(each)), 7)
            done = stats(plan, [min(kept, counts(plan)[0])], 1.0 + 0.2 * counts(plan)[0], 0.2)
            done.confidence_B = [sure[: counts(plan)[0]]]
            planner.learn(plan, done)
        return planner

    def test_what_is_sure_is_checked_and_what_is_not_is_left_out(self) -> None:
        planner = self.taught()
        plan = planner.next([row(planner)])
        plan.drafts = [Take("dflash", 7)]
        high, low = math.log(0.95), math.log(0.1)
        assert planner.narrow(plan, [[high] * 7])[0] >= 5
        assert planner.narrow(plan, [[low] * 7]) == [0]
        assert planner.narrow(plan, [[high, high, low, high, high, high, high]]) == [2]

    def test_the_chances_become_what_they_are(self) -> None:
        estimate = self.taught()._chances["dflash", "greedy"]
        chances = estimate.of([math.log(0.1), math.log(0.5), math.log(0.95)])
        assert chances[0] < 0.3 and 0.3 < chances[1] < 0.7 and chances[2] > 0.8

    def test_where_nothing_is_known_a_place_has_its_average(self) -> None:
        chances = Chances(3, 0.5)
        assert chances.of([-1.0, -2.0, -0.1]) == chances.average == [0.5] * 3

    def test_places_that_were_left_out_count_as_what_was_promised(self) -> None:
        """Else only slots that looked good would be known, and all would seem good."""
        honest, blind = Chances(2, 0.5), Chances(2, 0.5)
        for _ in range(300):
            for each in (honest, blind):
                each.record(2, 2, [math.log(0.95)] * 2)
            honest.record(0, 0, [math.log(0.1)] * 2)
            blind.record(0, 0)
            for each in (honest, blind):
                each.record(1, 0, [math.log(0.1)])
        assert honest.average[1] < blind.average[1]

    def test_rows_of_which_nothing_is_known_keep_what_was_planned(self) -> None:
        planner = AdaptivePlanner(FLAT)
        plan = planner.next([row(planner), row(planner, most=0, lookup=0.9)])
        assert planner.narrow(plan, [None, None]) == counts(plan)


class TestCosts:
    def test_straight_lines_between_points_and_beyond(self) -> None:
        costs = PassCosts(((1, 2.0), (2, 3.0), (4, 6.0)))
        assert [costs.seconds(count) for count in (1, 2, 3, 4, 6)] == [2.0, 3.0, 4.5, 6.0, 9.0]

    def test_a_smaller_pass_never_takes_more(self) -> None:
        assert PassCosts(((1, 5.0), (2, 3.0), (4, 9.0))).seconds(1) == 3.0

    def test_a_pass_never_takes_more_than_several_smaller_ones(self) -> None:
        """Measured while another program ran: two positions a hundred times as long as one."""
        costs = PassCosts(((1, 0.02), (2, 2.0)))
        assert [costs.seconds(count) for count in (1, 2, 8)] == pytest.approx([0.02, 0.04, 0.16])
        assert PassCosts(((1, 1.0), (8, 2.0), (12, 9.0))).seconds(12) == 4.0

    def test_one_point_is_enough(self) -> None:
        assert PassCosts(((1, 2.0),)).seconds(3) == pytest.approx(6.0)

    def test_time_of_drafting_is_learned_but_for_the_first_time(self) -> None:
        costs = RoundCosts(FLAT)
        costs.record(1, 1.0)
        costs.drafted("dflash", 1, 50.0)
        assert costs.drafting_s("dflash", 1) == 0.0
        for seconds in (0.5, 9.0, 0.6):
            costs.drafted("dflash", 1, seconds)
        assert costs.drafting_s("dflash", 1) == pytest.approx(0.5)
        assert 0.5 < costs.drafting_s("dflash", 4) < 4 * 0.5 and costs.drafting_s("other", 1) == 0.0

    def test_a_draft_during_which_another_program_ran_is_no_first_estimate(self) -> None:
        costs = RoundCosts(FLAT)
        costs.record(1, 1.0)
        for seconds in (50.0, 9.0, 0.5, 0.5):
            costs.drafted("dflash", 1, seconds)
        assert costs.drafting_s("dflash", 1) == pytest.approx(0.5)
        costs.drafted("dflash", 1, 0.1)
        assert costs.drafting_s("dflash", 1) == pytest.approx(0.3), "the first measurements count alike"
        usual = costs.drafting_s("dflash", 2)
        costs.drafted("dflash", 2, 9.0)  # the first time with two rows
        assert costs.drafting_s("dflash", 2) == pytest.approx(2 * usual)

    def test_a_wrong_table_is_corrected_by_neighbouring_rounds(self) -> None:
        costs = RoundCosts(FLAT)
        for number in range(400):
            size = 1 if number % 2 else 8
            costs.record(size, 1.0 + 0.2 * (size - 1))
        assert costs.pass_s(8) / costs.pass_s(1) == pytest.approx(2.4, rel=0.05)


class TestChunks:
    def test_a_chunk_takes_about_a_round_beside_others(self) -> None:
        sizes = ChunkSizes(256, adapts=True)
        assert sizes.size(0) == sizes.size(4) == 256
        for _ in range(50):
            sizes.prefilled(32, 0.032)
            sizes.decoded(0.05, beside_chunk=False)
        assert sizes.size(0) == 256 and 45 <= sizes.size(4) <= 55
        for _ in range(50):
            sizes.decoded(0.001, beside_chunk=False)
        assert sizes.size(4) == LEAST_CHUNK

    def test_whole_where_nobody_follows_token_by_token(self) -> None:
        sizes = ChunkSizes(256, adapts=True)
        sizes.prefilled(32, 0.032)
        sizes.decoded(0.001, beside_chunk=False)
        with sizes.whole():
            assert sizes.size(4) == 256 and sizes.most_round_s == math.inf
        assert sizes.size(4) == LEAST_CHUNK and sizes.most_round_s == 0.001

    def test_never_smaller_where_bits_depend_on_it(self) -> None:
        sizes = ChunkSizes(256, adapts=False)
        sizes.prefilled(32, 1.0)
        sizes.decoded(0.001, beside_chunk=False)
        assert sizes.size(4) == 256 and sizes.most_round_s == math.inf

    def test_one_disturbance_moves_it_by_little(self) -> None:
        sizes = ChunkSizes(256, adapts=True)
        for _ in range(50):
            sizes.prefilled(32, 0.032)
            sizes.decoded(0.05, beside_chunk=False)
        before = sizes.size(4)
        sizes.decoded(30.0, beside_chunk=False)
        assert sizes.size(4) <= 1.06 * before
