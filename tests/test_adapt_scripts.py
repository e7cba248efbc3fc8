"""What the scripts of experiments/ that measure `paceline adapt` conclude from what they saw."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.adapt.log import AdaptLog

SCRIPTS = Path(__file__).parents[1] / "experiments"


@pytest.fixture(autouse=True)
def scripts() -> Iterator[None]:
    """Scripts there share parts."""
    before = [*sys.path]
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path[:] = before


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


class TestApplications:
    @pytest.mark.parametrize("name", ["tickets", "extraction", "tools"])
    def test_users_that_measure_are_others(self, name: str) -> None:
        one = script("applications").APPLICATIONS[name]()
        told, measured = ({row["messages"][-1]["content"] for row in one.rows(80, heldout)} for heldout in (False, True))
        assert len(told) == len(measured) == 80 and not told & measured
        assert json.loads(one.schema) and one.rows(5, False) == one.rows(5, False)
        assert one.opening[0]["role"] == "system" and one.openers

    def test_a_guess_that_is_a_real_request_is_refused(self) -> None:
        module = script("applications")
        one = module.Application("x", [], "{}", lambda number, heldout: ["Where is it?"] * number, ("Where",))
        with pytest.raises(ValueError, match="it is no guess"):
            one.rows(1, False)


class TestShare:
    def test_of_the_gain(self) -> None:
        share_of = script("synthetic_share").share_of
        assert share_of([(20, 10, 60, 10, 50, 10)]) == pytest.approx(0.75)
        assert share_of([(20, 10, 20, 10, 50, 10)]) == 0.0
        assert share_of([(10, 10, 30, 10, 30, 10), (30, 10, 90, 10, 30, 10)]) == pytest.approx(0.25)

    @pytest.mark.parametrize(
        ("made", "parse", "parsed", "passed"),
        [(50, 5, 1.0, True), (40, 5, 1.0, False), (50, 4, 1.0, False), (50, 5, 0.9, False)],
    )
    def test_verdict(self, made: int, parse: int, parsed: float, passed: bool) -> None:
        module = script("synthetic_share")
        stages = module.Stages.__new__(module.Stages)
        stages.options = Namespace(least_share=0.7)
        each = {"start": 20, "real": 60, "synthetic": made}
        drafters = {name: {"requests": [[tokens, 10]] * 5, "parse": parse, "as_plain": 5} for name, tokens in each.items()}
        assert stages.verdict({"heldout": 5, "drafters": drafters}, {"parsed": parsed})["passed"] is passed


class TestCounterfactual:
    def rows(self, *rounds: list[list[int]], kind: str = "greedy") -> dict[str, dict[str, Any]]:
        return {
            str(place): {"prompt": str(place), "kind": kind, "answer": [1, 2], "rounds": each}
            for place, each in enumerate(rounds)
        }

    def test_one_round_that_differs_is_told(self) -> None:
        exact = script("counterfactual").exact
        told = self.rows([[7, 2], [7, 0]], [[7, 1]])
        assert exact(told, told)["passed"] and exact(told, told)["served"] == 2.0
        found = exact(told, self.rows([[7, 2], [7, 0]], [[7, 2]]))
        assert not found["passed"] and found["rounds_differ"] == ["1"] and not found["texts_differ"]
        assert not exact({}, told)["passed"] and not exact(told, {})["passed"]

    def test_sampled_requests_are_held_against_an_interval(self) -> None:
        within = script("counterfactual").within
        told = self.rows(*([[7, place % 4]] * 8 for place in range(40)))
        same = self.rows(*([[7, (place + 1) % 4]] * 8 for place in range(40)))
        better = self.rows(*([[7, place % 4 + 1]] * 8 for place in range(40)))
        assert within(told, same)["passed"] and within(told, same)["difference"] == pytest.approx(0)
        assert not within(told, better)["passed"] and within(told, better)["difference"] == pytest.approx(1)


class TestLive:
    NAMES = ("training", "swapped", "kept", "told", "rolled back")

    def checks(self, folder: Path, events: tuple[str, ...] = NAMES, **changes: Any) -> dict[str, bool]:
        """The verdicts on a run in which all went well, but for `changes`."""
        live, traffic = script("adapt_live"), script("live_traffic")
        run = live.Run(Namespace(out=folder, hour_s=8.0, limit_minutes=40.0))
        for event in events:
            AdaptLog(folder / "adapt").event(1, event, why="")
        begin = run.began
        marks = ("questions begin", "tickets begin", "swapped", "forced", "taken back")
        run.times = {name: begin + 100 * place for place, name in enumerate(marks)}
        clients = traffic.Traffic(1, {}, 9, 1, 1.0, {})
        rates = {begin + 150: 170, begin + 250: changes.pop("after", 400), begin + 350: 100}
        clients.done = [traffic.Done(at, "tickets", tokens, 100, True) for at, tokens in rates.items() for _ in range(20)]
        clients.failed, clients.wrong = changes.pop("failed", []), changes.pop("wrong", [])
        run.found = {"traffic": clients, "gate_of_the_poisoned": {"passed": False, "status": 3}}
        run.found["after_force"] = {"ended": "rolled back", "serves": "ours", "ours": "ours"}
        return live.verdicts(run, changes.pop("missed", None))

    def test_all_went_well(self, tmp_path: Path) -> None:
        checks = self.checks(tmp_path)
        assert all(checks.values()) and len(checks) == 9

    @pytest.mark.parametrize(
        ("changes", "name"),
        [
            ({"after": 300}, "tokens a round on tickets that nobody saw at least doubled"),
            ({"failed": ["tickets: status 500"]}, "no failed request"),
            ({"wrong": ["tickets: a in place of b"]}, "every text is plain decoding's"),
            ({"missed": "nothing came"}, "in time"),
            ({"events": ("training", *NAMES)}, "one training"),
            ({"events": ("training", "swapped")}, "swapped by the gate, and kept"),
        ],
    )
    def test_what_did_not(self, tmp_path: Path, changes: dict[str, Any], name: str) -> None:
        checks = self.checks(tmp_path, **changes)
        assert [each for each, is_so in checks.items() if not is_so] == [name]

    def test_from_the_swap_on_other_prompts_are_asked(self) -> None:
        clients = script("live_traffic").Traffic(1, {"tickets": ["seen"], "unseen tickets": ["unseen"]}, 9, 1, 1.0, {})
        assert [next(clients._turns["tickets"]) for _ in range(2)] == ["seen"] * 2
        clients.ask_instead("tickets", clients.prompts["unseen tickets"])
        assert [next(clients._turns["tickets"]) for _ in range(2)] == ["unseen"] * 2

    def test_an_hour_begins_the_run_at_six(self, tmp_path: Path) -> None:
        live = script("adapt_live")
        run = live.Run(Namespace(out=tmp_path, hour_s=8.0, limit_minutes=40.0))
        assert run.began / run.hour_s % 24 == pytest.approx(live.BEGINS_AT, abs=0.1) and run.hour_s == pytest.approx(8.0)
