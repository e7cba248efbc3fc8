"""Prompts of the code drafter: nothing of a test set among them."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "recipes" / "coder_prompts.py"
TASK = {
    "task_id": 601,
    "text": "Write a function to find the largest of two numbers that stand in one row of a table.",
    "code": "def larger(a, b):\n    return max(a, b)",
    "test_list": ["assert larger(1, 2) == 2"],
}


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    sys.path.append(str(SCRIPT.parent))
    try:
        return runpy.run_path(str(SCRIPT))
    finally:
        sys.path.remove(str(SCRIPT.parent))


def unseen(script: dict[str, Any], folder: Path, *rows: dict[str, Any]) -> Any:
    file = folder / "unseen.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return script["Unseen"]([file])


def test_a_prompt_that_holds_an_unseen_one_is_left_out(script: dict[str, Any], tmp_path: Path) -> None:
    texts = unseen(script, tmp_path, {"text": TASK["text"], "code": TASK["code"]}, {"text": "Count the red ones."})
    wrapped = f"Please: {TASK['text'].upper().replace(' ', ', ')} Thanks."
    assert texts.reason(wrapped) == "words of an unseen prompt"
    assert texts.reason("Count the red ones.") == "words of an unseen prompt"
    assert texts.reason("Count the blue ones.") is None
    assert texts.reason("Write a function to find the largest of two words in a list of words") is None


def test_a_prompt_that_names_an_unseen_function_is_left_out(script: dict[str, Any], tmp_path: Path) -> None:
    texts = unseen(script, tmp_path, {"prompt": "def close(a):\n    '''Near?'''\n"}, {"text": "Anything", "code": TASK["code"]})
    for name in ("close", "larger"):
        assert texts.reason(f"```python\ndef {name}(x):\n") == "a function of the name of an unseen one"
    assert texts.reason("```python\ndef closed(x):\n") is None


def test_the_script_writes_tasks_and_functions_and_counts_what_it_leaves_out(tmp_path: Path) -> None:
    other = TASK | {"task_id": 602, "text": "Return the first of them.", "code": "def first(a):\n    return a[0]"}
    other["test_list"] = ["assert first([1]) == 1"]
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(TASK) + "\n" + json.dumps(other) + "\n")
    (tmp_path / "unseen.jsonl").write_text(json.dumps({"text": TASK["text"], "code": TASK["code"]}) + "\n")
    words = ["--mbpp", tmp_path / "mbpp.jsonl", "--unseen", tmp_path / "unseen.jsonl", "--self-written", "0", "--out", tmp_path]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, check=True)
    tasks = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert [task["id"] for task in tasks] == ["mbpp-602"]
    functions = [json.loads(line) for line in (tmp_path / "functions.jsonl").read_text().splitlines()]
    names = {function["entry_point"] for function in functions}
    assert "first" in names and "larger" not in names and len(names) > 100
    assert "tasks: 1 kept, left out {'words of an unseen prompt': 1}" in done.stdout
