"""Which values a setting takes, said at its field; `check` refuses all others.

    max_batch: Count = 8
    max_len: Annotated[int, at_least(2)] | None = None
    rule: Annotated[str, ("auto", "match", "block")] = "auto"           # or Literal["auto", ...]
    shares: tuple[Annotated[float, within("above 0 and at most 1", above=0, most=1)], ...] = (0.5,)

Of a tuple each value must hold; None, which is not given, always does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from paceline.errors import ConfigError, PacelineError, SamplingError


@dataclass(frozen=True, slots=True)
class Must:
    """A limit of a setting: "max_batch must be at least 1, not 0"."""

    be: str
    """What stands behind "must be"."""
    holds: Callable[[Any], bool]


def within(be: str, *, least: float = -math.inf, above: float = -math.inf, most: float = math.inf, finite: bool = True) -> Must:
    """A number of this range, and never NaN."""
    return Must(be, lambda value: least <= value <= most and value > above and (not finite or abs(value) < math.inf))


def at_least(least: float) -> Must:
    return within(f"at least {least:g}" if least else "0 or more", least=least, finite=False)


Count = Annotated[int, at_least(1)]
Whole = Annotated[int, at_least(0)]
Amount = Annotated[float, at_least(0)]
Positive = Annotated[float, within("above 0", above=0, finite=False)]
Rate = Annotated[float, within("above 0", above=0)]
Share = Annotated[float, within("between 0 and 1", least=0, most=1)]


def check(settings: Any, kind: type[PacelineError] = ConfigError) -> None:
    """Raises `kind` naming the first field of a dataclass that is not what its type says it must be."""
    for name, limits in _limits_of(type(settings)).items():
        value = getattr(settings, name)
        for each in value if isinstance(value, tuple) else (value,):
            wrong = next((limit for limit in limits if each is not None and not limit.holds(each)), None)
            if wrong:
                error = kind(f"{name} must be {wrong.be}, not {each!r}")
                if isinstance(error, SamplingError):
                    error.field = name
                raise error


@functools.cache
def _limits_of(owner: type) -> dict[str, list[Must]]:
    hints = get_type_hints(owner, include_extras=True)
    return {name: limits for name, hint in hints.items() if (limits := list(_limits(hint)))}


def _limits(hint: Any) -> Iterator[Must]:
    """Those of a type, and of the types in it."""
    is_choice, parts = get_origin(hint) is Literal, get_args(hint)
    for part in (parts,) if is_choice else parts:
        if isinstance(part, Must):
            yield part
        elif isinstance(part, tuple):
            yield Must(f"one of {', '.join(part)}", part.__contains__)
        else:
            yield from _limits(part)
