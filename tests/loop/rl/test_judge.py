"""The relative judge: what its rankings are worth, whatever it prefers by place, and a clear end where it gives
none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from loopback import Handler, answering

from paceline.errors import ConfigError, RolloutError
from paceline.loop.rl.agents import Trajectory
from paceline.loop.rl.judge import JudgeConfig, RelativeJudge, ranking_of
from paceline.loop.rl.rollouts import Sample
from paceline.report.statistics import Rounds


def attempts(*texts: str) -> list[Trajectory]:
    sample = Sample([1], [2], [-1.0], [1], "stop")
    return [Trajectory({"goal": "tea"}, None, sample, (text,), Rounds(), 1, 0) for text in texts]


@contextmanager
def judging(say: Callable[[str], Any]) -> Iterator[str]:
    """The address of a server whose model says `say(prompt)`; a number is a status."""

    class Asked(Handler):
        def do_POST(self) -> None:
            reply = say(self.body()["messages"][0]["content"])
            body = (
                {"choices": [{"message": {"content": reply}}]}
                if isinstance(reply, str)
                else {"error": {"message": "no"}}
            )
            status = reply if isinstance(reply, int) else 200
            self.answer(status, json.dumps(reply if isinstance(reply, dict) else body).encode())

    with answering(Asked) as url:
        yield f"{url}/v1"


def shown(prompt: str) -> dict[str, str]:
    return dict(re.findall(r"Attempt ([A-Z]):\n(\w+)", prompt))


def by_length(prompt: str) -> str:
    seen = shown(prompt)
    return "Let me see.\nRANKING: " + " > ".join(sorted(seen, key=lambda letter: -len(seen[letter])))


def judge_at(url: str, **changes: Any) -> RelativeJudge:
    return RelativeJudge(
        JudgeConfig(url, "judge", **({"patience_minutes": 0.001} | changes)), describe=lambda task: task["goal"]
    )


def test_places_become_rewards() -> None:
    with judging(by_length) as url:
        judge = judge_at(url)
        assert judge(attempts("bb", "a", "dddd", "ccc")) == pytest.approx([1 / 3, 0.0, 1.0, 2 / 3])
        assert judge.agreement == 1.0


def test_the_same_text_is_worth_the_same() -> None:
    with judging(by_length) as url:
        judge = judge_at(url)
        assert judge(attempts("bb", "bb")) == [0.5, 0.5]
        assert judge.agreement is None, "nothing was ranked: it was 1.0, as of a consistent judge"
        assert judge(attempts("bb", "a", "bb")) == [1.0, 0.0, 1.0]


def test_a_judge_that_goes_by_the_place_teaches_nothing() -> None:
    with judging(lambda prompt: "RANKING: " + " > ".join(sorted(shown(prompt)))) as url:
        judge = judge_at(url)
        assert judge(attempts("bb", "a", "dddd")) == [0.5, 0.5, 0.5]
        assert judge.agreement == 0.0


def test_the_task_is_told_and_the_order_is_shuffled() -> None:
    seen: list[str] = []
    with judging(lambda prompt: seen.append(prompt) or by_length(prompt)) as url:
        judge = judge_at(url)
        for _ in range(6):
            judge(attempts("a", "bb", "ccc"))
    assert all("Task:\ntea\n" in prompt for prompt in seen)
    orders = [list(shown(prompt).values()) for prompt in seen]
    assert all(one == other[::-1] for one, other in zip(orders[::2], orders[1::2], strict=True))
    assert len({tuple(order) for order in orders}) > 2


@pytest.mark.parametrize("reply", ["I like them all.", "RANKING: A", "RANKING: A > A", "RANKING: A > B > C", ""])
def test_nonsense_ends_it(reply: str) -> None:
    with judging(lambda prompt: reply) as url, pytest.raises(RolloutError, match="gives no ranking of 2 attempts"):
        judge_at(url)(attempts("a", "b"))


def test_one_slip_is_asked_again() -> None:
    answers = iter(["well...", "RANKING: A > B", "RANKING: B > A"])
    with judging(lambda prompt: next(answers)) as url:
        assert sorted(judge_at(url)(attempts("a", "b"))) == [0.0, 1.0]


@pytest.mark.slow
def test_a_judge_that_is_down_or_refuses() -> None:
    with judging(lambda prompt: 404) as url, pytest.raises(RolloutError, match="refuses"):
        judge_at(url)(attempts("a", "b"))
    with pytest.raises(RolloutError, match="is down"):
        judge_at(url)(attempts("a", "b"))
    with judging(lambda prompt: 503) as url, pytest.raises(RolloutError, match="is down"):
        judge_at(url)(attempts("a", "b"))
    with judging(lambda prompt: {"answer": 1}) as url, pytest.raises(RolloutError, match="does not speak"):
        judge_at(url)(attempts("a", "b"))
    with pytest.raises(ConfigError, match="no address"):
        judge_at("judge.example")


def test_rankings_are_read_out_of_talk() -> None:
    assert ranking_of("I first thought A > B, but:\n**RANKING: B > A**", "AB") == "BA"
    assert ranking_of("ranking: C, A, B", "ABC") == "CAB"
    assert ranking_of("A and B are equal", "AB") == ""
    why = "RANKING: C > A > B\n\nAll three attempts (A, B, C) are fluent, but only C is right."
    assert ranking_of(why, "ABC") == "CAB" and ranking_of("RANKING:\nB > A", "AB") == "BA"
    assert ranking_of(why.replace(": ", ":\n\n", 1), "ABC") == "CAB"
