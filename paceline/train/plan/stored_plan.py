"""Reads plan.json, the plan that a training run stored, and sets its values in the configuration of a resumed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.train.config import TrainConfig
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
