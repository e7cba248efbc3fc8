"""The programming prompts that the drafter of qwen2.5-coder-0.5b is trained on: rewritten, put together, and
self-written ones.

    python recipes/coder_prompts.py --mbpp mbpp_train.jsonl --unseen humaneval.jsonl --unseen mbpp_test.jsonl \\
        --self-written 2000 --signatures 1200 --out runs/coder/prompts

Writes tasks.jsonl (MBPP's training tasks), functions.jsonl (the same as a signature with a docstring, and tasks put
together from parts, as `default_prompts.py` makes them), self-written.jsonl (what the target itself writes as a user,
behind beginnings given here) and signatures.jsonl (functions to complete, whose signature and docstring the target
writes). A code model has read the public test sets and may write them down: of each source, prompts that share a run of
words with a file of --unseen, or name one of its functions, are left out and counted. Killed, the same command goes on.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from default_prompts import functions_from_mbpp, functions_from_parts, write_lines

from paceline import LLM, SamplingParams
from paceline.runs.folder import drop_cut_line
from paceline.train.answers.self_written import PromptWriter, user_turn

SOLUTION = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
"""As HumanEval's tasks are asked (the DFlash paper's format)."""
OPENERS = (
    *(SOLUTION + start for start in ("def ", "from typing import List\n\n\ndef ", "\ndef ", "import math\n\ndef ", "def is_")),
    "Write a Python function that", "Write a function to", "Write a python function to find",
    "Write a Python function to check", "Write a Python class", "Write a Python program that reads",
    "Write a Python script", "Implement", "Complete the function:\n", "Given a list of", "Given a string",
    "Given a dictionary", "Given two", "Here is my code:\n```python\n", "Fix the bug in",
    "Refactor this function:\n```python\n", "Explain what this code does:\n```python\n", "Add a docstring to",
    "Write unit tests for", "How do I", "What is the difference between", "Write a SQL query",
    "Write a JavaScript function", "Write a C++ function", "Write a Java method", "Write a Go function",
    "Write a bash script", "Write a regular expression", "Create a", "",
)  # fmt: skip
IMPORTS = (
    "",
    "from typing import List\n\n\n",
    "from typing import List, Optional, Tuple\n\n\n",
    "import math\n\n\n",
    "",
)
NAMES = (
    "", "is_", "count_", "find_", "get_", "max_", "sum_", "remove_", "sort_", "check_", "string_", "words_", "digits_",
    "list_",
    "next_", "split_", "encode_", "valid_", "number_of_", "replace_", "matrix_", "even_", "select_",
)  # fmt: skip
SENTENCES = (
    "Given a", "Return", "You are given", "Check if", "Find the", "For a given", "Write a function that takes",
    "Create a function", "This function", "Count", "Returns the", "In this task, you", "Your task is to", "Given two",
    "Implement",
)  # fmt: skip
PER_BATCH = 32
SAME_WORDS = 12
"""So many words in a row that also stand in an unseen text, or all the words of a shorter one, leave a prompt out."""


class Unseen:
    """Texts that nobody may learn from."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._runs, self.names = set[tuple[str, ...]](), set[str]()
        for file in files:
            for row in rows_of(file):
                self._runs.update(runs_of(str(row.get("prompt") or row.get("text"))))
                code = "\n".join([str(row.get("prompt", "")), str(row.get("code", ""))])
                self.names.update(name for name in re.findall(r"^def (\w+)", code, re.MULTILINE))

    def reason(self, prompt: str) -> str | None:
        """Why a prompt is left out, or None."""
        if not self._runs.isdisjoint(runs_of(prompt)):
            return "words of an unseen prompt"
        if not self.names.isdisjoint(re.findall(r"def (\w+)", prompt)):
            return "a function of the name of an unseen one"
        return None


def rows_of(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def runs_of(text: str) -> Iterator[tuple[str, ...]]:
    """All runs of `SAME_WORDS` words, in small letters and without punctuation; a shorter text is one run."""
    words = re.findall(r"\w+", text.lower())
    return (tuple(words[place : place + SAME_WORDS]) for place in range(max(len(words) - SAME_WORDS, 0) + 1))


def kept(rows: Iterable[dict[str, Any]], unseen: Unseen, source: str) -> list[dict[str, Any]]:
    """Those that may be learned from; says how many were left out, and why."""
    found, left_out = [], Counter[str]()
    for row in rows:
        reason = unseen.reason(str(row["prompt"]))
        left_out.update([reason] if reason else [])
        found += [] if reason else [row]
    print(f"{source}: {len(found)} kept, left out {dict(left_out)}")
    return found


def written_signatures(llm: LLM, number: int, known: list[dict[str, Any]], file: Path) -> None:
    """Functions to complete, appended to `file` until it holds `number`: at temperature 1 the target writes a signature
    where a user would speak, then a docstring. No name comes twice, here or in `known`."""
    drop_cut_line(file)
    rows = list(rows_of(file)) if file.exists() else []
    names = {name for row in [*known, *rows] for name in re.findall(r"def (\w+)", row["prompt"])}
    prefix, tries = user_turn(llm.tokenizer).prefix, 2 * len(rows)
    with file.open("a", encoding="utf-8") as lines:
        while len(rows) < number and tries < 20 * number:
            stubs, tries = stubs_of(llm, prefix, tries), tries + PER_BATCH
            for stub in stubs:
                name = name_of(stub)
                if name is None or name in names:
                    continue
                names.add(name)
                rows.append({"id": f"signature-{len(rows)}", "prompt": stub})
                lines.write(json.dumps(rows[-1]) + "\n")
                lines.flush()
            print(f"{len(rows)} of {number} signatures after {tries} tries", file=sys.stderr, flush=True)


def stubs_of(llm: LLM, prefix: str, number: int) -> list[str]:
    """At most PER_BATCH signatures with a docstring, every second one with examples; another `number` makes other
    ones."""
    places = range(number, number + PER_BATCH)
    openers = [f"{IMPORTS[place % len(IMPORTS)]}def {NAMES[place % len(NAMES)]}" for place in places]
    heads = [
        f'{head}:\n    """ {SENTENCES[place % len(SENTENCES)]}'
        for place, head in zip(places, continued(llm, prefix, openers, ":\n", 64, number), strict=False)
    ]
    first_lines = [
        re.sub(r"def (\w+)(.*)", r"def \1\2\n    >>> \1(", line, flags=re.DOTALL)
        for line in continued(llm, prefix, heads[::2], "\n", 64, number)
    ]
    stubs = continued(llm, prefix, first_lines + heads[1::2], '"""', 128, number)
    return [f'{stub.rstrip()}\n    """\n' for stub in stubs]


def continued(llm: LLM, prefix: str, beginnings: list[str], stop: str, max_tokens: int, seed: int) -> list[str]:
    """Those of the beginnings that reach `stop`, up to it."""
    ids = [llm.tokenizer.encode(prefix + text, add_special_tokens=False) for text in beginnings]
    params = [
        SamplingParams(temperature=1.0, top_p=0.98, max_tokens=max_tokens, seed=seed + place, stop=(stop,))
        for place in range(len(ids))
    ]
    done = llm.generate_ids(ids, params)
    return [
        text + answer.text
        for text, answer in zip(beginnings, done, strict=True)
        if answer.finish_reason == "stop" and len(answer.token_ids) < max_tokens and "<|" not in answer.text
    ]


def name_of(stub: str) -> str | None:
    """Returns the name of the one function that a stub begins; None if it is not Python with ASCII text."""
    found = re.findall(r"def (\w+)\(", stub)
    try:
        ast.parse(stub)
    except SyntaxError:
        return None
    return found[0] if len(found) == 1 and stub.isascii() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen2.5-coder-0.5b")
    parser.add_argument("--mbpp", type=Path, required=True, help="MBPP's training rows, JSON lines")
    parser.add_argument(
        "--unseen", type=Path, action="append", default=[], help="prompts of a test set; may be repeated"
    )
    parser.add_argument("--self-written", type=int, default=2000, help="prompts that the target writes")
    parser.add_argument("--signatures", type=int, default=1200, help="functions to complete that the target writes")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    unseen = Unseen(given.unseen)
    tasks = [{"id": f"mbpp-{row['task_id']}", "prompt": row["text"]} for row in rows_of(given.mbpp)]
    write_lines(given.out / "tasks.jsonl", kept(tasks, unseen, "tasks"))
    functions = functions_from_mbpp(given.mbpp) + functions_from_parts()
    random.Random(0).shuffle(functions)
    write_lines(given.out / "functions.jsonl", kept(functions, unseen, "functions"))
    if not given.signatures and not given.self_written:
        return
    llm = LLM(given.target, drafter="none", max_batch=PER_BATCH, max_len=512)
    if given.signatures:
        written = given.out / "written-signatures.jsonl"
        written_signatures(llm, given.signatures, functions, written)
        write_lines(given.out / "signatures.jsonl", kept(rows_of(written), unseen, "signatures"))
    if given.self_written:
        written = given.out / "written.jsonl"
        num_done = 0

        def progress(_: str) -> None:
            nonlocal num_done
            num_done += 1
            if num_done % 100 == 0:
                print(f"{num_done} of {given.self_written} prompts written", file=sys.stderr, flush=True)

        PromptWriter(llm, written, openers=OPENERS).write(given.self_written, progress)
        write_lines(given.out / "self-written.jsonl", kept(rows_of(written), unseen, "self-written"))


if __name__ == "__main__":
    main()
