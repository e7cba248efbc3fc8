"""Every shape of prompt file, and one clear line for each way it can be wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.data.prompts import read_prompts
from paceline.errors import PromptError


def write(folder: Path, *rows: Any) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return file


SHAPES = [
    (
        {"question": "1+1?", "answer": "1+1 is 2. #### 2"},
        ("1+1?\nPlease reason step by step, and put your final answer within \\boxed{}.",),
    ),
    (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"},
        (
            "Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef "
            "f():\n\n```",
        ),
    ),
    ({"question": "Capital of Peru?", "answer": "Lima"}, ("Capital of Peru?",)),
    ({"text": "Write f.", "code": "def f(): ..."}, ("Write f.",)),
    ({"turns": ["first", "second"]}, ("first", "second")),
    ({"prompt": "Say hi."}, ("Say hi.",)),
    ({"instruction": "Sort.", "instances": [{"input": "b a", "output": "a b"}]}, ("Sort.\n\nb a",)),
    ({"instruction": "Sort.", "instances": [{"input": "", "output": ""}]}, ("Sort.",)),
    (
        {
            "messages": [
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "x"},
                {"role": "user", "content": "two"},
            ]
        },
        ("one", "two"),
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}]}, ("parts",)),
]


@pytest.mark.parametrize(("row", "turns"), SHAPES)
def test_shapes(tmp_path: Path, row: dict[str, Any], turns: tuple[str, ...]) -> None:
    (prompt,) = read_prompts(write(tmp_path, row))
    assert prompt.turns == turns
    assert prompt.messages[-1] == {"role": "user", "content": turns[0]}
    assert prompt.source == "prompts.jsonl"


def test_a_system_message_comes_first(tmp_path: Path) -> None:
    row = {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}]}
    (prompt,) = read_prompts(write(tmp_path, row))
    assert [message["role"] for message in prompt.messages] == ["system", "user"]


def test_ids_limit_and_blank_lines(tmp_path: Path) -> None:
    file = write(tmp_path, {"id": 7, "prompt": "a"}, "", {"prompt": "b"}, "not read")
    assert [prompt.id for prompt in read_prompts(file, limit=2)] == ["7", "1"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{half", "line 2: not a line of JSON"),
        ('["list"]', "line 2: expected an object"),
        (
            {"foo": 1},
            "line 2: none of the keys messages, conversations, turns, question, prompt, text, instruction (found foo)",
        ),
        ({"prompt": 3}, "line 2: 'prompt' must be text"),
        ({"prompt": "  "}, "line 2: the prompt is empty"),
        ({"turns": []}, "line 2: 'turns' must be a list of texts"),
        ({"messages": "hi"}, "line 2: 'messages' must be a list"),
        ({"messages": []}, "line 2: 'messages' holds no user message"),
        ({"messages": [{"role": "user", "content": 5}]}, "line 2: a message's content must be text"),
    ],
)
def test_malformed_rows_are_named_by_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(PromptError, match=re.escape(message)):
        read_prompts(write(tmp_path, {"prompt": "fine"}, row))


def test_bad_sources(tmp_path: Path) -> None:
    for source, message in [
        (write(tmp_path), "holds no prompts"),
        (tmp_path, "is a folder"),
        (tmp_path / "none.jsonl", "there is no prompt file"),
    ]:
        with pytest.raises(PromptError, match=message):
            read_prompts(source)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match="line 1"):
        read_prompts(binary)
    with pytest.raises(PromptError, match="limit"):
        read_prompts(binary, limit=0)


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "traces.parquet"
    parquet.write_table(
        arrow.table({"messages": [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]]}), file
    )
    assert [prompt.turns for prompt in read_prompts(file)] == [("hi",), ("ho",)]
    parquet.write_table(arrow.table({"question": ["1+1?"], "answer": ["#### 2"], "other": [None]}), file)
    assert read_prompts(file)[0].turns[0].startswith("1+1?\nPlease reason")
    file.write_bytes(b"PAR1 not really")
    with pytest.raises(PromptError, match="not a readable Parquet file"):
        read_prompts(file)


def test_the_built_in_prompts_are_varied() -> None:
    import paceline

    prompts = read_prompts(Path(paceline.__file__).parent / "bench" / "prompts.jsonl")
    assert len({prompt.id for prompt in prompts}) == len(prompts) == 16


def test_a_conversation_in_which_tools_were_called_is_asked_as_it_stands(tmp_path: Path) -> None:
    """Its results belong to the calls that were made; the answers after the last of them are the target's to give."""
    tool = {"type": "function", "function": {"name": "weather"}}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    talk = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rainy"},
    ]
    (prompt,) = read_prompts(
        write(tmp_path, {"messages": [*talk, {"role": "assistant", "content": "Rainy."}], "tools": [tool]})
    )
    assert prompt.messages == [talk[0], {**talk[1], "content": ""}, talk[2]] and prompt.turns == ("Weather?",)
    assert prompt.tools == (tool,)
    with pytest.raises(PromptError, match="line 1: 'tools' must be a list"):
        read_prompts(write(tmp_path, {"messages": talk, "tools": [{"name": "weather"}]}))
