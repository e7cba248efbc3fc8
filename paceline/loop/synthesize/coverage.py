"""Measures how much of a JSON schema the answers use: which enum values and branches, how evenly, and how long texts.

A *choice* is a place in the schema where the answer takes one of a few values: an enum, a boolean, or one of several
schemas (`anyOf`, `oneOf`), such as the tool to call. Its *evenness* is the entropy of the values taken divided by the
maximum: 1 is even, 0 is constant. `narrowed` fixes one choice of the schema, to request rare values.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline.report.statistics import quantile

Schema = dict[str, Any]
Step = tuple[str, Any]
"""One step down in a schema: ("properties", name), ("items", None), or ("anyOf", index)."""
BRANCHES = ("anyOf", "oneOf")
MAX_DEPTH = 12
"""Maximum depth to which a schema is searched, since schemas may be recursive."""
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """Place in a JSON schema where an answer takes one of a few values: an enum or a boolean. If `is_branch`, the place
    offers several schemas (`anyOf`, `oneOf`) instead, and `values` are their indices."""

    path: tuple[Step, ...]
    """Steps from the top of the schema to the place, such as ("properties", "action")."""
    values: tuple[Any, ...]
    is_branch: bool = False

    @property
    def name(self) -> str:
        """Path of the choice in the schema as text, such as `action` or `items[].kind`."""
        parts = (
            f".{key}" if kind == "properties" else "[]" if kind == "items" else f"({key})" for kind, key in self.path
        )
        return "".join(parts).removeprefix(".") or "answer"


@dataclass(frozen=True, slots=True)
class Taken:
    """Statistics of one choice (place in a JSON schema with a fixed set of values): how often answers took each of its
    values, and the evenness of these counts (0 to 1, see `evenness`)."""

    name: str
    counts: dict[str, int]
    evenness: float
    unused: tuple[str, ...]


class Coverage:
    """Counts the values that answers take at the choices of a JSON schema: its enums, booleans and branches of `anyOf`
    or `oneOf`."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.choices = [choice for choice in _choices(schema, schema, (), 0) if len(choice.values) > 1]
        self.counts: dict[Choice, Counter[int]] = {choice: Counter() for choice in self.choices}
        self._texts: dict[str, list[int]] = defaultdict(list)
        self._words: dict[str, Counter[str]] = defaultdict(Counter)
        self.num_answers = 0

    def add(self, answer: Any) -> None:
        self.num_answers += 1
        for choice, counts in self.counts.items():
            for value in _values_at(self.schema, self.schema, answer, choice.path):
                place = self._place(choice, value)
                if place is not None:
                    counts[place] += 1
        fixed = {choice.name for choice in self.choices}
        for name, text in _texts(answer, ""):
            if name not in fixed:
                self._texts[name].append(len(text))
                self._words[name].update(re.findall(r"\w+", text.lower()))

    def rarest(self, generator: random.Random) -> tuple[Choice, int] | None:
        """Chooses a value that the next answer must take, so that rare values become more frequent, and counts it as
        taken. Returns (choice, index of the value in `choice.values`); None if the schema has no choices (places with a
        fixed set of values).

        The choice is drawn at random: the more unevenly its values were taken, the more probable it is. The value is
        the one that was taken least often.
        """
        if not self.choices:
            return None
        weights = [1.05 - evenness(counts, len(choice.values)) for choice, counts in self.counts.items()]
        choice = generator.choices(self.choices, weights)[0]
        counts = self.counts[choice]
        place = min(range(len(choice.values)), key=lambda place: (counts[place], place))
        counts[place] += 1
        return choice, place

    def taken(self) -> list[Taken]:
        """Returns the statistics of each choice (place with a fixed set of values) of the schema."""
        return [
            Taken(
                choice.name,
                {_named(value): counts[place] for place, value in enumerate(choice.values)},
                evenness(counts, len(choice.values)),
                tuple(_named(value) for place, value in enumerate(choice.values) if not counts[place]),
            )
            for choice, counts in self.counts.items()
        ]

    def texts(self) -> list[dict[str, Any]]:
        """Returns a dict of statistics for each place in the answers that has free text. "name": the place; "number":
        number of texts; "characters": percentiles of their length; "words": number of different words; "bits_per_word":
        entropy of the words."""
        return [
            {
                "name": name or "answer",
                "number": len(lengths),
                "characters": {f"p{at}": quantile(lengths, at / 100) for at in (5, 50, 95)},
                "words": len(self._words[name]),
                "bits_per_word": entropy(self._words[name].values()),
            }
            for name, lengths in sorted(self._texts.items())
        ]

    def _place(self, choice: Choice, value: Any) -> int | None:
        if choice.is_branch:
            return _branch_of(self.schema, branches_of(_at(self.schema, choice.path)), value)
        same = (
            place
            for place, candidate in enumerate(choice.values)
            if candidate == value and type(candidate) is type(value)
        )
        return next(same, None)


def narrowed(schema: Schema, choice: Choice, place: int) -> Schema:
    """Returns a copy of the schema by which every answer takes the value `choice.values[place]` at `choice`. To this
    end, the properties on the path to the choice become required, and the arrays non-empty."""
    return _narrowed(schema, schema, choice.path, choice, place)


def entropy(counts: Iterable[int]) -> float:
    """Shannon entropy of the distribution given by `counts`, in bits; 0 without counts."""
    counts = [count for count in counts if count]
    total = sum(counts)
    return -sum(count / total * math.log2(count / total) for count in counts) if total else 0.0


def evenness(counts: Counter[int], number: int) -> float:
    """Returns how evenly values were taken, from 0 (always the same value) to 1 (all equally often). This is the
    entropy of `counts` divided by its maximum for `number` possible values (at least 2); 0 without counts."""
    return entropy(counts.values()) / math.log2(number)


def _narrowed(root: Schema, node: Schema, path: tuple[Step, ...], choice: Choice, place: int) -> Schema:
    node = resolved(root, node)
    if not path:
        if choice.is_branch:
            kind = _branch_kind(node)
            return {**node, kind: [node[kind][place]]}
        return {**{key: value for key, value in node.items() if key != "type"}, "enum": [choice.values[place]]}
    (kind, key), rest = path[0], path[1:]
    if kind == "properties":
        inner = _narrowed(root, node["properties"][key], rest, choice, place)
        required = [*dict.fromkeys([*node.get("required", ()), key])]
        return {**node, "properties": {**node["properties"], key: inner}, "required": required}
    if kind == "items":
        inner = _narrowed(root, node["items"], rest, choice, place)
        return {**node, "items": inner, "minItems": max(1, node.get("minItems", 0))}
    return {**node, kind: [_narrowed(root, node[kind][key], rest, choice, place)]}


def _choices(root: Schema, node: Any, path: tuple[Step, ...], depth: int) -> Iterator[Choice]:
    node = resolved(root, node)
    if depth > MAX_DEPTH:
        return
    if isinstance(node.get("enum"), list):
        if not any(isinstance(value, dict | list) for value in node["enum"]):
            yield Choice(path, tuple(node["enum"]))
    elif node.get("type") == "boolean":
        yield Choice(path, (False, True))
    branches = branches_of(node)
    if branches:
        yield Choice(path, tuple(range(len(branches))), is_branch=True)
    kind = _branch_kind(node)
    for place, branch in enumerate(branches):
        yield from _choices(root, branch, (*path, (kind, place)), depth + 1)
    for key, inner in object_or_empty(node.get("properties")).items():
        yield from _choices(root, inner, (*path, ("properties", key)), depth + 1)
    if isinstance(node.get("items"), dict):
        yield from _choices(root, node["items"], (*path, ("items", None)), depth + 1)


def _values_at(root: Schema, node: Any, value: Any, path: tuple[Step, ...]) -> Iterator[Any]:
    """Yields an answer's values at a place of the schema."""
    if not path:
        yield value
        return
    node, (kind, key), rest = resolved(root, node), path[0], path[1:]
    if kind == "properties" and isinstance(value, dict) and key in value:
        yield from _values_at(root, node["properties"][key], value[key], rest)
    elif kind == "items" and isinstance(value, list):
        for item in value:
            yield from _values_at(root, node["items"], item, rest)
    elif kind in BRANCHES and _branch_of(root, node[kind], value) == key:
        yield from _values_at(root, node[kind][key], value, rest)


def _at(root: Schema, path: tuple[Step, ...]) -> Schema:
    node = resolved(root, root)
    for kind, key in path:
        node = resolved(root, node[kind] if kind == "items" else node[kind][key])
    return node


def _branch_of(root: Schema, branches: list[Any], value: Any) -> int | None:
    """Index of the first schema that matches the value's type, keys and constants."""
    return next((place for place, branch in enumerate(branches) if _looks_like(resolved(root, branch), value)), None)


def _looks_like(schema: Schema, value: Any) -> bool:
    if "const" in schema:
        return value == schema["const"]
    if isinstance(schema.get("enum"), list):
        return value in schema["enum"]
    kinds = schema.get("type")
    names = [kinds] if isinstance(kinds, str) else kinds or []
    if names and not any(isinstance(value, TYPES.get(name, object)) for name in names):
        return False
    if not isinstance(value, dict):
        return True
    properties = object_or_empty(schema.get("properties")).items()
    constants = [(key, inner["const"]) for key, inner in properties if isinstance(inner, dict) and "const" in inner]
    has_required = set(schema.get("required", ())) <= set(value)
    return has_required and all(value.get(key) == constant for key, constant in constants)


def resolved(root: Schema, node: Any) -> Schema:
    """Returns the schema `node` with its own `$ref` resolved: the schema in `root` that it refers to, in which other
    keys of `node` take precedence. Without a `$ref`, returns `node`. Returns {} if the result is not an object."""
    for _ in range(MAX_DEPTH):
        if not isinstance(node, dict) or "$ref" not in node:
            break
        target: Any = root
        for part in str(node["$ref"]).removeprefix("#").strip("/").split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            target = target.get(part) if part and isinstance(target, dict) else target
        node = {**object_or_empty(target), **{key: value for key, value in node.items() if key != "$ref"}}
    return object_or_empty(node)


def branches_of(node: Schema) -> list[Any]:
    branches = node.get(_branch_kind(node))
    return branches if isinstance(branches, list) else []


def _branch_kind(node: Schema) -> str:
    return next((kind for kind in BRANCHES if kind in node), BRANCHES[0])


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, f"{name}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, f"{name}[]")


def object_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _named(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
