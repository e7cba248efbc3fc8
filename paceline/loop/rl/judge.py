"""A relative judge: a model behind an OpenAI endpoint ranks the attempts at one task against each other.

No reward is engineered: to say which of two attempts is better is easier than to say how good one is, and GRPO looks at
differences within a group alone. A judge prefers what stands first, so each group is shown in two orders, shuffled and turned
round; an attempt is worth its mean place, 1.0 for the best of all, 0.0 for the last. Attempts whose texts are the same are
shown once and worth the same. A judge that is down, or whose answer is no ranking, ends the run with its own words: nothing was
learned from a guess.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from paceline.bounds import Count, Positive, check, within
from paceline.errors import DownloadError, RolloutError
from paceline.loop.rl.agents import Trajectory
from paceline.net.retrying import Client, Refused

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
RANKING = re.compile(r"[A-Z](?:\s*[>,]\s*[A-Z])*")
SHOWN_CHARACTERS = 4000
"""Of one attempt."""


@dataclass(frozen=True, slots=True)
class JudgeConfig:
    """Who judges, and by what. Raises ConfigError on impossible values. The key: PACELINE_ELSEWHERE_KEY."""

    url: str
    """Address of an OpenAI endpoint, with or without /v1."""
    model: str
    rubric: str = "The better attempt solves the task; of two that do, the shorter is better."
    """What is better, in a sentence."""
    tries: Count = 2
    """How often it is asked for one ranking before its answer counts as nonsense."""
    patience_minutes: Positive = 2.0
    """How long it may be down."""
    max_tokens: Count = 256
    seed: Annotated[int, within("0 or more", least=0)] = 0

    def __post_init__(self) -> None:
        check(self)


class RelativeJudge:
    """As agents.Reward. Counts how often its two rankings of a pair agree."""

    def __init__(self, config: JudgeConfig, describe: Callable[[Any], str] = str) -> None:
        """`describe` puts a task into words for the judge. Raises ConfigError when the address is none."""
        self.config, self._describe = config, describe
        self._client = Client(config.url, "the judge at", 60 * config.patience_minutes)
        self._random = random.Random(config.seed)
        self.num_pairs = self.num_agreed = 0

    @property
    def agreement(self) -> float:
        """Share of pairs that it ranked alike in both orders: 0.5 is a coin, near 0 a judge that goes by the place alone."""
        return self.num_agreed / self.num_pairs if self.num_pairs else 1.0

    def __call__(self, group: list[Trajectory], /) -> list[float]:
        """Rewards from 0 to 1. Raises RolloutError when the judge is down or its answer is no ranking."""
        texts = ["\n".join(each.texts)[:SHOWN_CHARACTERS] for each in group]
        different = list(dict.fromkeys(texts))
        if len(different) > len(LETTERS):
            raise RolloutError(f"{len(different)} attempts are more than a judge can rank, {len(LETTERS)}: make smaller groups")
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
        """Text -> its place, 0 for the best, of attempts shown in this order."""
        letters = LETTERS[: len(order)]
        shown = "\n\n".join(f"Attempt {letter}:\n{text}" for letter, text in zip(letters, order, strict=True))
        example = " > ".join(letters[::-1])
        asked = (
            f"Task:\n{task}\n\n{shown}\n\nRank the attempts against each other. {self.config.rubric} Answer with one line that "
            f"begins with RANKING: and names every letter once, the best first, as in\nRANKING: {example}"
        )
        said = ""
        for number in range(self.config.tries):
            said = self._ask(asked, number)
            if found := ranking_of(said, letters):
                return {order[letters.index(letter)]: place for place, letter in enumerate(found)}
        raise RolloutError(
            f"the judge {self.config.model!r} at {self.config.url} gives no ranking of {len(order)} attempts, it said "
            f"{said[:200]!r}: take a model that follows instructions, or a reward by code"
        )

    def _ask(self, text: str, number: int) -> str:
        config = self.config
        body = {"model": config.model, "messages": [{"role": "user", "content": text}], "max_tokens": config.max_tokens}
        body |= {"temperature": 0.0 if number == 0 else 0.7, "seed": config.seed + number}
        told: Any = None
        try:
            told = self._client.json("POST", "/v1/chat/completions", body)
        except DownloadError as error:
            raise RolloutError(f"the judge is down: {error}") from error
        except Refused as error:
            raise RolloutError(f"the judge at {config.url} refuses ({error}): correct its model, address or key") from error
        try:
            return str(told["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError) as error:
            raise RolloutError(f"the judge at {config.url} does not speak OpenAI's words: {json.dumps(told)[:200]}") from error


def ranking_of(said: str, letters: str) -> str:
    """The letters in the order of the last ranking in a text; empty when there is none that names each once."""
    for found in reversed(RANKING.findall(said.replace("*", ""))):
        named = "".join(re.findall("[A-Z]", found))
        if sorted(named) == sorted(letters):
            return named
    return ""
