"""Fills template slots, such as {order_id}, in openers (first messages of simulated users) with values that the answer
schema allows.

    Has my order {order_id}      ->      Has my order KT4821

Without slots, a model that writes users' messages repeats a few numbers. A drafter would memorise them instead of
learning to copy values from the request."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from paceline.errors import ConfigError, needing
from paceline.loop.synthesize.coverage import MAX_DEPTH, Schema, branches_of, object_or_empty, resolved

SLOT = re.compile(r"\{(\w+)\}")


class TemplateSlots:
    """Fills template slots such as {order_id} in openers (first messages of simulated users). A slot gets a random
    value of the property of the same name in the answers' JSON schema: an enum, a string with a pattern, or an integer
    with limits."""

    def __init__(self, schema: Schema) -> None:
        self._nodes: dict[str, list[Schema]] = defaultdict(list)
        self._collect(schema, schema, 0)

    @property
    def names(self) -> list[str]:
        """Names of the schema properties whose values can fill a slot, sorted."""
        return sorted(self._nodes)

    def check(self, openers: Iterable[str]) -> list[str]:
        """Checks that every slot in the openers (first messages of simulated users) can be filled; raises ConfigError
        if not. Returns the names of schema properties that have a pattern but no slot in any opener, so that the caller
        can print a warning."""
        named = {name for opener in openers for name in SLOT.findall(opener)}
        if unknown := sorted(named - set(self._nodes)):
            raise ConfigError(
                f"openers name {{{unknown[0]}}}, which the schema does not tell: write values out, or name one of "
                f"{', '.join(self.names) or 'none'} (properties with an enum, a pattern, or whole numbers with limits)"
            )
        left_out = [name for name in self.names if name not in named]
        return [name for name in left_out if any("pattern" in node for node in self._nodes[name])]

    def fill(self, opener: str, seed: int) -> str:
        """Returns the opener (a simulated user's first message) with its slots filled; the seed decides the values."""
        generator = random.Random(seed)
        return SLOT.sub(lambda slot: _drawn(generator.choice(self._nodes[slot[1]]), generator), opener)

    def _collect(self, root: Schema, node: Any, depth: int) -> None:
        node = resolved(root, node)
        if depth > MAX_DEPTH:
            return
        for name, inner in object_or_empty(node.get("properties")).items():
            schema = resolved(root, inner)
            if _can_be_drawn(schema):
                self._nodes[name].append(schema)
            self._collect(root, inner, depth + 1)
        for inner in [*branches_of(node), *([node["items"]] if "items" in node else [])]:
            self._collect(root, inner, depth + 1)


def _can_be_drawn(node: Schema) -> bool:
    if isinstance(node.get("enum"), list):
        return any(isinstance(value, str | int) for value in node["enum"])
    limits = (node.get("minimum"), node.get("maximum"))
    return isinstance(node.get("pattern"), str) or (
        node.get("type") == "integer" and all(isinstance(at, int) for at in limits)
    )


def _drawn(node: Schema, generator: random.Random) -> str:
    if isinstance(node.get("enum"), list):
        return str(generator.choice([value for value in node["enum"] if isinstance(value, str | int)]))
    if isinstance(node.get("pattern"), str):
        with needing(ConfigError, "values of a pattern are drawn with rstr: pip install 'paceline[adapt]'"):
            from rstr import Rstr
        try:
            return Rstr(generator).xeger(node["pattern"])
        except (re.error, KeyError, IndexError) as error:
            raise ConfigError(
                f"no value can be drawn of the pattern {node['pattern']!r} ({error}): write values out"
            ) from error
    return str(generator.randint(node["minimum"], node["maximum"]))
