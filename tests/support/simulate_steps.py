"""Step times as `paceline bench steps` writes them, of a machine whose overheads are known."""

from __future__ import annotations

import random
from typing import Any

from paceline.hardware import Machine
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.roofline import Deployment
from paceline.simulate.costs.rounds import Calibration, DraftFit, PassFit

MACHINE = Machine("box", 4e10, {"bfloat16": 2e12}, 2, 10**10)
SHAPE = catalogue.find("smollm2-135m")
DEPLOYMENT = Deployment(MACHINE, SHAPE.precisions)
PLANTED = Calibration(
    PassFit(reading=1.3, computing=2.5, fixed_s=4e-4, token_s=3e-5, cached_token_s=2e-8),
    DraftFit(fixed_s=9e-4, position_s=1.5e-4, floor=6.0, row_s=5e-5, is_block=True),
    host_s=3e-4,
)


def steps_file(planted: Calibration = PLANTED, context: int = 256, noise: float = 0.0, **more: Any) -> dict[str, Any]:
    """Step times as `paceline bench steps` writes them, of a machine that behaves as planted."""
    costs, draw = planted.costs(SHAPE, DEPLOYMENT), random.Random(context)
    sizes = [(batch, width) for batch in (1, 2, 4, 8) for width in range(1, 18)]

    def disturbed(seconds: float) -> float:
        return seconds * (1 + noise * draw.uniform(-1, 1))

    return {
        "verify": [[batch, width, disturbed(costs.verify_s(batch, width, context))] for batch, width in sizes],
        "draft": [
            [batch, width - 1, disturbed(costs.draft_s(batch, width - 1, 0))] for batch, width in sizes if width > 1
        ],
        "host_s": planted.host_s,
        "context": context,
        "model": "smollm2-135m",
        "machine": {
            "name": "box",
            "bytes_per_s": 4e10,
            "flops_per_s": {"bfloat16": 2e12},
            "num_threads": 2,
            "memory_bytes": 10**10,
            "link_bytes_per_s": 0.0,
        },
        **more,
    }
