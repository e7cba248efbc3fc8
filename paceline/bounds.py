"""Declares the valid values of a setting in its type annotation; `check` rejects all others.

    max_batch: Count = 8
    max_len: Annotated[int, at_least(2)] | None = None
    rule: Annotated[str, ("auto", "match", "block")] = "auto"           # or Literal["auto", ...]
    shares: tuple[Annotated[float, within("above 0 and at most 1", above=0, most=1)], ...] = (0.5,)

In a tuple every value is checked; None is valid where the annotation has it. Integers must fit in 64 bits, also
without a limit of their own. A dataclass derived from `Checked` checks its fields itself.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.errors import ConfigError, PacelineError, SamplingError, shown

MAX_LAYERS = 4096
"""Most layers of a model whose config is read, to run it or to predict its speed."""
MAX_STREAMS, MAX_CONTEXT = 65_536, 2**24
"""Most requests that decode together, and most tokens of one, of an engine and of a prediction."""
MAX_DRAFTED = MAX_THREADS = 1024
"""Most tokens drafted per round, and most CPU threads."""


@dataclass(frozen=True, slots=True)
class Must:
    """A limit on a setting's value, written in its type annotation; errors name it, as in "max_batch must be at least
    1"."""

    be: str
    """Text after "must be" in the error message."""
    holds: Callable[[Any], bool]
    """Returns True for a valid value."""


def within(
    be: str, *, least: float = -math.inf, above: float = -math.inf, most: float = math.inf, finite: bool = True
) -> Must:
    """Return a limit for numbers: at least `least`, greater than `above`, at most `most`. NaN is never valid; infinity
    is valid only if `finite` is False. `be`: the limit in words for the error message, which continues "must be", such
    as "at least 1"."""
    return Must(be, lambda value: least <= value <= most and value > above and (not finite or abs(value) < math.inf))


def at_least(least: float) -> Must:
    """Return a limit: a number of at least `least`; infinity is valid."""
    return within(f"at least {least:g}" if least else "0 or more", least=least, finite=False)


def at_most(most: int) -> Must:
    """Return a limit: a number of at most `most`."""
    return Must(f"at most {most}", lambda value: value <= most)


_NUMBERS = {
    int: Must("a 64-bit integer", lambda value: not isinstance(value, int) or -(2**63) <= value < 2**63),
    float: Must("a number below 1e308", lambda value: not isinstance(value, int) or abs(value) < 1e308),
}
"""Limits of all numbers by type: larger Python integers overflow in PyTorch and C, or in a conversion to float."""

MAX_TIMEOUT_S = 1_000_000
"""Longest timeout, in seconds: sockets and `poll` count milliseconds in 32 bits."""

Count = Annotated[int, at_least(1)]
Whole = Annotated[int, at_least(0)]
Depth = Annotated[Count, at_most(MAX_LAYERS)]
Streams = Annotated[Count, at_most(MAX_STREAMS)]
Context = Annotated[Count, at_most(MAX_CONTEXT)]
Amount = Annotated[float, at_least(0)]
Positive = Annotated[float, within("above 0", above=0, finite=False)]
Timeout = Annotated[float, within(f"above 0 and at most {MAX_TIMEOUT_S} seconds", above=0, most=MAX_TIMEOUT_S)]
TimeoutMinutes = Annotated[
    float, within(f"above 0 and at most {MAX_TIMEOUT_S // 60} minutes", above=0, most=MAX_TIMEOUT_S // 60)
]
Rate = Annotated[float, within("above 0", above=0)]
Share = Annotated[float, within("between 0 and 1", least=0, most=1)]
Name = Annotated[str, Must("a name, not empty", lambda value: bool(value.strip()))]


def refuse_unused(settings: Any, is_used: bool, where: str, *names: str) -> None:
    """Raise ConfigError if one of the fields `names` of the dataclass object `settings` differs from its default,
    although it has no effect. `is_used`: True if these fields have an effect, so that nothing is raised. `where`: text
    after "means nothing" in the message, such as "without a limit"."""
    default_of = {field.name: field.default for field in fields(settings)}
    for name in names:
        if not is_used and getattr(settings, name) != default_of[name]:
            raise ConfigError(f"{name} means nothing {where}: leave it out")


def check(settings: Any, kind: type[PacelineError] = ConfigError) -> None:
    """Check every field of the dataclass object `settings` against the limits in its annotation. In a tuple each
    element is checked; None is valid where the annotation has it. Raises an error of class `kind` for the first invalid
    value."""
    for name, (limits, has_none) in _limits_of(type(settings)).items():
        field_value = getattr(settings, name)
        for value in field_value if isinstance(field_value, tuple) else (field_value,):
            if value is None and has_none:
                continue
            broken = next((limit for limit in limits if value is None or not limit.holds(value)), None)
            if broken:
                raise _error(kind, name, broken.be, value)


def check_all(settings: Any, kind: type[PacelineError] = ConfigError) -> None:
    """Check the value of every field of the dataclass object `settings` against the type in its annotation, then the
    limits like `check`. Numbers of NumPy are valid, a bool is not a number. Raises an error of class `kind` for the
    first invalid value."""
    for name, hint in _types_of(type(settings)).items():
        if not _fits(value := getattr(settings, name), hint):
            raise _error(kind, name, f"of type {_named(hint)}", value)
    check(settings, kind)


def _error(kind: type[PacelineError], name: str, be: str, value: Any) -> PacelineError:
    error = kind(f"{name} must be {be}, not {shown(value)}")
    if isinstance(error, SamplingError):
        error.field = name
    return error


@functools.cache
def _types_of(owner: type) -> dict[str, Any]:
    return get_type_hints(owner)


def _named(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_named, get_args(hint)))
    name = "..." if hint is ... else hint.__name__.replace("NoneType", "None")
    return f"{name}[{', '.join(map(_named, get_args(hint)))}]" if get_args(hint) else name


def _all_fit(values: Iterable[Any], hint: Any) -> bool:
    """Returns True if every value is of the type `hint`; checks one value of each type, but every collection."""
    checked = values if get_args(hint) else {type(each): each for each in values}.values()
    return all(_fits(each, hint) for each in checked)


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and _all_fit(value, parts[0])
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and _all_fit(value, parts[0]) and _all_fit(value.values(), parts[1])
    if origin is Literal:
        return True  # `check` compares it
    if parts:
        return any(_fits(value, part) for part in parts)
    number = {int: numbers.Integral, float: numbers.Real}.get(hint)
    return isinstance(value, number or hint) and not (number and isinstance(value, bool))


class Checked:
    """Base class of dataclasses whose `__post_init__` only calls `check`."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check(self)


@functools.cache
def _limits_of(owner: type) -> dict[str, tuple[list[Must], bool]]:
    """Returns, for each field with limits, these and whether None is valid."""
    hints = get_type_hints(owner, include_extras=True)
    limits_of = {name: [*_limits(hint), *map(_NUMBERS.__getitem__, _numbers_of(hint))] for name, hint in hints.items()}
    return {name: (limits, _has_none(hints[name])) for name, limits in limits_of.items() if limits}


def _numbers_of(hint: Any) -> set[type]:
    """Returns int or float if a type annotation has such values. Tuples of plain numbers are left out: they may be
    long, as token ids are."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated or (origin is tuple and get_origin(parts[0]) is Annotated):
        return _numbers_of(parts[0])
    if origin in (Union, UnionType):
        return set().union(*map(_numbers_of, parts))
    return {hint} & {int, float}


def _has_none(hint: Any) -> bool:
    return hint is NoneType or any(map(_has_none, get_args(hint)))


def _limits(hint: Any) -> Iterator[Must]:
    """Yields the limits of a type annotation, including nested ones."""
    is_choice, parts = get_origin(hint) is Literal, get_args(hint)
    for part in (parts,) if is_choice else parts:
        if isinstance(part, Must):
            yield part
        elif isinstance(part, tuple):
            yield Must(f"one of {', '.join(part)}", part.__contains__)
        else:
            yield from _limits(part)
