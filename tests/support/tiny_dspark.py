"""Tiny DSpark drafters."""

from __future__ import annotations

from typing import Any

from tiny_dflash import loud_, raw_config

from paceline.draft.dflash.config import DFlashConfig, as_dspark
from paceline.draft.dspark.drafter import DSparkNetwork


def raw_3(**keys: Any) -> dict[str, Any]:
    return as_dspark(raw_config(**keys), rank=5)


def network_3(raw: dict[str, Any], seed: int = 0) -> DSparkNetwork:
    built = DSparkNetwork.random(DFlashConfig.from_json(raw))
    loud_(built, seed)
    return built
