"""Relative judge: a model behind an OpenAI endpoint ranks the attempts at one task.

Ranking attempts is easier than scoring them, and GRPO uses only differences within a group. Judges prefer the first
position, so each group is shown in a random order and its reverse; the reward is the mean rank, from 1.0 for the best
to 0.0 for the last. Attempts with equal texts are shown once and get equal rewards. A judge that is down, or that gives
an invalid ranking, ends the run.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from paceline.bounds import Checked, Count, TimeoutMinutes, within
from paceline.errors import DownloadError, RolloutError
from paceline.loop.rl.agents import Trajectory
from paceline.net.retrying import Client, Refused

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
RANKING = re.compile(r"[A-Z](?:\s*[>,]\s*[A-Z])*")
SHOWN_CHARACTERS = 4000
"""Number of characters of an attempt that the judge is shown."""


@dataclass(frozen=True, slots=True)
class JudgeConfig(Checked):
    """Address of the judge, and its criteria. The API key is read from the environment variable PACELINE_REMOTE_KEY.
    Raises ConfigError on impossible values."""

    url: str
    """Address of an OpenAI endpoint, with or without /v1."""
    model: str
    rubric: str = "The better attempt solves the task; of two that do, the shorter is better."
    """Criteria of the judge, as one sentence."""
    tries: Count = 2
    """Maximum number of requests for one valid ranking; after that the run ends."""
    patience_minutes: TimeoutMinutes = 2.0
    """Minutes of retries while the judge is down."""
    max_tokens: Count = 256
    seed: Annotated[int, within("0 or more", least=0)] = 0


class RelativeJudge:
    """Computes the rewards of the attempts at one task from a judge's rankings of them; a `Reward` for `AgentRollouts`.

    The judge ranks the attempts twice, shown in a random order and in the reverse order. An attempt's reward is the
    mean of its two ranks, scaled: 1 if it is the best in both rankings, 0 if it is the last in both.
    """

    def __init__(self, config: JudgeConfig, describe: Callable[[Any], str] = str) -> None:
        """`describe` converts a task to text for the judge. Raises ConfigError on an invalid address."""
        self.config, self._describe = config, describe
        self._client = Client(config.url, "the judge at", 60 * config.patience_minutes)
        self._random = random.Random(config.seed)
        self.num_pairs = self.num_agreed = 0

    @property
    def agreement(self) -> float | None:
        """Share of the pairs of attempts whose order is the same in both rankings. 1: the judge is
        consistent; 0.5: it ranks at random; near 0: it ranks by position only. None before the first ranking."""
        return self.num_agreed / self.num_pairs if self.num_pairs else None

    def __call__(self, group: list[Trajectory], /) -> list[float]:
        """Returns the attempts' rewards, from 0 to 1. Raises RolloutError when the judge is down or gives no valid
        ranking."""
        texts = ["\n".join(each.texts)[:SHOWN_CHARACTERS] for each in group]
        different = list(dict.fromkeys(texts))
        if len(different) > len(LETTERS):
            raise RolloutError(
                f"{len(different)} attempts are more than a judge can rank, {len(LETTERS)}: make smaller groups"
            )
        if len(different) < 2:
            return [0.5] * len(group)
        order = different.copy()
        self._random.shuffle(order)
        task = self._describe(group[0].task)
        first, second = self._ranked(task, order), self._ranked(task, order[::-1])
        for one, other in itertools.combinations(different, 2):
            self.num_pairs += 1
            self.num_agreed += (first[one] < first[other]) == (second[one] < second[other])
        last = len(different) - 1
        return [1.0 - (first[text] + second[text]) / (2 * last) for text in texts]

    def _ranked(self, task: str, order: list[str]) -> dict[str, int]:
        """Returns text -> rank, 0 for the best, for attempts shown in this order."""
        letters = LETTERS[: len(order)]
        shown = "\n\n".join(f"Attempt {letter}:\n{text}" for letter, text in zip(letters, order, strict=True))
        example = " > ".join(letters[::-1])
        prompt = (
            f"Task:\n{task}\n\n{shown}\n\nRank the attempts against each other. {self.config.rubric} Answer with one "
            "line that "
            f"begins with RANKING: and names every letter once, the best first, as in\nRANKING: {example}"
        )
        answer = ""
        for number in range(self.config.tries):
            answer = self._ask(prompt, number)
            if ranking := ranking_of(answer, letters):
                return {order[letters.index(letter)]: rank for rank, letter in enumerate(ranking)}
        raise RolloutError(
            f"the judge {self.config.model!r} at {self.config.url} gives no ranking of {len(order)} attempts, it said "
            f"{answer[:200]!r}: take a model that follows instructions, or a reward by code"
        )

    def _ask(self, text: str, number: int) -> str:
        config = self.config
        body = {"model": config.model, "messages": [{"role": "user", "content": text}], "max_tokens": config.max_tokens}
        body |= {"temperature": 0.0 if number == 0 else 0.7, "seed": config.seed + number}
        try:
            answer = self._client.json("POST", "/v1/chat/completions", body)
        except DownloadError as error:
            raise RolloutError(f"the judge is down: {error}") from error
        except Refused as error:
            raise RolloutError(
                f"the judge at {config.url} refuses ({error}): correct its model, address or key"
            ) from error
        try:
            return str(answer["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError) as error:
            raise RolloutError(
                f"the judge at {config.url} does not speak OpenAI's words: {json.dumps(answer)[:200]}"
            ) from error


def ranking_of(text: str, letters: str) -> str:
    """Finds the ranking in a judge's answer `text`; returns the letters of the attempts, best first. A valid ranking
    names each of `letters` once. Returns "" without a valid ranking.

    Of several valid rankings, returns the last one. But rankings that follow the word RANKING, on its line or the next,
    take precedence.
    """
    text = text.replace("*", "")
    marked = re.findall(r"^\W*RANKING\b\W*.*", text, re.MULTILINE | re.IGNORECASE)
    for match in reversed([*RANKING.findall(text), *RANKING.findall("\n".join(marked))]):
        ranking = "".join(re.findall("[A-Z]", match))
        if sorted(ranking) == sorted(letters):
            return ranking
    return ""
