"""How a request wants its tokens chosen, and what is reported of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.bounds import Count, Must, Share, check, within
from paceline.errors import SamplingError
from paceline.lossy import Lossy

GrammarKind = Literal["json_object", "json_schema", "regex"]
Finite = Annotated[float, within("a finite number")]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer has to be: any JSON object, JSON of the schema `text`, or the regex `text` from end to end."""

    kind: GrammarKind
    text: str = ""


def _are_biases(bias: dict[int, float]) -> bool:
    return all(value < math.inf for value in bias.values())  # and so no NaN


def _is_word(word: str) -> bool:
    return bool(word.strip(" "))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Raises SamplingError on impossible values."""

    temperature: Annotated[float, within("0 (greedy) or more", least=0)] = 0.0
    """0 is greedy: always the most likely token."""
    top_k: Annotated[int, within("0 (off) or more", least=0)] = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, within("above 0 and at most 1", above=0, most=1)] = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches top_p."""
    min_p: Share = 0.0
    """Keep tokens at least min_p times as likely as the most likely one."""
    repetition_penalty: Annotated[float, within("above 0 (1 is off)", above=0)] = 1.0
    """Divide positive (multiply negative) logits of tokens already in prompt or answer."""
    presence_penalty: Finite = 0.0
    """Subtract once from the logit of each token already in the answer."""
    frequency_penalty: Finite = 0.0
    """Subtract for each time the token already stands in the answer."""
    logit_bias: Annotated[dict[int, float], Must("numbers or -inf", _are_biases)] | None = None
    """Added to the logits of these token ids; -inf forbids a token."""
    seed: Annotated[int, within("between 0 and 2**63 - 1", least=0, most=2**63 - 1)] | None = None
    """The same seed gives the same text, alone or in a batch; without, one is drawn."""
    max_tokens: Count = 128
    """Longest answer, in tokens."""
    stop: tuple[Annotated[str, Must("no empty string", bool)], ...] = ()
    """Strings that end the answer; the text stops before the first one found."""
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    ignore_eos: bool = False
    """Go on to `max_tokens` whatever the model says."""
    logprobs: Annotated[int, within("between 0 and 100", least=0, most=100)] | None = None
    """Report the chosen token's log-probability and this many alternatives, from the target's unmodified logits."""
    scaled_logprobs: bool = False
    """Report them of the logits over the temperature instead, as a sampled token was drawn: what a policy's gradient needs."""
    max_drafted: Annotated[int, within("0 (plain decoding) or more", least=0)] | None = None
    """Most drafts per round; 0 decodes plainly, None leaves it to the engine."""
    prompt_logprobs: Annotated[int, within("between 0 and 100", least=0, most=100)] | None = None
    """Report those of the prompt's tokens too, with this many alternatives; the prompt is then read whole."""
    min_tokens: Annotated[int, within("0 or more", least=0)] = 0
    """End tokens cannot come before so many tokens, and stop strings are looked for behind them."""
    bad_words: tuple[Annotated[str, Must("no empty string and not only spaces", _is_word)], ...] = ()
    """Words that the answer may not hold, in the tokens that encode them at the beginning of a text or after a space."""
    grammar: GrammarSpec | None = None
    """Only tokens that lead to such an answer can be chosen; the model's end token ends it, also with ignore_eos."""
    lossy: Lossy | None = None
    """Let drafts stand that the target alone would refuse: NOT lossless. Its text, "typical:eps=0.09,delta=0.3", will do."""

    def __post_init__(self) -> None:
        if self.lossy is not None:
            object.__setattr__(self, "lossy", Lossy.of(self.lossy))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "bad_words", (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words))
        check(self, SamplingError)
        if self.min_tokens > self.max_tokens:
            message = f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            raise SamplingError(message, "min_tokens")
        if self.lossy and (self.min_tokens or self.bad_words):
            raise SamplingError("lossy does not go with min_tokens or bad_words: leave one of them out", "lossy")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def logprob_temperature(self) -> float:
        return self.temperature if self.scaled_logprobs and not self.is_greedy else 1.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a chosen token under the target, and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
