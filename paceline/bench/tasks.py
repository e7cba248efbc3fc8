"""Tasks with checkable answers: support tickets (JSON fields), GSM8K (the number) and HumanEval (the code is run).

    task = read_task("tickets=heldout.jsonl", limit=20)
    task.score(0, text)                                      # 1.0 when the first row's answer is right, else 0.0

Files are JSON lines, as written by recipes/support_tickets.py and as the data sets are published. The model's code runs
in a separate process with limited time and memory, an empty environment and no writable files. This does not protect
against malicious code.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.prompts import Prompt, read_prompts
from paceline.errors import PromptError, reraised

LIMIT_S, LIMIT_BYTES, WAIT_S = 5, 2**30, 15
PASSED = 42
"""Exit status of a process in which all tests passed; an answer that ends the process early fails."""
NUMBER = re.compile(r"(?:(?<!\d)-)?(?:\d[\d,]*\.?\d*|(?<![\w.])\.\d+)(?:[eE][+-]?\d+)?")
"""A number; the dash of a range, as in 2023-2024, is not a sign."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """A task of `bench lossy`, such as GSM8K: prompts, and data rows with the right answers."""

    name: str
    prompts: list[Prompt]
    rows: list[Row]
    """Data row of each prompt, in the same order, with the right answer."""

    def score(self, index: int, text: str) -> float:
        return float(SCORERS[self.name](self.rows[index], text))


def read_task(given: str, limit: int | None = None) -> Task:
    """Read a task from text of the form NAME=FILE. NAME is tickets, gsm8k or humaneval, and selects how answers are
    scored. `limit`: use only the first rows. Raises PromptError for an unknown name, an unreadable file or a row
    without a key that the task needs."""
    name, _, file = given.partition("=")
    if name not in SCORERS or not file:
        raise PromptError(f"task {given!r:.80} is none: write it as NAME=FILE, of {', '.join(SCORERS)}")
    remedy = "check the path, and that each line is a JSON object"
    with reraised(PromptError, f"cannot read task {name} from {file}", remedy, OSError, ValueError):
        lines = [line for line in Path(file).read_text(encoding="utf-8").split("\n") if line.strip()][:limit]
        rows = [json.loads(line) for line in lines]
    needed = NEEDED[name]
    if not rows or any(not isinstance(row, dict) or needed - set(row) for row in rows):
        raise PromptError(f"{file} is no file of task {name}: its rows need {', '.join(sorted(needed))}")
    prompts = read_prompts(file, limit)
    if len(prompts) != len(rows):
        raise PromptError(f"{file} has {len(rows)} rows but {len(prompts)} prompts: write one prompt per line")
    invalid = (ValueError, TypeError, LookupError, AttributeError)
    with reraised(PromptError, f"{file} has a row whose answer cannot be checked", "correct it", *invalid):
        for row in rows:
            if name != "humaneval":
                SCORERS[name](row, "{}")  # fails now instead of after the measurement
    return Task(name, prompts, rows)


def score_ticket(row: Row, text: str) -> bool:
    """Return True if the generated text is a JSON object with the right `policy_id` and `action`, which the last
    message of `row` has in the form "Policy ID: ACTION"."""
    expected = re.search(r"Policy (\S+): (\S+)", row["messages"][-1]["content"])
    try:
        answer = json.loads(text)
    except ValueError:
        return False
    return (
        bool(expected)
        and isinstance(answer, dict)
        and (answer.get("policy_id"), answer.get("action")) == expected.groups()
    )


def score_number(row: Row, text: str) -> bool:
    """Return True if the last number in the generated text equals the right answer of the GSM8K data row."""
    numbers = NUMBER.findall(text)
    wanted = row["answer"].rpartition("####")[2].strip().replace(",", "")
    right = float(wanted)
    return bool(numbers) and float(numbers[-1].replace(",", "")) == right


def score_code(row: Row, text: str) -> bool:
    """Return True if the code in the generated text passes the tests of the HumanEval data row. Executes the code in a
    separate process, with limits of time and memory."""
    code = code_of(text)
    whole = code if f"def {row['entry_point']}" in code else row["prompt"] + code
    return runs(f"{row['prompt']}    pass\n\n{whole}\n\n{row['test']}\n\ncheck({row['entry_point']})\n")


SCORERS: dict[str, Callable[[Row, str], bool]] = {
    "tickets": score_ticket,
    "gsm8k": score_number,
    "humaneval": score_code,
}
NEEDED = {"tickets": {"messages"}, "gsm8k": {"question", "answer"}, "humaneval": {"prompt", "entry_point", "test"}}


def code_of(text: str) -> str:
    """Return the first Python code block of a Markdown answer, or the whole text if there is no block."""
    block = re.search(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    return block.group(1) if block else text


def runs(code: str) -> bool:
    """Execute Python code in a separate process, and return True if it ends without an error within 5 s of CPU time
    and, on Linux, 1 GiB of memory. Its output is discarded."""
    if sys.platform != "win32":
        import resource  # not in limit(): a forked process should not import

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
        if sys.platform == "linux":  # macOS does not support this limit
            resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    whole = f"__name__ = 'answer'\n{code}\nimport os\nos._exit({PASSED})\n"
    command, before = [sys.executable, "-I", "-c", whole], limit if sys.platform != "win32" else None
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=WAIT_S,
            env={},
            cwd="/", check=False, preexec_fn=before, start_new_session=True,
        )  # fmt: skip
    except (subprocess.TimeoutExpired, ValueError):  # ValueError: code with a null byte
        return False
    return done.returncode == PASSED
