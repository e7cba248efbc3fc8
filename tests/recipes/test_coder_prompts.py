"""Prompts of the code drafter: nothing of a test set among them."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from paceline import SamplingParams

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
    texts = unseen(
        script, tmp_path, {"prompt": "def close(a):\n    '''Near?'''\n"}, {"text": "Anything", "code": TASK["code"]}
    )
    for name in ("close", "larger"):
        assert texts.reason(f"```python\ndef {name}(x):\n") == "a function of the name of an unseen one"
    assert texts.reason("```python\ndef closed(x):\n") is None


@pytest.mark.slow
def test_the_script_writes_tasks_and_functions_and_counts_what_it_leaves_out(tmp_path: Path) -> None:
    other = TASK | {"task_id": 602, "text": "Return the first of them.", "code": "def first(a):\n    return a[0]"}
    other["test_list"] = ["assert first([1]) == 1"]
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(TASK) + "\n" + json.dumps(other) + "\n")
    (tmp_path / "unseen.jsonl").write_text(json.dumps({"text": TASK["text"], "code": TASK["code"]}) + "\n")
    words = ["--mbpp", tmp_path / "mbpp.jsonl", "--unseen", tmp_path / "unseen.jsonl", "--out", tmp_path]
    done = subprocess.run(
        [sys.executable, SCRIPT, *words, "--self-written", "0", "--signatures", "0"],
        capture_output=True,
        text=True,
        check=True,
    )
    tasks = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert [task["id"] for task in tasks] == ["mbpp-602"]
    functions = [json.loads(line) for line in (tmp_path / "functions.jsonl").read_text().splitlines()]
    names = {function["entry_point"] for function in functions}
    assert "first" in names and "larger" not in names and len(names) > 100
    assert "tasks: 1 kept, left out {'words of an unseen prompt': 1}" in done.stdout


class Writer:
    """Stands for the target: goes on with what it is given, by the string that it is to stop at."""

    goes_on: ClassVar[dict[str, str]] = {":\n": "thing(a)", "\n": " sum of a.", '"""': " result.\n    "}

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(
            encode=lambda text, add_special_tokens: [text],
            apply_chat_template=lambda messages, *options: f"<user>{messages[-1]['content']}</user>",
            decode=lambda ids, skip_special=True: ids[0],
        )
        self.asked: list[str] = []

    def generate_ids(self, prompts: list[list[str]], params: list[SamplingParams]) -> list[Any]:
        self.asked += [prompt[0] for prompt in prompts]
        finish = ["length" if place == 0 else "stop" for place in range(len(prompts))]
        return [
            SimpleNamespace(text=self.goes_on[each.stop[0]], finish_reason=reason, token_ids=[0])
            for each, reason in zip(params, finish, strict=True)
        ]


def test_signatures_are_written_in_pieces_and_go_on_where_they_stopped(script: dict[str, Any], tmp_path: Path) -> None:
    file, llm = tmp_path / "written.jsonl", Writer()
    script["written_signatures"](llm, 8, [{"prompt": "def is_thing(a):"}], file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(request.startswith("<user>") and "def " in request for request in llm.asked)
    names = [re.findall(r"def (\w+)", row["prompt"]) for row in rows]
    assert len(rows) >= 8 and len({name[0] for name in names}) == len(rows) and ["is_thing"] not in names
    assert [row["id"] for row in rows] == [f"signature-{number}" for number in range(len(rows))]
    assert all(row["prompt"].endswith('\n    """\n') for row in rows)
    with_example = [row["prompt"] for row in rows if ">>>" in row["prompt"]]
    assert 0 < len(with_example) < len(rows)
    pattern = r'def (\w+)\(a\):\n    """ .* sum of a\.\n    >>> \1\( result'
    assert all(re.search(pattern, prompt) for prompt in with_example)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]) + '{"id": "cut of')
    script["written_signatures"](Writer(), 5, [], file)
    more = [json.loads(line) for line in file.read_text().splitlines()]
    assert more[:3] == rows[:3] and len(more) >= 5


STUBS = ('def a(:\n    """ A. """\n', "def a():\n    '''\u4e00'''\n", "def a():\n  '''def b(): 1'''\n")


@pytest.mark.parametrize("stub", STUBS)
def test_what_is_no_one_function_in_english_is_no_stub(script: dict[str, Any], stub: str) -> None:
    assert script["name_of"](stub) is None
    assert script["name_of"]("def a():\n    '''One.'''\n") == "a"
