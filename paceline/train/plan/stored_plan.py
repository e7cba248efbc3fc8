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
    """Returns the config with the values that a plan chose when the run began. `plan`: contents of plan.json. A field
    that the user gives now keeps the user's value; stored fields that no longer exist are ignored."""
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
    """Adapts a resumed run's plan to a new time limit of the whole run, `config.minutes`. Returns a copy of `plan`
    (contents of plan.json) with a new limit for the training steps, `loop.max_minutes`:
    - If the plan had a limit for the whole run, the steps' limit changes by as many minutes as that limit.
    - If not, the steps' limit becomes `config.minutes`, which includes the steps already taken.

    Without `config.minutes`, or if the user gave `loop.max_minutes`, the plan is returned unchanged. `say`, given by
    the caller, gets texts for the user: a note if `config.minutes` has no effect, or the new expected acceptance
    length."""
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
    """Updates the expected acceptance length in `plan` (contents of plan.json), in place, after the amount of training
    was multiplied by `share`. `say`, given by the caller, gets the new expectation as lines of text. Does nothing for a
    plan without an expectation."""
    expected = plan.get("expected") or {}
    if not {"answers", "places"} <= expected.keys():  # a plan of an earlier version, or of a drafter of chains
        return
    plan["blocks"] = share * float(plan["blocks"])
    plan["expected"] = expected_of(plan["target"], Learned(plan["blocks"], expected["answers"], expected["places"]))
    for line in expected_lines(plan["target"], plan["expected"]):
        say(line)
