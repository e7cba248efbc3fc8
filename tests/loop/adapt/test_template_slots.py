"""TemplateSlots of openers: which can be filled, with what."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.loop.synthesize.template_slots import TemplateSlots

ORDER = {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"}
SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "properties": {
                "name": {"const": "status"},
                "arguments": {"properties": {"order_id": {"$ref": "#/$defs/order"}}},
            }
        },
        {"properties": {"day": {"enum": ["Monday", "Friday"]}, "query": {"type": "string"}}},
    ],
    "$defs": {"order": ORDER},
    "items": {"properties": {"number": {"type": "integer", "minimum": 3, "maximum": 9}, "most": {"type": "integer"}}},
}


def test_values_are_the_schemas_own_and_follow_the_seed() -> None:
    slots = TemplateSlots(SCHEMA)
    assert slots.names == ["day", "number", "order_id"]
    texts = [slots.fill("{number} of {order_id} and {order_id} on {day}, {}", seed) for seed in range(40)]
    for text in texts:
        match = re.fullmatch(r"([3-9]) of ([A-Z]{2}\d{4}) and ([A-Z]{2}\d{4}) on (Monday|Friday), \{\}", text)
        assert match and match[2] != match[3]
    assert len(set(texts)) == 40 and {text.partition(" on ")[2] for text in texts} == {"Monday, {}", "Friday, {}"}
    assert texts == [
        TemplateSlots(SCHEMA).fill("{number} of {order_id} and {order_id} on {day}, {}", seed) for seed in range(40)
    ]


def test_blanks_that_nothing_is_known_of() -> None:
    slots = TemplateSlots(SCHEMA)
    assert slots.check(("", "Has {order_id} come", "On {day}")) == []
    assert slots.check(("On {day}",)) == ["order_id"], "a pattern that no opener names"
    for name in ("city", "query", "most"):
        with pytest.raises(ConfigError, match=rf"openers name \{{{name}\}}, .* or name one of day, number, order_id"):
            slots.check((f"In {{{name}}}",))
    with pytest.raises(ConfigError, match="name one of none"):
        TemplateSlots({"type": "object"}).check(("{x}",))


def test_a_pattern_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no value can be drawn of the pattern '\\[a"):
        TemplateSlots({"properties": {"x": {"type": "string", "pattern": "[a"}}}).fill("{x}", 0)


def test_a_schema_that_holds_itself_ends() -> None:
    node: dict[str, Any] = {"properties": {"kind": {"enum": ["a"]}, "inner": {"$ref": "#"}}}
    assert TemplateSlots(node).names == ["kind"]
