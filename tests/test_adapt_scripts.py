"""experiments/adapt_live.py: its verdicts on a run, and the prompts that its clients ask."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import adapt_live
import adapt_story
import pytest

from paceline.loop.adapt.log import AdaptLog, event_line


class TestLive:
    NAMES = ("training", "swapped", "kept", "reported", "rolled back")

    def checks(self, folder: Path, events: tuple[str, ...] = NAMES, **changes: Any) -> dict[str, bool]:
        """The verdicts on a run in which all went well, but for `changes`."""
        run = adapt_live.Run(Namespace(out=folder, hour_s=8.0, limit_minutes=40.0))
        for event in events:
            AdaptLog(folder / "adapt").append(event_line(1, event, why=""))
        begin = run.began
        marks = ("questions begin", "tickets begin", "swapped", "forced", "taken back")
        run.times = {name: begin + 100 * place for place, name in enumerate(marks)}
        clients = adapt_live.Traffic(1, {}, 9, 1, 1.0, {})
        rates = {begin + 150: 170, begin + 250: changes.pop("after", 400), begin + 350: 100}
        clients.done = [
            adapt_live.Done(at, "tickets", tokens, 100, True) for at, tokens in rates.items() for _ in range(20)
        ]
        clients.failed, clients.wrong = changes.pop("failed", []), changes.pop("wrong", [])
        run.results = {"traffic": clients, "gate_of_the_poisoned": {"passed": False, "status": 3}}
        run.results["after_force"] = {"ended": "rolled back", "serves": "ours", "ours": "ours"}
        return adapt_live.verdicts(run, changes.pop("missed", None))

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
        clients = adapt_live.Traffic(1, {"tickets": ["seen"], "unseen tickets": ["unseen"]}, 9, 1, 1.0, {})
        assert [next(clients._turns["tickets"]) for _ in range(2)] == ["seen"] * 2
        clients.ask_instead("tickets", clients.prompts["unseen tickets"])
        assert [next(clients._turns["tickets"]) for _ in range(2)] == ["unseen"] * 2

    def test_an_hour_begins_the_run_at_six(self, tmp_path: Path) -> None:
        run = adapt_live.Run(Namespace(out=tmp_path, hour_s=8.0, limit_minutes=40.0))
        assert run.began / run.hour_s % 24 == pytest.approx(
            adapt_story.BEGINS_AT, abs=0.1
        ) and run.hour_s == pytest.approx(8.0)
