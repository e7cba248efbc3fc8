"""Reads plan.json, the plan that a training run stored, and sets its values in the configuration of a resumed run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.train.config import TrainConfig
from paceline.train.plan.expected_acceptance import Learned, expected_lines, expected_of
from paceline.train.run_file import value_of, with_value


def apply_stored(config: TrainConfig, plan: dict[str, Any]) -> TrainConfig:
    """Returns the config with the values stored in `plan` (the run's plan.json), except for fields that the user gives
    now or that no longer exist."""
    for name, value in (plan.get("values") or {}).items():
        try:
            before = value_of(config, name)
        except AttributeError:
            continue
        if not config.is_given(name):
            config = with_value(config, name, tuple(value) if isinstance(before, tuple) else value)
    return config


def stored_plan(out: Path) -> dict[str, Any] | None:
    """Returns the contents of plan.json in the run folder `out`; None if it is missing or damaged."""
    try:
        plan = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return plan if isinstance(plan, dict) else None


def with_minutes(plan: dict[str, Any], config: TrainConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns `plan` (contents of plan.json) for `config.minutes`: the steps get as many more or fewer minutes as those
    differ from the plan's; all of them, with the steps taken before, if the plan had none. Reports changes through
    `say`, also that `config.minutes` has no effect next to a given `loop.max_minutes`."""
    values, before, minutes = plan.get("values") or {}, plan.get("minutes"), config.minutes
    if minutes is None or config.is_given("loop.max_minutes"):
        if minutes not in (None, before):
            say("note: --minutes has no effect next to --max-minutes, which ends the steps: leave one out")
        return plan
    planned = values.get("loop.max_minutes")
    steps = max(0.1, planned + minutes - before) if planned and before else minutes
    plan = {**plan, "minutes": minutes, "values": {**values, "loop.max_minutes": steps}}
    if planned and steps != planned:
        update_expected(plan, steps / planned, say)
    return plan


def update_expected(plan: dict[str, Any], share: float, say: Callable[[str], None]) -> None:
    """Updates the expectations in `plan` (contents of plan.json) to this share of its blocks, and reports them through
    `say`."""
    expected = plan.get("expected") or {}
    if not {"answers", "places"} <= expected.keys():  # a plan of an earlier version, or of a drafter of chains
        return
    plan["blocks"] = share * float(plan["blocks"])
    plan["expected"] = expected_of(plan["target"], Learned(plan["blocks"], expected["answers"], expected["places"]))
    for line in expected_lines(plan["target"], plan["expected"]):
        say(line)
