"""Drafts from the answer that a request predicts: they change no text, and cost little where it is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter
from engine_runs import run

from paceline.draft.base import Drafter, NoDrafter, Observed
from paceline.draft.ngram import MOST_PREDICTED, NgramDrafter, PredictionDrafter
from paceline.engine.engine import Engine
from paceline.errors import SamplingError
from paceline.plan.costs import PassCosts
from paceline.plan.planner import AdaptivePlanner, FixedPlanner, Offer, Planner, Row
from paceline.types import PREDICTION, Batch, Round, RoundStats, SamplingParams, Sequence

PREDICTED = [11, 12, 13, 14, 15, 16, 17, 12, 13, 18, 19, 20]
PASS_COSTS = PassCosts(((1, 1.0), (4, 1.25), (8, 1.5), (16, 2.05), (32, 2.95)))
"""Cost of a pass over this many positions, relative to one: a model of 0.5 billion parameters on two cores."""
FLAT = PassCosts(((1, 1.0), (64, 1.0)))
"""A pass costs the same for any number of positions."""
SHAPES = [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "seed": 1, "top_p": 0.9}]


def started(answer: list[int], prediction: list[int] = PREDICTED, max_tokens: int = 100) -> Sequence:
    seq = Sequence(0, [1, 2, *answer], 2, SamplingParams(max_tokens=max_tokens), row=0, cached_len=1 + len(answer))
    seq.prediction = prediction
    return seq


def drafts_after(answer: list[int], prediction: list[int] = PREDICTED) -> list[int]:
    """Drafts after this answer, of which each token was a round of its own."""
    drafter, seq = PredictionDrafter(), started([], prediction)
    drafter.start(seq)
    for token in answer:
        seq.accept([token])
        drafter.chances(seq, 9)
    return drafter.propose(Batch([seq])).tokens_B[0]


@pytest.mark.parametrize(
    ("answer", "following"),
    [
        ([], 11),  # at the beginning
        ([90, 91, 11], 12),
        ([11, 12, 13], 14),
        ([11, 12, 90], 14),  # one token replaced by another
        ([11, 12, 90, 91], 15),  # two tokens replaced by others
        ([11, 12, 90, 91, 92, 15], 16),  # the next place of the last token
        ([11, 12, 13, 14, 90, 12, 13], 18),  # of two places the one behind the last match
        ([11, 12, 13, 18, 90, 14, 15, 16], 17),  # a long match before it
        ([90, 13, 18, 19], 20),
    ],
)
def test_the_place_in_the_prediction_is_followed(answer: list[int], following: int) -> None:
    drafts = drafts_after(answer)
    assert drafts == PREDICTED[PREDICTED.index(following) :]


def test_nothing_is_drafted_after_the_end_of_the_prediction_or_without_one_or_from_one_that_begins_otherwise() -> None:
    assert drafts_after(PREDICTED) == drafts_after([11, 12], []) == drafts_after([90]) == []


def test_a_longer_match_is_a_better_one_and_limits_hold() -> None:
    drafter, seq = PredictionDrafter(), started([11], max_tokens=5)
    drafter.start(seq)
    chances = drafter.chances(seq, 9)
    assert len(chances) == 9 and list(chances) == sorted(chances)
    assert drafter.propose(Batch([seq])).tokens_B == [[12, 13, 14]]
    assert len(drafts_after([0], list(range(100)))) == MOST_PREDICTED
    assert PredictionDrafter(num_drafted=4).num_drafted == 4


def replay(prompt: list[int], answer: list[int], prediction: list[int]) -> float:
    """Tokens per unit of pass cost when the target answers `answer`, with prompt lookup and a prediction."""
    lookups, predictions, planner = NgramDrafter(), PredictionDrafter(), AdaptivePlanner(PASS_COSTS)
    seq = Sequence(0, list(prompt), len(prompt), SamplingParams(max_tokens=len(answer)), row=0)
    seq.prediction, seq.cached_len, cost = prediction, len(prompt) - 1, 0.0
    lookups.start(seq)
    predictions.start(seq)
    while seq.num_output < len(answer):
        rest, begin, sources = answer[seq.num_output :], seq.cached_len, {"ngram": lookups, PREDICTION: predictions}
        offers = [
            Offer(name, chances)
            for name, source in sources.items()
            if (chances := source.chances(seq, seq.most_drafted(source.num_drafted)))
        ]
        plan = planner.next([Row(0, "greedy", offers)])
        take = plan.drafts[0]
        tokens = sources[take.source].propose(Batch([seq], plan.drafts)).tokens_B[0] if take.count else []
        same = next((index for index, token in enumerate(tokens) if token != rest[index]), len(tokens))
        seq.accept(rest[: same + 1])
        for source in sources.values():
            source.observe([Observed(seq, begin, seq.cached_len - begin, None)])
        spent = PASS_COSTS.seconds(1 + len(tokens))
        planner.learn(plan, RoundStats([len(tokens)], [same], True, verify_s=spent, num_checked_B=[len(tokens)]))
        cost += spent
    return len(answer) / cost


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [60, 2000])
def test_right_predictions_pay_and_wrong_ones_cost_little(vocab: int) -> None:
    draw = random.Random(0)
    prompt, answer, other = (draw.choices(range(vocab), k=400) for _ in range(3))
    plain = replay(prompt, answer, [])
    nearly = [draw.randrange(vocab) if place % 100 < 10 else token for place, token in enumerate(answer)]
    assert replay(prompt, answer, answer) > 6 * plain
    assert replay(prompt, answer, nearly) > 2.5 * plain
    assert replay(prompt, answer, other) > 0.97 * plain
    copied = prompt[:200]
    assert replay(prompt, copied, other) > 0.97 * replay(prompt, copied, [])


def rounds_of(sequences: list[Sequence]) -> list[Round]:
    return [one for seq in sequences for one in seq.rounds]


@pytest.mark.slow
@pytest.mark.parametrize("planner", [FixedPlanner, lambda: AdaptivePlanner(FLAT)], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("kind", [NgramDrafter, ScriptedDrafter])
@pytest.mark.parametrize("params", SHAPES)
def test_no_text_depends_on_a_prediction(
    planner: Callable[[], Planner], kind: type[Drafter], params: dict[str, float]
) -> None:
    """Greedy and seeded; right, partly right and wrong; in one batch, with prompt lookup where the drafter has it."""
    prompts, target = [[1, 2, 3], [4, 5], [6, 7, 1, 2]], FakeTarget(num_rows=3)
    shape = SamplingParams(max_tokens=60, ignore_eos=True, **params)  # pyright: ignore[reportArgumentType]
    plain = [seq.output_ids for seq in run(Engine(target, ByteTokenizer()), prompts, [shape] * 3)]
    drafter = ScriptedDrafter(target, accuracy=0.5) if kind is ScriptedDrafter else kind()
    engine = Engine(target, ByteTokenizer(), drafter, planner=planner(), lookups=True)
    predictions = [plain[0], [*plain[1][:20], 3, 3, *plain[1][24:]], plain[0][::-1]]
    sequences = run(engine, prompts, [replace(shape, prediction=tuple(each)) for each in predictions])
    assert [seq.output_ids for seq in sequences] == plain
    accepted = [sum(one.num_accepted for one in seq.rounds if one.source == PREDICTION) for seq in sequences]
    if planner is FixedPlanner:  # the other one decides by measured times
        assert accepted[0] > 40 and accepted[1] > 20


def test_plain_decoding_stays_plain_and_a_limit_of_drafts_holds() -> None:
    target, prompt = FakeTarget(), [1, 2, 3]
    prediction = tuple(target.greedy(prompt, 40))
    for drafter, most, longest in ((NoDrafter(), None, 0), (NgramDrafter(), 0, 0), (NgramDrafter(), 5, 5)):
        engine = Engine(target, ByteTokenizer(), drafter, most_predicted=most)
        params = SamplingParams(max_tokens=40, ignore_eos=True, prediction=prediction)
        sequences = run(engine, [prompt], [params])
        drafted = [one.num_drafted for one in rounds_of(sequences) if one.source == PREDICTION]
        assert max(drafted, default=0) == longest


def test_a_prediction_is_text_or_tokens_of_the_vocabulary() -> None:
    engine = Engine(FakeTarget(vocab_size=300), ByteTokenizer(), NgramDrafter())
    for prediction in ("ab", [97, 98]):
        engine.add([1], SamplingParams(prediction=prediction))  # pyright: ignore[reportArgumentType]
    assert [seq.prediction for seq in engine.scheduler.prefilling] == [[97, 98]] * 2
    with pytest.raises(SamplingError, match="prediction has token 300, outside the vocabulary"):
        engine.add([1], SamplingParams(prediction=(5, 300)))
