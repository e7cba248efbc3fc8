"""Sampling parameters of a request, and log-probabilities of tokens."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal

from paceline.bounds import Count, Must, Share, check_all, within
from paceline.errors import SamplingError, shown
from paceline.lossy import Lossy

GrammarKind = Literal["json_object", "json_schema", "regex"]
LARGEST = 1e9
"""Largest temperature, bias and penalty: logits with all of them, divided by a low temperature, fit in float32."""
_PLAIN = frozenset((int, float, bool, str, NoneType))
SURROGATE = re.compile("[\ud800-\udfff]")
_UNICODE = "valid Unicode, without lone surrogates"
Text = Annotated[str, Must(_UNICODE, lambda text: not SURROGATE.search(text))]
Word = Annotated[Text, Must("no empty string and not only spaces", lambda word: word.strip(" "))]
Bias = Annotated[
    dict[int, float],
    Must(
        "numbers up to 1e9, or -inf",
        lambda bias: all(-sys.float_info.max <= b <= LARGEST or b == -math.inf for b in bias.values()),
    ),
]
Penalty = Annotated[float, within("between -1e9 and 1e9", least=-LARGEST, most=LARGEST)]


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar that the answer must follow. `kind`: "json_object" (any JSON object), "json_schema" (JSON that follows
    the schema `text`) or "regex" (the whole answer matches `text`)."""

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise SamplingError(
                f"grammar: text must be of type str, not {shown(self.text)}: give a schema as JSON text"
            )


def _plain(value: Any) -> Any:
    """Returns an array, a tensor, or a number of one as Python's list or number."""
    return value.tolist() if type(value) not in _PLAIN and hasattr(value, "tolist") else value


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. Raises SamplingError on invalid values."""

    temperature: Annotated[float, within("between 0 (greedy) and 1e9", least=0, most=LARGEST)] = 0.0
    """0 is greedy: always the most likely token."""
    top_k: Annotated[int, within("0 (off) or more", least=0)] = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, within("above 0 and at most 1", above=0, most=1)] = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches top_p."""
    min_p: Share = 0.0
    """Keep tokens at least min_p times as likely as the most likely one."""
    repetition_penalty: Annotated[float, within("between 1e-9 and 1e9", least=1 / LARGEST, most=LARGEST)] = 1.0
    """Divide positive (multiply negative) logits of tokens already in prompt or answer."""
    presence_penalty: Penalty = 0.0
    """Subtract once from the logit of each token already in the answer."""
    frequency_penalty: Penalty = 0.0
    """Subtract from a token's logit once for each of its occurrences in the answer."""
    logit_bias: Bias | None = None
    """Added to the logits of these token ids; -inf forbids a token."""
    seed: Annotated[int, within("between 0 and 2**63 - 1", least=0, most=2**63 - 1)] | None = None
    """The same seed gives the same text, alone or in a batch; without it, a random seed is used."""
    max_tokens: Count = 128
    """Longest answer, in tokens."""
    stop: tuple[Annotated[Text, Must("no empty string", bool)], ...] = ()
    """Strings that end the answer; the text stops before the first one found."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer. The end token is the last of the answer's token ids, but not part of its text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    ignore_eos: bool = False
    """Continue to `max_tokens` after the model's end token."""
    logprobs: Annotated[int, within("between 0 and 100", least=0, most=100)] | None = None
    """Report the chosen token's log-probability and this many alternatives, from the target's unmodified logits."""
    scaled_logprobs: bool = False
    """Compute log-probabilities after dividing the logits by the temperature, as policy gradients need."""
    max_drafted: Annotated[int, within("0 (plain decoding) or more", least=0)] | None = None
    """Most drafts per round; 0 decodes plainly, None leaves it to the engine."""
    prompt_logprobs: Annotated[int, within("between 0 and 100", least=0, most=100)] | None = None
    """Also report log-probabilities of the prompt's tokens, with this many alternatives; disables prefix reuse."""
    min_tokens: Annotated[int, within("0 or more", least=0)] = 0
    """Shortest answer, in tokens: end tokens and stop strings before it are ignored."""
    bad_words: tuple[Word, ...] = ()
    """Forbidden words, as the tokens that encode them at the beginning of a text or after a space."""
    grammar: GrammarSpec | None = None
    """Grammar that the answer must follow; the model's end token ends it even with `ignore_eos`."""
    prediction: str | tuple[int, ...] = ()
    """The expected answer, as text or token ids: drafts come from it as well. It does not change the answer."""
    lossy: Lossy | None = None
    """Rule that accepts drafts which the target would reject: NOT lossless. Also accepts text:
    "typical:eps=0.09,delta=0.3"."""

    def __post_init__(self) -> None:
        if isinstance(self.lossy, str):
            object.__setattr__(self, "lossy", Lossy.of(self.lossy))
        for name in self.__dataclass_fields__:  # lists, tensors and single texts become tuples
            value = _plain(getattr(self, name))
            if isinstance(value, str) and name in ("stop", "bad_words"):
                value = (value,)
            elif isinstance(value, Iterable) and name in ("stop", "bad_words", "stop_token_ids", "prediction"):
                is_plain = isinstance(value, str) or (type(value) is tuple and _PLAIN.issuperset(map(type, value)))
                value = value if is_plain else tuple(map(_plain, value))
            object.__setattr__(self, name, value)
        check_all(self, SamplingError)
        if isinstance(self.prediction, str) and SURROGATE.search(self.prediction):
            raise SamplingError(f"prediction must be {_UNICODE}, not {shown(self.prediction)}", "prediction")
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
    """Log-probability (natural logarithm) of one token under the target."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most probable tokens at this position, best first."""
