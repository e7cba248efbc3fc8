"""How one answer is scored, from 0 (wrong) to 1 (right): a table of kinds, each a pure function of what a case says and a text.

| kind | a case says | score |
|---|---|---|
| exact | `answer` | 1 when the texts are equal, spaces at the ends and `ignore_case` apart |
| numeric | `answer`, `tolerance` | 1 when the answer's last number is that one |
| regex | `pattern` | 1 when it is found; with `full` when it matches from end to end |
| json | `fields`, `schema` | share of the fields that are equal; 0 for what is no JSON object or breaks the schema |
| code | `tests`, and `prompt`, `entry_point` as HumanEval has them | 1 when all tests are carried out, in the sandbox |
| judge | `reference`, `criteria` | what a judge prefers: 1 the answer, 0 the reference, 0.5 neither |

`code` and `judge` need something beside the text: `run_suite` is given a `Sandbox`, a `Judge`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.bench.tasks import code_of
from paceline.errors import ConfigError, PromptError, needing

if TYPE_CHECKING:
    from paceline.loop.evals.sandbox.run import Sandbox

Row = dict[str, Any]
Verdict = tuple[float, str]
"""Score, and why it is not 1; "" where it is."""
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:[eE][+-]?\d+)?")
MOST_SCANNED = 100_000
"""Letters of an answer that a pattern is tried on."""
RIGHT: Verdict = (1.0, "")


def score_exact(said: Row, text: str) -> Verdict:
    ours, right = text.strip(), str(said["answer"]).strip()
    if said.get("ignore_case"):
        ours, right = ours.casefold(), right.casefold()
    return RIGHT if ours == right else (0.0, "another text")


def score_numeric(said: Row, text: str) -> Verdict:
    """The last number counts; 1,234 and 1234.0 are the same."""
    found = NUMBER.findall(text[-MOST_SCANNED:])
    if not found:
        return 0.0, "no number"
    value, right = float(found[-1].replace(",", "")), float(said["answer"])
    near = math.isclose(value, right, rel_tol=0.0, abs_tol=float(said.get("tolerance", 0.0)) + 1e-9 * abs(right))
    return RIGHT if near else (0.0, f"{value:g}, not {right:g}")


def score_regex(said: Row, text: str) -> Verdict:
    text = text[:MOST_SCANNED]
    found = re.fullmatch(said["pattern"], text.strip()) if said.get("full") else re.search(said["pattern"], text)
    return RIGHT if found else (0.0, "no match")


def score_json(said: Row, text: str) -> Verdict:
    """Of the first JSON object in the text, a Markdown block around it taken off."""
    value = object_in(text)
    if value is None:
        return 0.0, "no JSON object"
    if (schema := said.get("schema")) and (broken := breach(schema, value)):
        return 0.0, broken
    fields: Row = said.get("fields") or {}
    wrong = [name for name, right in fields.items() if name not in value or not _same(value[name], right)]
    return (1.0 - len(wrong) / len(fields), f"wrong: {', '.join(wrong)}") if wrong else RIGHT


def _same(one: Any, two: Any) -> bool:
    """Equal as JSON has it, in lists and objects too: true is not 1, and 1.0 is."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(value, two[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_same, one, two))
    return one == two and isinstance(one, bool) == isinstance(two, bool)


def object_in(text: str) -> Row | None:
    """The first JSON object that the text holds, whatever stands around it."""
    at = text.find("{")
    while 0 <= at < MOST_SCANNED:
        try:
            value = json.JSONDecoder().raw_decode(text, at)[0]
        except (ValueError, RecursionError):
            at = text.find("{", at + 1)
            continue
        return value if isinstance(value, dict) else None
    return None


def breach(schema: Row, value: Any) -> str:
    """What of the schema the value breaks, "" when nothing."""
    with needing(ConfigError, "answers are held against schemas with jsonschema: pip install 'paceline[evals]'"):
        import jsonschema
    error = jsonschema.Draft202012Validator(schema).iter_errors(value)
    first = next(iter(error), None)
    return f"schema: {first.message[:120]}" if first else ""


def program_of(said: Row, text: str) -> str:
    """The answer's code with the case's tests behind it, as HumanEval has them where there is an entry point."""
    code, prompt, entry = code_of(text), said.get("prompt", ""), said.get("entry_point")
    if not entry:
        return f"{code}\n\n{said['tests']}\n"
    whole = code if f"def {entry}" in code else prompt + code
    return f"{prompt}    pass\n\n{whole}\n\n{said['tests']}\n\ncheck({entry})\n"


def score_code(said: Row, text: str, sandbox: Sandbox) -> Verdict:
    done = sandbox.run(program_of(said, text))
    return RIGHT if done.passed else (0.0, done.why)


SCORERS: dict[str, Callable[[Row, str], Verdict]] = {
    "exact": score_exact,
    "numeric": score_numeric,
    "regex": score_regex,
    "json": score_json,
}
"""Those that need the text alone."""
NEEDED: dict[str, tuple[str, ...]] = {
    "exact": ("answer",),
    "numeric": ("answer",),
    "regex": ("pattern",),
    "json": (),
    "code": ("tests",),
    "judge": ("reference",),
}
"""By kind: what a case must say."""


def check_scorer(said: Row, where: str) -> None:
    """Raises PromptError when a case could not be scored."""
    kind = said.get("kind")
    if kind not in NEEDED:
        raise PromptError(f"{where}: there is no scorer {kind!r}: choose from {', '.join(NEEDED)}")
    missing = [name for name in NEEDED[kind] if name not in said]
    if missing:
        raise PromptError(f"{where}: scorer {kind} needs {missing[0]!r}")
    try:
        if kind == "numeric":
            float(said["answer"])
        elif kind == "regex":
            re.compile(said["pattern"])
        elif kind == "json":
            _check_json(said)
    except (TypeError, ValueError, re.error) as error:
        raise PromptError(f"{where}: scorer {kind} cannot be used ({' '.join(str(error).split())}): correct it") from error


def _check_json(said: Row) -> None:
    if not said.get("fields") and not said.get("schema"):
        raise ValueError("it has neither fields nor a schema")
    if not isinstance(said.get("fields") or {}, dict):
        raise ValueError("fields must be an object")
    if schema := said.get("schema"):
        with needing(ConfigError, "answers are held against schemas with jsonschema: pip install 'paceline[evals]'"):
            import jsonschema
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ValueError(error.message) from error
