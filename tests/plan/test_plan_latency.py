"""The objective latency: the least mean time per token over the rows, never below plain decoding, no text changed."""

from __future__ import annotations

import itertools
import math
import random
from functools import partial

import pytest
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter
from engine_runs import run
from simulated_rounds import FLAT, STEEP, counts, row

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.plan.costs import PassCosts, RoundCosts
from paceline.plan.planner import AdaptivePlanner, Offer, Row
from paceline.plan.shares import Want, gains_of, share_out
from paceline.types import SamplingParams

RISING = PassCosts(((2, 1.0), (3, 1.08), (18, 2.28)))
"""Two rows: each position more takes 0.08 of a plain round."""


def per_token(costs: PassCosts, chances: list[tuple[float, ...]], taken: tuple[int, ...], num_rows: int) -> float:
    """Mean over the rows of the time for a token; rows without a want have one a round."""
    expected = [1 + sum(gains_of(each)[:count]) for each, count in zip(chances, taken, strict=True)]
    expected += [1.0] * (num_rows - len(chances))
    return costs.seconds(num_rows + sum(taken)) * sum(1 / each for each in expected) / num_rows


@pytest.mark.parametrize("seed", range(30))
def test_the_least_mean_time_per_token_by_trying_all(seed: int) -> None:
    source = random.Random(seed)
    num_rows = source.choice([1, 2, 3])
    sizes = sorted(source.sample(range(2, 16), 3))
    points = list(itertools.accumulate((source.uniform(0.0, 1.5) for _ in sizes), initial=1.0))
    costs = PassCosts(list(zip([1, *sizes], points, strict=True)))
    chances = [tuple(source.uniform(0.2, 0.98) for _ in range(4)) for _ in range(source.randint(1, num_rows))]
    wants = [Want(place, Offer("ngram", each)) for place, each in enumerate(chances)]
    shares = share_out(RoundCosts(costs), 0.0, num_rows, wants, math.inf, sooner=True)
    each_way = itertools.product(*(range(len(gains_of(each)) + 1) for each in chances))
    best = min(per_token(costs, chances, taken, num_rows) for taken in each_way)
    assert per_token(costs, chances, tuple(shares), num_rows) == pytest.approx(best)


def test_what_one_row_gains_is_weighed_against_what_the_other_waits() -> None:
    """One row's drafts stand, the other's do not: all tokens together come fastest with long drafts, each row's next do
    not."""
    chances = [(0.95,) * 8, (0.05,) * 8]
    picked = {}
    for objective in ("throughput", "latency"):
        planner = AdaptivePlanner(RISING, objective=objective)  # pyright: ignore[reportArgumentType]
        rows = [Row(key, "greedy", [Offer("ngram", each)]) for key, each in enumerate(chances)]
        picked[objective] = tuple(counts(planner.next(rows)))
    assert picked["throughput"][0] >= 7 and 1 <= picked["latency"][0] <= 3 and picked["latency"][1] == 0
    waits = {name: per_token(RISING, chances, taken, 2) for name, taken in picked.items()}
    plain = per_token(RISING, chances, (0, 0), 2)
    assert waits["latency"] < 0.9 * waits["throughput"] and waits["latency"] < plain


def test_one_row_alone_and_the_extremes() -> None:
    free, dear = (AdaptivePlanner(costs, objective="latency") for costs in (FLAT, STEEP))
    assert counts(free.next([row(free)])) == [7]
    assert counts(dear.next([row(dear, most=0, lookup=0.9)])) == [0]
    planner = AdaptivePlanner(PassCosts(((1, 1.0), (2, 1.05), (3, 9.0))), most_chunk=64, objective="latency")
    assert counts(planner.next([row(planner, most=0, lookup=0.9)], prompt_left=65)) == [1]
    assert counts(planner.next([row(planner, most=0, lookup=0.9)], prompt_left=64)) == [0]


@pytest.mark.parametrize("seed", range(20))
def test_never_fewer_tokens_per_second_than_plain_decoding(seed: int) -> None:
    """Plans that lower the mean latency per row also raise the throughput of all rows over plain decoding."""
    source = random.Random(100 + seed)
    costs = PassCosts([(size, size ** source.uniform(0.1, 0.9)) for size in range(1, 40)])
    chances = [tuple(source.uniform(0.0, 0.98) for _ in range(8)) for _ in range(4)]
    wants = [Want(place, Offer("ngram", each)) for place, each in enumerate(chances)]
    taken = share_out(RoundCosts(costs), 0.0, 4, wants, math.inf, sooner=True)
    tokens = 4 + sum(sum(gains_of(each)[:count]) for each, count in zip(chances, taken, strict=True))
    assert tokens / costs.seconds(4 + sum(taken)) >= 4 / costs.seconds(4) - 1e-9


def test_a_round_beside_a_prompt_keeps_to_its_time_and_fixed_drafts_count() -> None:
    costs, wants = RoundCosts(RISING), [Want(0, Offer("ngram", (0.95,) * 8))]
    share = partial(share_out, costs, 0.0, 2, wants, sooner=True)
    assert share(most_s=1.1) == [1]
    lone, spared = share(most_s=math.inf)[0], share(most_s=math.inf, num_fixed=1, spared=0.6)[0]
    assert spared > lone  # the other row has 2.5 tokens a round by now: it loses less by waiting


@pytest.mark.slow
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "seeded"])
def test_no_text_changes(params: dict[str, float]) -> None:
    prompts = [[7, 8, 9, number] for number in range(4)]

    def answers_with(**options: str) -> list[list[int]]:
        target = FakeTarget(vocab_size=258, num_rows=4)
        drafter = ScriptedDrafter(target, accuracy=0.7) if options else None
        planner = AdaptivePlanner(PassCosts(((1, 1.0), (64, 1.5))), **options) if options else None  # pyright: ignore
        engine = Engine(target, ByteTokenizer(), drafter, planner=planner, lookups=bool(options))
        return [
            seq.output_ids for seq in run(engine, prompts, SamplingParams(max_tokens=40, ignore_eos=True, **params))
        ]  # pyright: ignore

    assert answers_with(objective="latency") == answers_with(objective="throughput") == answers_with()


def test_it_is_an_option_and_goes_with_speculate_auto_alone() -> None:
    assert EngineConfig(objective="latency").speculate == "auto"
    with pytest.raises(ConfigError, match="objective latency needs speculate auto"):
        EngineConfig(objective="latency", speculate="3")
    with pytest.raises(ConfigError, match="objective"):
        EngineConfig(objective="speed")  # pyright: ignore[reportArgumentType]
