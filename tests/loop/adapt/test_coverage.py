"""Which values of a schema answers took, and schemas that ask for the others."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from paceline.loop.synthesize.coverage import MAX_DEPTH, Coverage, entropy, narrowed
from paceline.model.text.tools import call_schema

TICKET: dict[str, Any] = {
    "type": "object",
    "properties": {
        "action": {"enum": ["refund", "trace", "repair"]},
        "urgent": {"type": "boolean"},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
        "note": {"type": "string"},
    },
    "required": ["action"],
    "$defs": {"line": {"type": "object", "properties": {"kind": {"enum": [1, "two", None]}}}},
}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def test_what_was_taken_and_how_evenly() -> None:
    coverage = Coverage(TICKET)
    assert [choice.name for choice in coverage.choices] == ["action", "urgent", "lines[].kind"]
    coverage.add({"action": "refund", "urgent": True, "note": "Two words", "lines": [{"kind": 1}, {"kind": None}]})
    coverage.add({"action": "trace", "note": "Two words more", "lines": []})
    action, urgent, kind = coverage.taken()
    assert action.counts == {"refund": 1, "trace": 1, "repair": 0} and action.unused == ("repair",)
    assert action.evenness == pytest.approx(entropy([1, 1]) / entropy([1, 1, 1]))
    assert urgent.counts == {"False": 0, "True": 1} and urgent.evenness == 0, "1 is no True, and True no 1"
    assert kind.counts == {"1": 1, "two": 0, "None": 1}
    (note,) = coverage.texts()
    assert (note["name"], note["number"], note["words"]) == ("note", 2, 3)
    assert note["characters"]["p50"] == 11.5 and note["bits_per_word"] == pytest.approx(entropy([2, 2, 1]))


def test_a_choice_is_made_by_narrowing_the_schema() -> None:
    coverage = Coverage(TICKET)
    action, _, kind = coverage.choices
    narrower = narrowed(TICKET, action, 2)
    assert narrower["properties"]["action"] == {"enum": ["repair"]} and narrower["required"] == ["action"]
    lines = narrowed(TICKET, kind, 1)["properties"]["lines"]
    assert lines["minItems"] == 1 and lines["items"]["properties"]["kind"] == {"enum": ["two"]}
    assert lines["items"]["required"] == ["kind"] and "lines" in narrowed(TICKET, kind, 1)["required"]
    assert TICKET["properties"]["action"]["enum"] == ["refund", "trace", "repair"], "the schema itself is untouched"


def test_branches_are_choices_too() -> None:
    import json

    schema = json.loads(call_schema([tool("weather", unit={"enum": ["C", "F"]}), tool("time")]))
    coverage = Coverage(schema)
    assert [choice.name for choice in coverage.choices] == ["answer", "(0).arguments.unit"]
    coverage.add({"name": "time", "arguments": {}})
    coverage.add({"name": "weather", "arguments": {"unit": "F"}})
    which, unit = coverage.taken()
    assert which.counts == {"0": 1, "1": 1} and unit.counts == {"C": 0, "F": 1}
    narrower = narrowed(schema, coverage.choices[1], 0)
    (only,) = narrower["anyOf"]
    assert only["properties"]["name"] == {"const": "weather"}
    assert only["properties"]["arguments"]["properties"]["unit"] == {"enum": ["C"]}
    assert [each["properties"]["name"]["const"] for each in narrowed(schema, coverage.choices[0], 1)["anyOf"]] == [
        "time"
    ]


def test_rare_values_are_asked_for_until_all_are_even() -> None:
    coverage = Coverage({"properties": {"kind": {"enum": list("abcd")}}})
    for _ in range(30):
        coverage.add({"kind": "a"})
    chosen = [coverage.rarest(random.Random(number)) for number in range(90)]
    assert Counter(each[1] for each in chosen if each) == {1: 30, 2: 30, 3: 30}
    assert coverage.taken()[0].evenness == pytest.approx(1)
    assert Coverage({"type": "string"}).rarest(random.Random(0)) is None


NODE: dict[str, Any] = {
    "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}, "on": {"type": "boolean"}}}},
    "$ref": "#/$defs/node",
}
"""Holds itself."""
ODD = [
    ({"$ref": "#"}, {}),
    (NODE, {"next." * depth + "on": {"False": 0, "True": int(depth == 1)} for depth in range(MAX_DEPTH)}),
    ({"properties": {"a": True, "b": {"enum": [{"c": 1}, 2]}, "d": {"$ref": "#/nowhere"}, "e": {"anyOf": "odd"}}}, {}),
    ({"oneOf": [{"type": "string"}, {"type": ["integer", "null"]}, True]}, {"answer": {"0": 1, "1": 2, "2": 3}}),
]
"""Schemas, and what of their choices the answers below take."""


@pytest.mark.parametrize(("schema", "counts"), ODD)
def test_odd_schemas_are_walked(schema: dict[str, Any], counts: dict[str, dict[str, int]]) -> None:
    coverage = Coverage(schema)
    for answer in ({"next": {"on": True}}, [], "text", 3, None, {"b": {"c": 1}, "a": [1]}):
        coverage.add(answer)
    assert {taken.name: taken.counts for taken in coverage.taken()} == counts
    assert coverage.num_answers == 6
    assert [(each["name"], each["number"], each["words"]) for each in coverage.texts()] == [("answer", 1, 1)]


def test_odd_schemas_are_narrowed() -> None:
    """A recursive schema is written out only at the levels on the way to the choice; one branch of several is left."""
    [level] = [choice for choice in Coverage(NODE).choices if choice.name == "next.on"]
    narrower = narrowed(NODE, level, 1)
    inner = narrower["properties"]["next"]
    assert inner["properties"] == {"next": {"$ref": "#/$defs/node"}, "on": {"enum": [True]}}
    assert (narrower["required"], inner["required"]) == (["next"], ["on"]) and narrower["$defs"] == NODE["$defs"]
    branches = ODD[3][0]
    [choice] = Coverage(branches).choices
    assert [narrowed(branches, choice, place) for place in range(3)] == [
        {"oneOf": [each]} for each in branches["oneOf"]
    ]
