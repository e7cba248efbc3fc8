"""Rollouts: what a policy says, token by token with its log-probabilities, while its weights change between steps.

    load_weights(state_dict) -> caches dropped -> the drafter follows (follow.py) -> sample(prompts) -> samples, figures

Every sample has a seed of its own, drawn from (seed, step, place): with or without drafts, alone or beside others, the same
weights give the same tokens. Log-probabilities come from the pass that checked the drafts, over the temperature: those of the
distribution that each token was drawn from. Nothing else shapes it, no top-p, no penalty: the trainer's gradient is of the
policy as it is.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Protocol

from torch import Tensor

from paceline.bounds import Count, check, within
from paceline.engine.completion import Completion
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, RolloutError, refuse
from paceline.report.statistics import Rounds
from paceline.types import SamplingParams


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """How rollouts are sampled. Raises ConfigError on impossible values."""

    seed: Annotated[int, within("between 0 and 2**32 - 1", least=0, most=2**32 - 1)] = 0
    """The same seed, weights and prompts give the same samples."""
    temperature: Annotated[float, within("above 0", above=0)] = 1.0
    """What logits are divided by. A trainer must divide by the same."""
    max_tokens: Count = 256
    """Longest answer, in tokens; of an agent, of one turn."""
    max_drafted: int | None = None
    """Most drafts a round; 0 samples plainly, None leaves it to the engine."""

    def __post_init__(self) -> None:
        check(self)

    def params(self, seed: int) -> SamplingParams:
        """Those of one answer."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=seed,
            logprobs=0,
            scaled_logprobs=True,
            max_drafted=self.max_drafted,
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of the policy, with which a trainer learns."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """Of each token of the answer, in nats, under the policy that drew it."""
    mask: list[int]
    """1 for tokens that the policy said, 0 for what others put between its turns."""
    finish_reason: str


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one call of `sample`, or one round of attempts, came to."""

    step: int
    num_samples: int
    num_tokens: int
    """Said by the policy."""
    seconds: float
    rounds: Rounds
    load_s: float = 0.0
    """Seconds that new weights took before it."""
    follow_s: float = 0.0
    """And that the drafter took to follow them."""
    more: dict[str, float] = field(default_factory=dict)
    """What the drafter that follows tells of its training, a judge of its rankings."""

    def as_json(self) -> dict[str, Any]:
        told = {name: value for name, value in asdict(self).items() if name not in ("rounds", "more")}
        told |= {"tokens_per_round": self.rounds.tokens_per_round, "num_rounds": self.rounds.num_rounds}
        told |= {"acceptance_rate": self.rounds.acceptance_rate}
        return {**told, "tokens_per_s": self.num_tokens / self.seconds if self.seconds else 0.0, **self.more}


class Follower(Protocol):
    """Keeps a drafter at the policy's side."""

    def learn(self, llm: LLM, samples: Sequence[Sample]) -> dict[str, float]:
        """After new weights were loaded: learn from the latest samples; returns figures. Leaves the drafter's new weights in
        the drafter object, which is bound anew afterwards."""
        ...


class Rollouts:
    """The policy in paceline's engine. One thread at a time may use it; while an `Endpoint` serves it, through that."""

    def __init__(self, llm: LLM, config: RolloutConfig | None = None, *, follower: Follower | None = None) -> None:
        """Raises ConfigError for an engine whose answers are not the policy's own."""
        self.llm, self.config, self.follower = llm, config or RolloutConfig(), follower
        mocked, lossy = llm.config.mocked_as, llm.allow_lossy
        refuse(
            ConfigError,
            (bool(mocked), f"acceptance is mocked ({mocked}): such answers are not the policy's; leave the mock out"),
            (lossy, "lossy rules are allowed in this engine: answers must be the policy's own; leave allow_lossy out"),
        )
        self.step = -1
        """Of the weights now in the engine; -1 before any were loaded: those of the file."""
        self.figures: list[StepFigures] = []
        """Of every call of `sample`, and of every round of attempts, in their order."""
        self._latest: list[Sample] = []
        self._num_calls = 0
        self._spent: dict[str, float] = {}
        self._told: dict[str, float] = {}

    def load_weights(self, state: Mapping[str, Tensor], step: int) -> None:
        """Sample from these weights from now on, by their Hugging Face names. Prefix caches and the drafter's go with the old
        ones; the drafter follows if there is a follower. Raises what `LLM.load_weights` does, and then nothing has changed."""
        began = time.perf_counter()
        self.llm.load_weights(state)
        self._spent = {"load_s": time.perf_counter() - began}
        if self.follower and self._latest:
            began = time.perf_counter()
            self._told = self.follower.learn(self.llm, self._latest)
            self.llm.renew()
            self._spent["follow_s"] = time.perf_counter() - began
        self.step, self._num_calls = step, 0

    def next_place(self) -> str:
        """Names a batch of samples: of which step, and which of that step's."""
        self._num_calls += 1
        return self.place

    @property
    def place(self) -> str:
        """Of the latest batch."""
        return f"{self.step}.{self._num_calls - 1}"

    def sample(self, prompts: Sequence[list[int]], *, num_each: int = 1) -> list[Sample]:
        """`num_each` answers to each prompt of token ids, prompt after prompt. Raises PromptError or ContextLengthError."""
        place, asked = self.next_place(), [prompt for prompt in prompts for _ in range(num_each)]
        params = [self.config.params(seed_of(self.config.seed, place, str(index))) for index in range(len(asked))]
        began = time.perf_counter()
        answers = self.llm.generate_ids(asked, params)
        seconds = time.perf_counter() - began
        samples = [_sample(answer) for answer in answers]
        self.keep(samples, seconds, Rounds.sum(answer.stats for answer in answers))
        return samples

    def keep(self, samples: list[Sample], seconds: float, rounds: Rounds, more: Mapping[str, float] | None = None) -> None:
        """Note what a batch came to, for the figures and for the drafter that follows."""
        self._latest = samples
        num_tokens = sum(sum(each.mask) for each in samples)
        told = {**self._told, **(more or {})}
        self.figures.append(StepFigures(self.step, len(samples), num_tokens, seconds, rounds, **self._spent, more=told))
        self._spent, self._told = {}, {}


def seed_of(seed: int, *places: str) -> int:
    """A seed for one answer, in [0, 2^63): the same for the same places, and no other's."""
    mark = hashlib.blake2b("\0".join((str(seed), *places)).encode(), digest_size=8).digest()
    return int.from_bytes(mark) >> 1


def _sample(answer: Completion) -> Sample:
    told, said = [each.logprob for each in answer.logprobs], answer.token_ids
    if len(told) != len(said) or not said:
        raise RolloutError(f"{len(said)} tokens came with {len(told)} log-probabilities: report this as a defect of paceline")
    return Sample(answer.prompt_token_ids, said, told, [1] * len(said), answer.finish_reason or "")
