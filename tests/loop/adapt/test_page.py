"""What is shown: the page, the log's file, the dashboard and the alerts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from paceline.loop.adapt.decide.policy import SeasonalPolicy
from paceline.loop.adapt.log import AdaptLog, event_line, hour_line, rebuilt
from paceline.loop.adapt.metrics import AdaptMetrics
from paceline.loop.adapt.page import page
from paceline.loop.adapt.traffic.replay import fortnight
from paceline.loop.adapt.traffic.world import make_world

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parent.parent.parent.parent / "docs"


def logged(folder: Path) -> AdaptLog:
    log = AdaptLog(folder)
    fortnight(make_world("new-schema", 0, 14), SeasonalPolicy(), lambda line: log.append(hour_line(line)))
    last = log.lines()[-1]["hour"]
    log.append(event_line(last, "swapped", clusters=["tickets"], drafter="runs/<x>", why="+80% tokens/s"))
    return log


def test_the_page_shows_each_cluster_and_what_was_done(tmp_path: Path) -> None:
    text = page(logged(tmp_path).lines())
    assert text.count("<svg") == 1 + 2 and ">tickets<" in text
    assert "retrain" in text and "swapped" in text and "+80% tokens/s" in text
    assert "usual at that hour" in text
    assert "<x>" not in text
    assert text == page(AdaptLog(tmp_path).lines())


def test_a_fall_that_has_not_lasted_is_not_called_usual(tmp_path: Path) -> None:
    lines = logged(tmp_path).lines()
    last = next(line for line in reversed(lines) if "seen" in line)
    for name, seen in last["seen"].items():
        seen["state"] = "raised" if name == "tickets" else "calm"
    text = page(lines)
    assert "Acceptance is lower than usual on tickets. " in text
    assert "Acceptance is as it usually is" not in text


def test_a_page_of_nothing() -> None:
    assert "nothing has been seen yet" in page([])


def test_a_line_that_a_crash_cut_is_left_out(tmp_path: Path) -> None:
    log = AdaptLog(tmp_path)
    log.append(event_line(1, "reported", why="first"))
    with log.file.open("a") as file:
        file.write('{"hour": 2, "ev')
    assert len(log.lines()) == 1
    log.append(event_line(3, "told", why="third"))  # the name of older logs
    assert [(line["hour"], line["event"]) for line in log.lines()] == [(1, "reported"), (3, "reported")]


def test_what_was_done_is_known_again(tmp_path: Path) -> None:
    """A policy that is fed the same hours and the log's events is where the first one was."""
    log, world, first = AdaptLog(tmp_path), make_world("noise", 1, 7), SeasonalPolicy()
    hours = {}
    for at in range(100):
        hours[world.first + at] = world.traffic(at)
        first.hour(world.first + at, hours[world.first + at])
    log.append(event_line(world.first + 60, "training", clusters=["one"]))
    log.append(event_line(world.first + 62, "swapped", clusters=["one"], cost_hours=0.7))
    again = SeasonalPolicy()
    lines = rebuilt(again, hours, log, world.first + 100)
    assert len(lines) == 100 and again.trained_at == world.first + 62 and not again.is_training
    assert again.prices.training_hours == 0.7
    assert again.clusters["two"].series.season.level == first.clusters["two"].series.season.level


def test_a_decision_is_json(tmp_path: Path) -> None:
    log = AdaptLog(tmp_path)
    policy = SeasonalPolicy()
    line = log.append(hour_line(policy.hour(5, {})))
    assert json.loads(log.file.read_text()) == line and line["time"] == "1970-01-01T05:00Z"
    assert line["decision"]["action"] == "too little"


def exported() -> set[str]:
    policy = SeasonalPolicy()
    policy.hour(5, make_world("noise", 0, 7).traffic(0))
    return {sample.name for family in AdaptMetrics(policy).registry.collect() for sample in family.samples}


def test_dashboard_and_alerts_show_what_is_exported() -> None:
    dashboard = json.loads((DOCS / "grafana-adapt.json").read_text())
    shown = set(re.findall(r"paceline:adapt_\w+", json.dumps(dashboard["panels"])))
    alerts = (DOCS / "alerts-adapt.yml").read_text()
    rules = yaml.safe_load(alerts)["groups"][0]["rules"]
    watched = set(re.findall(r"paceline:adapt_\w+", " ".join(rule["expr"] for rule in rules)))
    names = {name for name in exported() if not name.endswith("_created")}
    assert shown == names and watched <= names
    assert all(rule["annotations"]["summary"] for rule in rules)
