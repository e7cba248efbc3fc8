"""Lossy rules as they are asked for, and what they have cost so far. No PyTorch; `verify/lossy.py` has what each one says.

    Lossy.of("typical:eps=0.09,delta=0.3")
    Lossy.of("lenience:0.5,max_tv=0.02")                # the rule's first value needs no name
    Lossy.of({"rule": "relaxed", "n": 5, "delta": 0.3})

Total variation (TV) of one token is half the sum of |said(x) - target(x)| over the vocabulary: the largest change of the
probability of anything. Its mean over the tokens of an answer is what a rule is priced by, and what a budget (`max_tv`) limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, NamedTuple

from paceline.bounds import Count, Positive, Share, check, within
from paceline.errors import SamplingError

_PART = within("above 0 and at most 1", above=0, most=1)


@dataclass(frozen=True, slots=True)
class Typical:
    """Typical acceptance (Medusa, 2401.10774, section 2.3.1)."""

    eps: Annotated[float, _PART] = 0.09
    """A draft of a larger probability than this always stands."""
    delta: Positive = 0.3
    """So does one of a larger probability than delta * exp(-entropy of the target)."""


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Relaxed acceptance (TensorRT-LLM): near the target's best."""

    n: Count = 10
    """A draft may be one of the target's n likeliest tokens."""
    delta: Share = 0.6
    """And less than this below the likeliest one's probability; 0 is lossless."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """SGLang's two thresholds; 1 and 1 are lossless."""

    single: Annotated[float, _PART] = 1.0
    """A draft of at least this probability always stands."""
    acc: Annotated[float, _PART] = 1.0
    """The chance of the others is divided by this."""


@dataclass(frozen=True, slots=True)
class Lenience:
    """Lenience (Leviathan et al. 2211.17192, appendix A.5)."""

    l: Annotated[float, _PART] = 1.0  # noqa: E741  # the paper's letter
    """The draft's probability counts so much; 1 is lossless."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of target and drafter (speculative cascades, 2405.19261)."""

    lam: Share = 1.0
    """The target's part; 1 is lossless."""


Rule = Typical | Relaxed | Threshold | Lenience | Mixture
RULES: dict[str, type[Rule]] = {
    "typical": Typical,
    "relaxed": Relaxed,
    "threshold": Threshold,
    "lenience": Lenience,
    "mixture": Mixture,
}
LOSSY = "lossy"
"""In place of a drafter's name where rounds are counted: what stands by a lossy rule says nothing of a drafter."""
_NAMES = {kind: name for name, kind in RULES.items()}
NOT_ALLOWED = "lossy rules change what the model says and are off here: leave lossy out, or let the owner set allow_lossy"
_SHAPE = 'write it as "typical:eps=0.09,delta=0.3" or {"rule": "typical", "eps": 0.09, "delta": 0.3}'


@dataclass(frozen=True, slots=True)
class Lossy:
    """A lossy rule with its values, and the budget it has to keep to."""

    rule: Rule
    max_tv: Share | None = None
    """Most mean total variation of an answer, at each of its tokens; None: no limit."""

    def __post_init__(self) -> None:
        check(self.rule, SamplingError)
        check(self, SamplingError)

    @classmethod
    def of(cls, given: str | Mapping[str, Any] | Lossy) -> Lossy:
        """From its text or object, as above. Raises SamplingError, which says what there is."""
        if isinstance(given, Lossy):
            return given
        values = _read(given) if isinstance(given, str) else dict(given)
        name = values.pop("rule", None)
        if not isinstance(name, str) or name not in RULES:
            raise SamplingError(f"lossy rule {name!r:.40} is not known: choose from {', '.join(RULES)}; {_SHAPE}")
        kind = RULES[name]
        known = [each.name for each in fields(kind)]
        if "" in values:
            values = {known[0]: values.pop("")} | values
        for key, value in values.items():
            if key not in (*known, "max_tv"):
                raise SamplingError(f"lossy rule {name} has no value {key!r:.40}: it has {', '.join((*known, 'max_tv'))}")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise SamplingError(f"{key} of lossy rule {name} must be a number, not {value!r:.40}")
        max_tv = values.pop("max_tv", None)
        if isinstance(n := values.get("n"), float):
            if not n.is_integer():
                raise SamplingError(f"n of lossy rule {name} must be a whole number, not {n!r}")
            values["n"] = int(n)
        return cls(kind(**values), max_tv)

    def within(self, max_tv: float | None) -> Lossy:
        """With the smaller of its own budget and this one."""
        known = [each for each in (self.max_tv, max_tv) if each is not None]
        return replace(self, max_tv=min(known, default=None))

    @property
    def name(self) -> str:
        return _NAMES[type(self.rule)]

    def __str__(self) -> str:
        values = {each.name: getattr(self.rule, each.name) for each in fields(self.rule)}
        if self.max_tv is not None:
            values["max_tv"] = self.max_tv
        return f"{self.name}:" + ",".join(f"{key}={value:g}" for key, value in values.items())


def _read(text: str) -> dict[str, Any]:
    """Values by their names, "" of the first if it has none. Raises SamplingError."""
    name, _, rest = text.strip().partition(":")
    values: dict[str, Any] = {"rule": name.strip()}
    for place, part in enumerate(rest.split(",") if rest.strip() else ()):
        key, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals and place == 0:
            key, number = "", key
        if key in values:
            raise SamplingError(f"lossy {text!r:.80} names {key!r} twice: leave one out")
        try:
            values[key] = float(number)
        except ValueError:
            raise SamplingError(f"lossy {text!r:.80} cannot be read at {part!r:.40}: {_SHAPE}") from None
    return values


class Spent(NamedTuple):
    """Sums over the tokens said so far."""

    tv: float = 0.0
    kl: float = 0.0
    num_changed: int = 0


@dataclass(slots=True)
class Ledger:
    """What the tokens of one answer have cost, each counted by the distribution it was said from.

    With a budget the mean total variation is never above `max_tv`, at no token: a lossy step is taken only when `holds` says
    that the mean will not be. Any first part of the answer keeps to it too, so that an answer may end anywhere.
    """

    max_tv: float | None = None
    sums: list[Spent] = field(default_factory=list)
    """After each token."""

    @property
    def spent(self) -> Spent:
        return self.sums[-1] if self.sums else Spent()

    @property
    def mean_tv(self) -> float:
        return self.spent.tv / len(self.sums) if self.sums else 0.0

    def holds(self, tv: float) -> bool:
        """Whether the next token may be said from a distribution this far from the target's."""
        return self.max_tv is None or (self.spent.tv + tv) / (len(self.sums) + 1) <= self.max_tv

    def add(self, tv: float = 0.0, kl: float = 0.0, is_changed: bool = False) -> None:
        """One more token, and what its distribution cost."""
        before = self.spent
        self.sums.append(Spent(before.tv + tv, before.kl + kl, before.num_changed + is_changed))

    def keep(self, num_tokens: int) -> None:
        """Forget the tokens behind the first ones: they were not said."""
        del self.sums[num_tokens:]

    def price(self, rule: str) -> Price:
        count, spent = max(len(self.sums), 1), self.spent
        return Price(rule, self.max_tv, spent.tv / count, spent.kl / count, spent.num_changed / count)


@dataclass(frozen=True, slots=True)
class Price:
    """What a lossy rule cost one answer, means over its tokens. Greedy requests: see `verify/lossy.py` for what they count."""

    rule: str
    max_tv: float | None
    mean_tv: float
    mean_kl: float
    """Nats."""
    share_changed: float
    """Tokens that are not the ones which the lossless rule would have said there, with the same random numbers."""
