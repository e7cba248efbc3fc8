"""What a drafter would have been served on stored traces of another: told beforehand, then served."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from adapt_requests import request
from doubles import ScriptedDrafter
from fixed_seeds import fixed_seeds
from scored import FASTEST, dflash, prompts, served, tiny_llm
from small_llm import Talker, fake_llm
from tiny_dflash import KINDS, loud_, network, raw_config

from paceline.draft.dflash.config import DFlashConfig, as_dflash2
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.dflash2.drafter import DFlash2Drafter, DFlash2Network
from paceline.draft.ngram import NgramDrafter
from paceline.errors import ConfigError
from paceline.loop.adapt.gate.score import Scorer, score
from paceline.loop.adapt.traffic.stored import read_requests
from paceline.report.statistics import Rounds
from paceline.types import Batch, DraftBlock, GrammarSpec, SamplingParams

__all__ = ["fixed_seeds"]

pytestmark = pytest.mark.slow
VARIED: list[dict[str, Any]] = [
    {},
    {"max_tokens": 17},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.2, "seed": 8, "top_p": 0.9},
    {"temperature": 0.7, "seed": 9, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"max_drafted": 2},
    {"stop_token_ids": (4,)},
    {"repetition_penalty": 1.3, "presence_penalty": 0.2},
]


@pytest.mark.parametrize("kind", KINDS)
def test_another_drafter_is_predicted_to_the_token(kind: Any, tmp_path: Path) -> None:
    """Greedy and seeded requests of every kind: round by round what is served with the other drafter."""
    llm = tiny_llm(kind)
    pairs = [
        (prompt, SamplingParams(**({"max_tokens": 24} | VARIED[index]))) for index, prompt in enumerate(prompts(8))
    ]
    first = served(llm, dflash(0), pairs, tmp_path)
    requests, left_out = read_requests(tmp_path)
    assert len(requests) == len(first) and not left_out
    for other in (dflash(3), NgramDrafter()):
        predicted = score(llm, other, requests)
        second = served(llm, other, pairs)
        for seq, each in zip(second, predicted, strict=True):
            assert each.request.answer_ids == seq.output_ids  # the text does not depend on the drafter
            assert [one[:2] for one in each.rounds] == [one[:2] for one in seq.rounds]
    assert any(one.num_accepted for each in predicted for one in each.rounds)


def test_fewer_drafts_are_predicted_too(tmp_path: Path) -> None:
    """`--speculate N` is a drafter of N drafts."""
    llm = tiny_llm(FASTEST)
    pairs = [(prompt, SamplingParams(max_tokens=30)) for prompt in prompts(6)]
    served(llm, dflash(0), pairs, tmp_path)
    narrow = DFlashDrafter(network(raw_config(), 3), num_drafted=2)
    predicted = score(llm, narrow, read_requests(tmp_path)[0])
    assert [[one[:2] for one in each.rounds] for each in predicted] == [
        [one[:2] for one in seq.rounds] for seq in served(llm, narrow, pairs)
    ]


def dflash2(seed: int) -> DFlash2Drafter:
    """Whose selector matters: five of eleven tokens are never candidates."""
    dflash2_network = DFlash2Network.random(DFlashConfig.from_json(as_dflash2(raw_config(), rank=5, top_k=6)), seed)
    loud_(dflash2_network, seed)
    for name, parameter in dflash2_network.named_parameters():
        if name.endswith("base_kernel"):
            parameter.data[:, 0] += 1
        elif name.endswith("kernel_projection.weight"):
            parameter.data *= 0.3
    return DFlash2Drafter(dflash2_network)


@pytest.mark.parametrize("kind", KINDS)
def test_chances_of_drafts_that_depend_on_each_other(kind: Any) -> None:
    """Probabilities of sampled drafts are those they were sampled with; after a draft that is not a candidate nothing
    is sampled."""
    llm, drafter = tiny_llm(kind), dflash2(3)
    drafter.bind(llm.target)
    llm.target.set_taps(drafter.tap_layers)
    drawing = Recorded(llm, drafter, "rejection")
    drawing.score(
        [
            request(
                prompt_ids=[3, 1, 4],
                answer_ids=[1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9],
                params=SamplingParams(temperature=0.8),
                seed=5,
            )
        ]
    )
    assert len(drawing.told) > 3 and all(own == pytest.approx(chances, abs=1e-5) for own, chances in drawing.told)


class Recorded(Scorer):
    """Keeps, of every round, what the drawn drafts were drawn with, and what `chances_of` says of them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told: list[tuple[list[float], list[float]]] = []

    def _num_accepted(self, answer: Any, tokens: list[int], draft_probs_KV: Any) -> int:
        drafter = cast(DFlash2Drafter, self._drafter)
        own = [float(probs_V[token]) for probs_V, token in zip(draft_probs_KV, tokens, strict=True)]
        self.told.append((own, drafter.chances_of(answer.seq, tokens, draft_probs_KV)))
        never = next(token for token in range(11) if not draft_probs_KV[0, token])
        assert drafter.chances_of(answer.seq, [never, *tokens[1:]], draft_probs_KV) == [0.0] * len(tokens)
        return super()._num_accepted(answer, tokens, draft_probs_KV)


@pytest.mark.parametrize(("make", "rule"), [(dflash, "auto"), (dflash2, "rejection"), (dflash, "match")])
def test_sampled_requests_are_predicted_within_the_interval(make: Any, rule: str, tmp_path: Path) -> None:
    """Drafts are drawn, and stand by chance: tokens a round agree within four standard errors, by fixed seeds."""
    llm = tiny_llm(FASTEST, rule=rule)
    params = SamplingParams(max_tokens=24, temperature=1.0, top_p=0.95)
    pairs = [(prompt, params) for prompt in prompts(20)]
    served(llm, dflash(0), pairs, tmp_path)
    requests, _ = read_requests(tmp_path)
    requests = list({each.key: each for each in requests}.values())
    predicted = score(llm, make(3), requests)
    second = served(llm, make(3), pairs)
    ours = Rounds.sum(each.figures for each in predicted)
    theirs = Rounds.sum(Rounds.counted(seq.rounds) for seq in second)
    error = (_variance(ours) / ours.num_rounds + _variance(theirs) / theirs.num_rounds) ** 0.5
    assert ours.num_accepted > 20
    assert abs(ours.tokens_per_round - theirs.tokens_per_round) < 4 * error


def test_chances_follow_from_what_shapes_the_answer() -> None:
    """Tokens that could not come have no share of the target's distribution, here as when it was served."""
    pairs: list[tuple[list[float], list[float]]] = []

    class Watched(Scorer):
        def _target_probs(self, answer: Any, text_ids: list[int]) -> list[float]:
            chances = super()._target_probs(answer, text_ids)
            logits_JV = answer.logits_TV[answer.at : answer.at + len(text_ids)].float().clone()
            logits_JV[:, [2, 6]] = float("-inf")
            for place in range(len(text_ids)):
                if answer.seq.num_output + place < 5:
                    logits_JV[place, 4] = float("-inf")
            own = torch.softmax(logits_JV, -1)
            pairs.append((chances, [float(own[place, token]) for place, token in enumerate(text_ids)]))
            return chances

    shaping: dict[str, Any] = {"bad_words": ("\x02", "\x06"), "min_tokens": 5, "stop_token_ids": (4,)}
    params = SamplingParams(temperature=1.0, **shaping)
    recorded = request(prompt_ids=[3, 1, 4], answer_ids=[1, 5, 9, 3, 5, 3, 5, 8, 9, 7, 4], params=params, seed=5)
    Watched(tiny_llm(FASTEST), dflash(3), "rejection").score([recorded])
    assert pairs and all(chances == pytest.approx(own, abs=1e-5) for chances, own in pairs)


def _variance(rounds: Rounds) -> float:
    mean = rounds.tokens_per_round - 1
    return (
        sum(count * (number - mean) ** 2 for number, count in enumerate(rounds.accepted_histogram)) / rounds.num_rounds
    )


def test_numbers_that_nobody_knows_are_not_guessed_with() -> None:
    """An answer that another server drew: drafts are drawn for it, as a drafter without foresight would."""
    sampled, drafted_with = SamplingParams(temperature=1.0), list[tuple[int, bool]]()

    class Spy(DFlashDrafter):
        def propose(self, batch: Batch) -> DraftBlock:
            drafted_with.extend((seq.seed, batch.noise_aware) for seq in batch.sequences)
            return super().propose(batch)

    answers = [
        request(answer_ids=[3, 4, 5], params=sampled, seed=0),
        request(answer_ids=[3, 4, 5], params=sampled, seed=7),
    ]
    answers.append(request(answer_ids=[3, 4, 5], params=SamplingParams(temperature=1.0, seed=0), seed=0))
    score(tiny_llm(FASTEST), Spy(network(raw_config(), 0)), answers[:2])
    assert set(drafted_with) == {(0, False), (7, True)}
    drafted_with.clear()
    score(tiny_llm(FASTEST), Spy(network(raw_config(), 0)), answers[2:])
    assert set(drafted_with) == {(0, True)}, "a seed of 0 that was asked for is known"


def test_grammars_correct_drafts_as_they_do_when_served() -> None:
    """The drafts that a grammar cuts or corrects are cut and corrected here."""
    llm = fake_llm(Talker(), speculate="full")
    params = SamplingParams(max_tokens=30, grammar=GrammarSpec("regex", "(ab|cd)[a-z]{3,9} end"))
    drafter = ScriptedDrafter(cast(Any, llm.target), accuracy=0.7)
    seq = served(llm, drafter, [(list(b"Go"), params)])[0]
    recorded = request(prompt_ids=list(b"Go"), answer_ids=seq.output_ids, params=params, seed=seq.seed)
    [predicted] = score(llm, ScriptedDrafter(cast(Any, llm.target), accuracy=0.7), [recorded])
    assert [one[:2] for one in predicted.rounds] == [one[:2] for one in seq.rounds]


def test_what_cannot_be_scored_says_so() -> None:
    llm = tiny_llm(FASTEST)
    with pytest.raises(ConfigError, match="tokens that this model does not have"):
        score(llm, dflash(0), [request(answer_ids=[3, 99])])
    assert score(llm, dflash(0), [request(answer_ids=[3] * 400)]) == []  # longer than the cache
    [one] = score(llm, dflash(0), [request(answer_ids=[3])])
    assert one.rounds == ()
    assert one.figures.tokens_per_round == 1.0
    talker = fake_llm(Talker())
    drawn = ScriptedDrafter(cast(Any, talker.target), with_probs=True)
    with pytest.raises(ConfigError, match="depend on those before them"):
        Scorer(talker, drawn).score([request(answer_ids=[97, 98, 99, 100], params=SamplingParams(temperature=1.0))])


def test_the_engine_goes_on_afterwards(tmp_path: Path) -> None:
    llm = tiny_llm(FASTEST)
    params = SamplingParams(max_tokens=12)
    before = llm.generate_ids([[1, 2, 3]], params)[0].token_ids
    score(llm, dflash(0), [request()])
    assert llm.generate_ids([[1, 2, 3]], params)[0].token_ids == before
