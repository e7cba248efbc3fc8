"""One tiny drafter of each method, for `tiny_dflash.tiny_target`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiny_dflash import network, raw_config, tiny_target
from tiny_dflash2 import network_2, raw_2
from tiny_dspark import network_3, raw_3
from tiny_eagle3 import loud_network, raw_eagle3

from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.dflash2.drafter import DFlash2Drafter
from paceline.draft.dspark.drafter import DSparkDrafter
from paceline.draft.eagle3.drafter import Eagle3Drafter
from paceline.draft.small_model import SmallModelDrafter

DRAFTERS: dict[str, Callable[..., Any]] = {
    "dflash": lambda: DFlashDrafter(network(raw_config())),
    "dflash2": lambda: DFlash2Drafter(network_2(raw_2())),
    "dspark": lambda: DSparkDrafter(network_3(raw_3())),
    "eagle3": lambda: Eagle3Drafter(loud_network(raw_eagle3()), num_drafted=4),
    "small_model": lambda **options: SmallModelDrafter(tiny_target(**options), num_drafted=3),
}
"""Options are those of the small model's `tiny_target`."""
