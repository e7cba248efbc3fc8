"""The default drafter's prompts: the same each time, functions that parse, enough kinds."""

from __future__ import annotations

import ast
import json
import random
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.data.prompts import read_prompts
from paceline.train.answers.self_written import read_openers

SCRIPT = Path(__file__).parents[2] / "recipes" / "default_prompts.py"
TASK = {
    "task_id": 601,
    "text": 'Write a python function to find the "largest" of two numbers.',
    "code": "import re\r\ndef helper(x):\r\n\treturn x\r\ndef larger(a, b=1):\r\n\treturn helper(max(a, b))",
    "test_list": ["assert larger(1, 2) == 2", "assert larger('a\\n', 'b') == 'b'", "assert not larger(0, 0)"],
}


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_a_task_becomes_a_function_to_complete(script: dict[str, Any]) -> None:
    prompt = script["function_prompt"](TASK)
    assert prompt["entry_point"] == "larger" and prompt["task_id"] == "mbpp-601"
    assert prompt["prompt"] == (
        'def larger(a, b=1):\n    """ Find the "largest" of two numbers.\n    >>> larger(1, 2)\n    2\n'
        "    >>> larger('a\\n', 'b')\n    'b'\n    \"\"\"\n"
    )


@pytest.mark.parametrize(
    "change", [{"code": "def larger(a:\n"}, {"code": "larger = max"}, {"test_list": ["assert other(1)"]}]
)
def test_tasks_that_cannot_be_read_are_left_out(script: dict[str, Any], change: dict[str, Any]) -> None:
    assert script["function_prompt"](TASK | change) is None


def test_functions_from_parts_parse_and_differ(script: dict[str, Any]) -> None:
    prompts = script["functions_from_parts"]()
    assert len({prompt["prompt"] for prompt in prompts}) == len(prompts) > 150
    for prompt in prompts:
        function = ast.parse(prompt["prompt"]).body[-1]
        assert isinstance(function, ast.FunctionDef) and function.name == prompt["entry_point"]
        assert ast.get_docstring(function)


def test_kinds_differ_and_come_to_an_end(script: dict[str, Any]) -> None:
    rows = script["kinds"](400, random.Random(0))
    assert rows == script["kinds"](400, random.Random(0))
    assert len({row["prompt"] for row in rows}) == len({row["id"] for row in rows}) == 400
    assert not any("{" in row["prompt"] for row in rows)
    with pytest.raises(ValueError, match="lower --kinds"):
        script["kinds"](10**6, random.Random(0))


@pytest.mark.slow
def test_the_command_writes_files_that_the_readers_take(tmp_path: Path) -> None:
    mbpp = tmp_path / "mbpp.jsonl"
    mbpp.write_text(json.dumps(TASK) + "\n\n")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        words = [str(SCRIPT), "--mbpp", str(mbpp), "--out", str(folder), "--kinds", "50"]
        subprocess.run([sys.executable, *words], check=True, capture_output=True, timeout=60)
    names = ["functions.jsonl", "kinds.jsonl", "openers.txt"]
    assert all((folders[0] / name).read_bytes() == (folders[1] / name).read_bytes() for name in names)
    functions = read_prompts(folders[0] / "functions.jsonl")
    assert any(prompt.id == "mbpp-601" for prompt in functions)
    assert all("passes the tests:\n```python\n" in prompt.turns[0] for prompt in functions)
    assert len(read_prompts(folders[0] / "kinds.jsonl")) == 50
    openers = read_openers(folders[0] / "openers.txt")
    assert "How do I" in openers and len(set(openers)) == len(openers) > 20
