"""A server that is the simulator itself, and what a benchmark's client would have seen of it."""

from __future__ import annotations

from typing import Any

from paceline.bench.serving.load import Answer
from paceline.simulate.costs.rounds import table_of
from paceline.simulate.server.load import arriving, poisson
from paceline.simulate.server.server import Case, Job, Outcome, ServerShape

STEPS: dict[str, Any] = {
    "verify": [[rows, width, 0.010 + 0.0005 * rows * width] for rows in (1, 2, 4, 8) for width in range(1, 9)],
    "draft": [[rows, width, 0.002] for rows in (1, 8) for width in range(1, 8)],
    "host_s": 0.0004,
    "prefill": [[1, 0.010], [64, 0.040], [256, 0.140]],
}
SURVIVAL = (0.8, 0.6, 0.45, 0.35, 0.3, 0.25, 0.2)
JOBS = [Job(0.0, 20 + 7 * (index % 5), 10 + 11 * (index % 4)) for index in range(60)]


def served(policy: str, rate: float | None, concurrency: int | None) -> Outcome:
    case = Case(JOBS, table_of(STEPS), ServerShape(), SURVIVAL)
    jobs = arriving(JOBS, poisson(rate, len(JOBS), 0)) if rate else JOBS
    return case.run(policy, jobs, concurrency)


def answers_of(outcome: Outcome) -> list[Answer]:
    """Answers as the benchmark's client would have seen them."""
    answers = []
    for each in outcome.requests:
        accepted = [count - 1 for _, count in each.chunks[1:]]
        answers.append(
            Answer(
                first_s=each.first_token_s,
                total_s=each.total_s,
                due_s=each.arrived_at,
                num_prompt=each.job.prompt_tokens + 16,
                num_reused=16,
                num_tokens=each.num_tokens,
                num_accepted=each.num_accepted_total,
                num_drafted=each.num_drafted_total,
                num_rounds=each.num_rounds,
                accepted_histogram=[accepted.count(count) for count in range(max(accepted, default=0) + 1)],
            )
        )
    return answers
