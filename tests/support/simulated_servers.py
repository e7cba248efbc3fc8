"""Step costs and requests of simulated servers, for their tests."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.simulate.costs.rounds import StepCosts
from paceline.simulate.server.drafts import Survival
from paceline.simulate.server.load import (
    arriving,
    poisson,
)
from paceline.simulate.server.server import (
    Case,
    Job,
    Outcome,
    ServerShape,
)

ONE_ROW = ServerShape(max_rows=1, prefill_chunk=None)
HALF: Survival = tuple(0.5**place for place in range(1, 8))


@dataclass(frozen=True)
class Costs(StepCosts):
    """A pass is a constant and something for every position beyond the first few, as on real machines."""

    base_s: float = 0.010
    position_s: float = 0.001
    free: float = 4
    draft: float = 0.001
    host_s: float = 0.0005

    def verify_s(self, batch: float, positions: float, context: float) -> float:
        return self.base_s + self.position_s * max(batch * positions - self.free, 0)

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        return self.draft * num_drafted


COSTS = Costs()


class Adapting(Costs):
    """Steps of an engine that shortens prompt chunks while requests run."""

    prefill_adapts = True


def jobs_of(number: int, prompt: int = 10, answer: int = 20, rate: float | None = None, seed: int = 0) -> list[Job]:
    jobs = [Job(0.0, prompt, answer)] * number
    return arriving(jobs, poisson(rate, number, seed)) if rate else jobs


def run(jobs: list[Job], policy: str = "off", server: ServerShape | None = None, **options: object) -> Outcome:
    case = Case(jobs, options.pop("costs", COSTS), server or ServerShape(), options.pop("survival", HALF))  # type: ignore[arg-type]
    return case.run(policy, **options)  # type: ignore[arg-type]
