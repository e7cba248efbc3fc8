"""Tool calls out of answers: what counts as one, and that no cut of the text changes it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.serve.replies import tool_calls as reading
from paceline.serve.replies.tool_calls import Call, CallParser, read_call

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def tagged(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


def parse(pieces: list[str], most: int | None = None, is_whole: bool = False) -> tuple[str, list[Call]]:
    parser = CallParser(["f", "g"], most=most, is_whole=is_whole)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    return "".join(part for part in parts if isinstance(part, str)), [part for part in parts if isinstance(part, Call)]


F, G = Call("f", '{"x": 1}'), Call("g", "{}")
ANSWERS: list[tuple[str, str, list[Call]]] = [
    ("Hello there. ", "Hello there. ", []),
    (CALL, "", [F]),
    (f"Sure.\n{CALL}", "Sure.", [F]),
    (f"a\n\n{CALL}\n b\n{CALL} ", "a\n b", [F, F]),
    (f"{CALL}\n{CALL}\n", "", [F, F]),
    (CALL.removesuffix("</tool_call>"), "", [F]),
    ('{"name": "f", "parameters": {"x": 1}}', "", [F]),
    ('  {"name": "g"}', "", [G]),
    ('{"name": "g"}\n{"name": "f", "arguments": {"x": 1}}\n', "", [G, F]),
    ('```json\n{"name": "g"}\n```', "", [G]),
    ('```\n{"name": "g"}\n{"name": "g"}\n```\n', "", [G, G]),
    ('```json\n{"name": "g"}\n``` is how', '```json\n{"name": "g"}\n``` is how', []),
    ('See:\n```json\n{"name": "g"}\n```', 'See:\n```json\n{"name": "g"}\n```', []),
    ("```python\nprint()\n```\n", "```python\nprint()\n```\n", []),
    ('{"name": "g"} and more', '{"name": "g"} and more', []),
    ('{"name": "g"}\n{"name": ', '{"name": "g"}\n{"name": ', []),
    ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
    ("{not json", "{not json", []),
    ("a < b <tool", "a < b <tool", []),
    (tagged("nonsense"), tagged("nonsense"), []),
    (tagged('{"name": ["f"]}'), tagged('{"name": ["f"]}'), []),
    (tagged('{"name": "g"} x'), tagged('{"name": "g"} x'), []),
    (tagged('{"name": "g"}\n{"name": "g"}'), "", [G, G]),
    (f"<tool_call>{CALL}", "<tool_call>", [F]),
    ("<tool_call>cut", "<tool_call>cut", []),
    (tagged('{"name": "f", "arguments": {"a": "x</tool_call>y"}}'), "", [Call("f", '{"a": "x</tool_call>y"}')]),
    (tagged('{"name": "f", "arguments": {"a": "\\"}{"}}') + " ok", "ok", [Call("f", '{"a": "\\"}{"}')]),
    (tagged('{"arguments": {"a": 1.10, "b" :1e2}, "name": "f"}'), "", [Call("f", '{"a": 1.10, "b" :1e2}')]),
    (tagged('{"name": "f", "arguments": {"a": NaN}}'), tagged('{"name": "f", "arguments": {"a": NaN}}'), []),
    (tagged('{"name": "f", "arguments": "Oslo"}'), tagged('{"name": "f", "arguments": "Oslo"}'), []),
    (tagged('{"name": "f", "arguments": "{\\"x\\": 1}"}'), "", [F]),
    (tagged('{"name": "g", "arguments": null}'), "", [G]),
    ("", "", []),
]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "shown", "calls"), ANSWERS, ids=[repr(text)[:40] for text, _, _ in ANSWERS])
def test_every_cut_of_an_answer_gives_the_same_text_and_calls(text: str, shown: str, calls: list[Call]) -> None:
    assert parse([text]) == (shown, calls)
    assert parse([*text]) == (shown, calls)
    for begin, end in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        assert parse([text[:begin], text[begin:end], text[end:]]) == (shown, calls)


pieces_of_answers = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            '{"name": "f", "arguments": {"x": 1}}',
            '{"name": "g"}',
            "{",
            "}",
            '"',
            "\\",
            "```",
            "json",
        ]
    )
    | st.text("ab \n<>`", max_size=4),
    max_size=8,
)


@pytest.mark.slow
@given(parts=pieces_of_answers, data=st.data())
def test_no_cut_of_any_text_changes_what_it_gives(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    cut = [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]
    assert parse(cut) == parse([text]) == parse([*text])


@pytest.mark.parametrize("text", [f"{CALL}\n{CALL}", '{"name": "f", "arguments": {"x": 1}}\n{"name": "g"}'])
def test_without_parallel_calls_the_first_is_the_only_one(text: str) -> None:
    for pieces in ([text], [*text]):
        assert parse(pieces, most=1) == ("", [F])


def test_a_demanded_call_waits_for_its_end() -> None:
    assert parse([*'{"name": "g", "arguments": {}}'], is_whole=True) == ("", [G])
    assert parse(["{cut"], is_whole=True) == ("{cut", [])


@pytest.mark.parametrize("before", ["", "Sure. <tool_call>", "```json\n"])
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_long_call_is_not_read_again_with_every_piece(
    before: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read = reading._read_objects
    monkeypatch.setattr(
        reading, "_read_objects", lambda *arguments: (reads.append(len(arguments[0])), read(*arguments))[1]
    )
    parser = CallParser(["f"], is_whole=is_whole)
    parser.push(f'{before}{{"name": "f", "arguments": {{"a": "')
    for piece in ["\\", '"', "{", "text"] * 500:
        assert parser.push(piece) == []
    assert len(reads) <= 2
    parts = [*parser.push('"}}'), *parser.finish()]
    assert [part.name for part in parts if isinstance(part, Call)] == (
        [] if is_whole and before.startswith("Sure") else ["f"]
    )


def test_arguments_keep_their_own_text() -> None:
    assert read_call('{"name": "f", "arguments": { "a":1.10,"b":12345678901234567890123 } }', {"f"}) == Call(
        "f", '{ "a":1.10,"b":12345678901234567890123 }'
    )
