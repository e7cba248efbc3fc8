"""Rounds are planned for the rows that decode in them, in the engine and in the simulated server."""

from __future__ import annotations

import pytest
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter
from engine_runs import run

from paceline.engine.engine import Engine
from paceline.plan.planner import FixedPlanner, Plan
from paceline.simulate.costs.rounds import StepCosts
from paceline.simulate.server.server import Case, Job, ServerShape, Simulation
from paceline.types import RoundStats, SamplingParams


class Watching(FixedPlanner):
    """Keeps for each round how many rows it was planned for, and how many decoded."""

    def learn(self, plan: Plan, stats: RoundStats) -> None:
        self.seen = [*getattr(self, "seen", []), (plan.num_rows, len(stats.num_drafted_B))]


class Constant(StepCosts):
    def verify_s(self, batch: float, positions: float, context: float) -> float:
        return 0.01

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        return 0.001

    def prefill_s(self, num_tokens: int, context: float) -> float:
        return 0.01


def in_the_engine(planner: FixedPlanner) -> None:
    target = FakeTarget(num_rows=4, max_len=128)
    prompts = [[number, 3, 5] * 9 for number in range(6)]
    engine = Engine(target, ByteTokenizer(), ScriptedDrafter(target), planner=planner)
    run(engine, prompts, SamplingParams(max_tokens=30))


def simulated(planner: FixedPlanner) -> None:
    case = Case([Job(0.0, 27, 30)] * 6, Constant(), ServerShape(max_rows=4), (0.5, 0.25))
    Simulation(case, planner, case.jobs).run()


@pytest.mark.parametrize("serve", [in_the_engine, simulated])
def test_only_the_prompt_that_ends_in_the_step_joins_its_round(serve: object) -> None:
    planner = Watching(most_chunk=10)
    serve(planner)  # pyright: ignore[reportCallIssue]
    assert planner.seen and all(planned == decoded for planned, decoded in planner.seen), planner.seen
