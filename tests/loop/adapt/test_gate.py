"""The gate: what it lets through, and what it refuses with which reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapt_requests import request

from paceline.errors import ConfigError
from paceline.loop.adapt.config import CandidateConfig
from paceline.loop.adapt.gate.gate import Pairs, RoundTimes, compare, judge, one_a_prompt
from paceline.loop.adapt.gate.lineage import Lineage, weights_hash, window_hash
from paceline.plan.costs import PassCosts
from paceline.report.statistics import Rounds
from paceline.types import Round

FLAT = RoundTimes(PassCosts([(1, 0.02), (8, 0.024)]))


def answers(chance: float, number: int = 60, seed: int = 0) -> list[Rounds]:
    """Requests of forty rounds of seven drafts that each stand with this chance; the same luck for the same seed."""
    draws = np.random.default_rng(seed).random((number, 40, 7))
    return [Rounds.counted(Round(7, int((row < chance).cumprod().sum())) for row in each) for each in draws]


def pairs(before: float, after: float, number: int = 60, seed: int = 0) -> Pairs:
    return Pairs(answers(before, number, seed), answers(after, number, seed))


class TestJudge:
    @pytest.mark.slow
    def test_a_better_one_passes(self) -> None:
        verdict = judge(pairs(0.4, 0.7), {"chat": pairs(0.6, 0.6)}, FLAT, pairs(0.5, 0.5))
        assert verdict.passed and verdict.gains["drifted"].low > 0
        assert json.dumps(verdict.as_json())

    def test_one_without_an_effect_is_refused(self) -> None:
        verdict = judge(Pairs(answers(0.5), answers(0.5, seed=1)), {}, FLAT)
        assert not verdict.passed and not verdict.loses and "may be none" in verdict.reason

    @pytest.mark.slow
    def test_a_loss_elsewhere_is_refused(self) -> None:
        verdict = judge(pairs(0.4, 0.7), {"chat": pairs(0.6, 0.5), "code": pairs(0.6, 0.6)}, FLAT)
        assert not verdict.passed and verdict.loses and "'chat'" in verdict.reason

    @pytest.mark.slow
    def test_a_loss_on_answers_of_another_kind_is_refused(self) -> None:
        verdict = judge(pairs(0.4, 0.7), {}, FLAT, pairs(0.6, 0.55))
        assert not verdict.passed and "'ood'" in verdict.reason

    @pytest.mark.slow
    def test_a_small_loss_is_let_through(self) -> None:
        assert judge(pairs(0.4, 0.7), {"chat": pairs(0.6, 0.597)}, FLAT).passed

    @pytest.mark.slow
    def test_chance_on_many_clusters_is_no_loss(self) -> None:
        """Eight clusters without a change; then one of them loses, and is named among the noise."""
        number = 40
        same = {f"c{n}": Pairs(answers(0.6, number, 2 * n + 1), answers(0.6, number, 2 * n + 2)) for n in range(8)}
        verdict = judge(pairs(0.4, 0.7), same, FLAT)
        assert verdict.passed and min(gain.gain for gain in verdict.gains.values()) < -CandidateConfig().most_loss
        worse = {**same, "chat": Pairs(answers(0.6, number, 17), answers(0.5, number, 18))}
        verdict = judge(pairs(0.4, 0.7), worse, FLAT)
        assert verdict.loses and "'chat'" in verdict.reason
        assert judge(pairs(0.4, 0.7), worse, FLAT, config=CandidateConfig(most_loss=0.5)).passed

    def test_a_few_requests_of_another_cluster_refuse_nothing(self) -> None:
        verdict = judge(pairs(0.4, 0.7), {"rare": pairs(0.6, 0.4, number=3)}, FLAT, pairs(0.6, 0.4, number=3))
        assert verdict.passed and "no answers of another kind" in verdict.reason

    def test_few_requests_prove_nothing(self) -> None:
        verdict = judge(pairs(0.1, 0.9, number=19), {}, FLAT, config=CandidateConfig(least_requests=20))
        assert not verdict.passed and "too few" in verdict.reason

    def test_requests_that_may_all_gain_by_chance_are_no_limit(self) -> None:
        """The interval over few requests that agree has no width: two gained by 1% and 2%."""
        with pytest.raises(ConfigError, match="least_requests must be at least 6"):
            CandidateConfig(least_requests=5)
        assert CandidateConfig(least_requests=6).least_requests == 6

    def test_tokens_a_round_alone_do_not_count(self) -> None:
        """A drafter that is twice as good and takes longer than it saves is refused."""
        slow = RoundTimes(FLAT.passes, incumbent_s=0.001, candidate_s=0.05)
        verdict = judge(pairs(0.4, 0.6), {}, slow)
        assert not verdict.passed and verdict.gains["drifted"].candidate > verdict.gains["drifted"].incumbent

    def test_a_planner_would_not_check_what_does_not_pay(self) -> None:
        """Passes that cost with every position: a drafter right in every second slot is not punished for its block of
        seven."""
        steep = RoundTimes(PassCosts([(1, 0.01), (8, 0.08)]))
        assert compare(pairs(0.0, 0.2), steep).gain == pytest.approx(0.0, abs=0.01)

    @pytest.mark.slow
    def test_the_interval_covers_the_truth(self) -> None:
        truth = compare(pairs(0.4, 0.5, number=1000, seed=99), FLAT).gain
        compared = [compare(pairs(0.4, 0.5, seed=seed), FLAT, num_draws=200) for seed in range(16)]
        assert sum(each.low <= truth <= each.high for each in compared) >= 14


class TestRequests:
    def test_one_prompt_counts_once_and_loops_do_not(self) -> None:
        same = [request(key=f"traces/a@0#{number}", hour=number, answer_ids=[1, 2, number]) for number in range(9)]
        loop = request(key="traces/b@0#1", answer_ids=[1, 2, 3] * 30)
        copied = [request(key=f"traces/c{number}@0#1", answer_ids=[7, 8, 9]) for number in range(9)]
        distinct = one_a_prompt([*same, loop, *copied])
        assert [each.answer_ids for each in distinct] == [[1, 2, 8], [7, 8, 9]]
        assert len(one_a_prompt([*same, *copied], most=1)) == 1


class TestLineage:
    def test_it_grows_and_is_marked(self, tmp_path: Path) -> None:
        folder = tmp_path / "one"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        lineage = Lineage(tmp_path / "lineage.json")
        window: dict[str, Any] = {"requests": 2, "sha256": window_hash(["b", "a"])}
        lineage.add(str(folder), parents=["default"], state="serving", window=window, gate={"passed": True})
        assert lineage.is_known_bad(folder) is None
        lineage.mark(str(folder), "rolled back", "slower by 20%")
        [entry] = lineage.entries()
        assert entry["state"] == "rolled back" and entry["weights"] == weights_hash(folder)
        assert entry["window"]["sha256"] == window_hash(["a", "b"])
        assert lineage.is_known_bad(folder) == "slower by 20%"

    def test_a_damaged_one_says_what_to_do(self, tmp_path: Path) -> None:
        (tmp_path / "lineage.json").write_text("[1, 2")
        with pytest.raises(ConfigError, match="mend it"):
            Lineage(tmp_path / "lineage.json").entries()
