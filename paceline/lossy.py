"""Parses lossy verification rules and records their cost. Imports no PyTorch; `verify/lossy.py` applies the rules.

    Lossy.of("typical:eps=0.09,delta=0.3")
    Lossy.of("lenience:0.5,max_tv=0.02")                # the rule's first value needs no name
    Lossy.of({"rule": "relaxed", "n": 5, "delta": 0.3})

The total variation (TV) of one token is half the sum of |output(x) - target(x)| over the vocabulary, where `output` is
the distribution the token was sampled from: the largest change of any event's probability. The cost of a rule is its
mean TV over the tokens of an answer, which `max_tv` limits.
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
    """Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1). Accepts a draft whose target probability is above
    `eps`, or above `delta` * exp(-H), with the entropy H of the target's distribution. The lossless rule decides on all
    other drafts."""

    eps: Annotated[float, _PART] = 0.09
    """Accepts a draft whose target probability is above this value."""
    delta: Positive = 0.3
    """Accepts a draft whose target probability is above delta * exp(-entropy of the target's distribution)."""


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Relaxed acceptance (TensorRT-LLM). Accepts a draft among the target's `n` most probable tokens whose probability
    is less than `delta` below the top one. The lossless rule decides on all other drafts."""

    n: Count = 10
    """The draft must be one of the target's top n tokens."""
    delta: Share = 0.6
    """The draft's target probability must be less than this below that of the top token; 0 is lossless."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """SGLang's two acceptance thresholds. Accepts a draft whose target probability is at least `single`. The lossless
    acceptance probability of all other drafts is divided by `acc`. With both at 1 the rule is lossless."""

    single: Annotated[float, _PART] = 1.0
    """Accepts a draft with at least this target probability."""
    acc: Annotated[float, _PART] = 1.0
    """Divides the acceptance probability of all other drafts."""


@dataclass(frozen=True, slots=True)
class Lenience:
    """Rejection sampling that accepts more drafts: in the acceptance test, the drafter's probability of a draft is
    multiplied by `l`, which is at most 1 (Leviathan et al., arXiv 2211.17192, appendix A.5)."""

    l: Annotated[float, _PART] = 1.0  # noqa: E741  # the paper's letter
    """Factor of the draft's probability in the acceptance test; 1 is lossless."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Samples from a mixture of the target's and the drafter's distributions, `lam` * target + (1 - `lam`) * drafter
    (speculative cascades, arXiv 2405.19261)."""

    lam: Share = 1.0
    """Weight of the target; 1 is lossless."""


Rule = Typical | Relaxed | Threshold | Lenience | Mixture
RULES: dict[str, type[Rule]] = {
    "typical": Typical,
    "relaxed": Relaxed,
    "threshold": Threshold,
    "lenience": Lenience,
    "mixture": Mixture,
}
LOSSY = "lossy"
"""Replaces the drafter's name in statistics of lossy rounds, because their acceptance does not measure the drafter."""
_NAMES = {kind: name for name, kind in RULES.items()}
NOT_ALLOWED = (
    "lossy rules change what the model says and are off here: leave lossy out, or let the owner set allow_lossy"
)
_SHAPE = 'write it as "typical:eps=0.09,delta=0.3" or {"rule": "typical", "eps": 0.09, "delta": 0.3}'


@dataclass(frozen=True, slots=True)
class Lossy:
    """A lossy verification rule with its parameters, and with a limit `max_tv` for the answer's deviation from the
    target's distribution."""

    rule: Rule
    max_tv: Share | None = None
    """Upper limit of the answer's mean total variation, kept after every token; None for no limit."""

    def __post_init__(self) -> None:
        check(self.rule, SamplingError)
        check(self, SamplingError)

    @classmethod
    def of(cls, given: str | Mapping[str, Any] | Lossy) -> Lossy:
        """Parse a rule from text, such as "lenience:0.5,max_tv=0.02", or from a mapping with the rule's name under
        "rule". Raises SamplingError for an unknown rule or parameter, or an invalid value."""
        if isinstance(given, Lossy):
            return given
        values = _read(given) if isinstance(given, str) else dict(given)
        name = values.pop("rule", None)
        if not isinstance(name, str) or name not in RULES:
            raise SamplingError(f"lossy rule {name!r:.40} is not known: choose from {', '.join(RULES)}; {_SHAPE}")
        kind = RULES[name]
        known = [field.name for field in fields(kind)]
        if "" in values:
            values = {known[0]: values.pop("")} | values
        for key, value in values.items():
            if key not in (*known, "max_tv"):
                raise SamplingError(
                    f"lossy rule {name} has no value {key!r:.40}: it has {', '.join((*known, 'max_tv'))}"
                )
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise SamplingError(f"{key} of lossy rule {name} must be a number, not {value!r:.40}")
        max_tv = values.pop("max_tv", None)
        if isinstance(n := values.get("n"), float):
            if not n.is_integer():
                raise SamplingError(f"n of lossy rule {name} must be a whole number, not {n!r}")
            values["n"] = int(n)
        return cls(kind(**values), max_tv)

    def within(self, max_tv: float | None) -> Lossy:
        """Return the rule with the smaller of two limits of deviation: its own and `max_tv`. None means no limit."""
        budgets = [budget for budget in (self.max_tv, max_tv) if budget is not None]
        return replace(self, max_tv=min(budgets, default=None))

    @property
    def name(self) -> str:
        return _NAMES[type(self.rule)]

    def __str__(self) -> str:
        values = {field.name: getattr(self.rule, field.name) for field in fields(self.rule)}
        if self.max_tv is not None:
            values["max_tv"] = self.max_tv
        return f"{self.name}:" + ",".join(f"{key}={value:g}" for key, value in values.items())


def _read(text: str) -> dict[str, Any]:
    """Return the values by name; an unnamed first value has the key "". Raises SamplingError."""
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
    """Deviation from the target's distribution, summed over the tokens generated so far."""

    tv: float = 0.0
    """Total variation, between 0 and 1 for each token."""
    kl: float = 0.0
    """KL divergence, in nats."""
    num_changed: int = 0
    """Number of tokens that differ from those of the lossless rule with the same random numbers."""


@dataclass(slots=True)
class Ledger:
    """Records, token by token, how far the distribution of one answer deviates from the target's. It can keep the mean
    total variation per token within the limit `max_tv`, at any length of the answer. For this, the caller asks `holds`
    before each token whether the lossy rule may be used; if not, it uses the lossless rule."""

    max_tv: float | None = None
    sums: list[Spent] = field(default_factory=list)
    """Cumulative sums after each token."""

    @property
    def spent(self) -> Spent:
        return self.sums[-1] if self.sums else Spent()

    @property
    def mean_tv(self) -> float:
        return self.spent.tv / len(self.sums) if self.sums else 0.0

    def holds(self, tv: float) -> bool:
        """Return True if the lossy rule may be used for the next token: with the token's total variation `tv` (0 to 1)
        added, the mean stays within `max_tv`."""
        return self.max_tv is None or (self.spent.tv + tv) / (len(self.sums) + 1) <= self.max_tv

    def add(self, tv: float = 0.0, kl: float = 0.0, is_changed: bool = False) -> None:
        """Record one more token. `tv`: total variation (0 to 1) and `kl`: KL divergence (nats) between the distribution
        it was sampled from and the target's. `is_changed`: True if the lossless rule would have given another token."""
        before = self.spent
        self.sums.append(Spent(before.tv + tv, before.kl + kl, before.num_changed + is_changed))

    def keep(self, num_tokens: int) -> None:
        """Drop the records of tokens that were removed from the answer: all after the first `num_tokens`."""
        del self.sums[num_tokens:]

    def price(self, rule: str) -> Price:
        """Return the answer's deviation so far, as means per token. `rule`: the lossy rule as text; only stored in the
        result."""
        count, spent = max(len(self.sums), 1), self.spent
        return Price(rule, self.max_tv, spent.tv / count, spent.kl / count, spent.num_changed / count)


@dataclass(frozen=True, slots=True)
class Price:
    """Mean deviation of one answer's tokens from the target's distribution, caused by a lossy rule. Each token of a
    greedy answer is compared with the target's top token: an equal one counts as 0; another one as total variation 1
    and as KL divergence log(p(top token) / p(token)), with the target's probabilities p."""

    rule: str
    max_tv: float | None
    mean_tv: float
    mean_kl: float
    """Mean KL divergence, in nats."""
    share_changed: float
    """Share of tokens that differ from the lossless rule's token with the same random numbers."""
