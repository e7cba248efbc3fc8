"""Scorers: each computes the score of one answer, from 0 (wrong) to 1 (right).

| kind | fields of the scorer | score |
|---|---|---|
| exact | `answer` | 1 if the texts are equal, apart from outer whitespace and, with `ignore_case`, case |
| numeric | `answer`, `tolerance` | 1 if the text's last number equals it |
| regex | `pattern` | 1 if it is found; with `full`, if it matches the whole text |
| json | `fields`, `schema` | share of the fields that are equal; 0 for invalid JSON or a schema violation |
| code | `tests`, and `prompt`, `entry_point` as in HumanEval | 1 if all tests pass in the sandbox |
| judge | `reference`, `criteria` | the judge's preference: 1 the answer, 0 the reference, 0.5 neither |

The kind `code` needs a `Sandbox`, the kind `judge` a `Judge`; pass them to `run_suite`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.bench.tasks import NUMBER, code_of
from paceline.errors import ConfigError, PromptError, needing

if TYPE_CHECKING:
    from paceline.loop.evals.sandbox.run import Sandbox

Row = dict[str, Any]
Verdict = tuple[float, str]
"""Score of an answer and the reason for it; the reason is "" for a score of 1."""
MOST_SCANNED = 100_000
"""Number of characters at the beginning or end of an answer that are searched at most."""
RIGHT: Verdict = (1.0, "")


def score_exact(scorer: Row, text: str) -> Verdict:
    answer, right = text.strip(), str(scorer["answer"]).strip()
    if scorer.get("ignore_case"):
        answer, right = answer.casefold(), right.casefold()
    return RIGHT if answer == right else (0.0, "another text")


def score_numeric(scorer: Row, text: str) -> Verdict:
    """Compares the last number in the answer `text` with `scorer["answer"]`. Returns (score, reason): 1.0 and "" if
    they differ by at most `scorer["tolerance"]` [default: 0], else 0.0. Commas are ignored: 1,234 is 1234."""
    numbers = NUMBER.findall(text[-MOST_SCANNED:])
    if not numbers:
        return 0.0, "no number"
    value, right = float(numbers[-1].replace(",", "")), float(scorer["answer"])
    near = math.isclose(value, right, rel_tol=0.0, abs_tol=float(scorer.get("tolerance", 0.0)) + 1e-9 * abs(right))
    return RIGHT if near else (0.0, f"{value:g}, not {right:g}")


def score_regex(scorer: Row, text: str) -> Verdict:
    text = text[:MOST_SCANNED]
    match = re.fullmatch(scorer["pattern"], text.strip()) if scorer.get("full") else re.search(scorer["pattern"], text)
    return RIGHT if match else (0.0, "no match")


def score_json(scorer: Row, text: str) -> Verdict:
    """Compares the first JSON object of the answer `text` with `scorer["fields"]`. Returns (score, reason). The score
    is 0 without an object, or if the object violates `scorer["schema"]`. Otherwise it is the share of the fields that
    have an equal value in the object; 1 if no fields are given."""
    value = object_in(text)
    if value is None:
        return 0.0, "no JSON object"
    if schema := scorer.get("schema"):
        violation = next(_jsonschema().Draft202012Validator(schema).iter_errors(value), None)
        if violation:
            return 0.0, f"schema: {violation.message[:120]}"
    fields: Row = scorer.get("fields") or {}
    wrong = [name for name, right in fields.items() if name not in value or not _same(value[name], right)]
    return (1.0 - len(wrong) / len(fields), f"wrong: {', '.join(wrong)}") if wrong else RIGHT


def _same(one: Any, two: Any) -> bool:
    """Deep JSON equality: true differs from 1, 1.0 does not."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(value, two[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_same, one, two))
    return one == two and isinstance(one, bool) == isinstance(two, bool)


def object_in(text: str) -> Row | None:
    """Returns the first JSON object in the text, or None."""
    at = text.find("{")
    while 0 <= at < MOST_SCANNED:
        try:
            return json.JSONDecoder().raw_decode(text, at)[0]
        except (ValueError, RecursionError):
            at = text.find("{", at + 1)
    return None


def _jsonschema() -> Any:
    with needing(ConfigError, "answers are held against schemas with jsonschema: pip install 'paceline[evals]'"):
        import jsonschema
    return jsonschema


def program_of(scorer: Row, text: str) -> str:
    """Returns the program that is run to score an answer: the code in the answer `text`, then `scorer["tests"]`.

    A scorer with an "entry_point" (name of a function) has HumanEval's format: "prompt" is the header of that function,
    and "tests" defines `check`. The program then ends with a call of `check` on the function.
    """
    code, prompt, entry = code_of(text), scorer.get("prompt", ""), scorer.get("entry_point")
    if not entry:
        return f"{code}\n\n{scorer['tests']}\n"
    whole = code if f"def {entry}" in code else prompt + code
    return f"{prompt}    pass\n\n{whole}\n\n{scorer['tests']}\n\ncheck({entry})\n"


def score_code(scorer: Row, text: str, sandbox: Sandbox) -> Verdict:
    ran = sandbox.run(program_of(scorer, text))
    return RIGHT if ran.passed else (0.0, ran.why)


SCORERS: dict[str, Callable[[Row, str], Verdict]] = {
    "exact": score_exact,
    "numeric": score_numeric,
    "regex": score_regex,
    "json": score_json,
}
"""Kind of scorer -> its function, for the kinds that need only the text."""
TEXTS = ("tests", "prompt", "entry_point", "criteria")
"""Fields of scorers that must be texts."""
NEEDED: dict[str, tuple[str, ...]] = {
    "exact": ("answer",),
    "numeric": ("answer",),
    "regex": ("pattern",),
    "json": (),
    "code": ("tests",),
    "judge": ("reference",),
}
"""Kind of scorer -> its required fields."""


def check_scorer(scorer: Row, where: str) -> None:
    """Raises PromptError for an invalid scorer. `where`: the scorer's place, such as file and line, for the message."""
    kind = scorer.get("kind")
    if not isinstance(kind, str) or kind not in NEEDED:
        raise PromptError(f"{where}: there is no scorer {kind!r}: choose from {', '.join(NEEDED)}")
    missing = [name for name in NEEDED[kind] if name not in scorer]
    if missing:
        raise PromptError(f"{where}: scorer {kind} needs {missing[0]!r}")
    try:
        if kind == "numeric":
            float(scorer["answer"])
            float(scorer.get("tolerance", 0.0))
        elif kind == "regex":
            re.compile(scorer["pattern"])
        elif kind == "json":
            _check_json(scorer)
        elif kind in ("code", "judge"):
            no_text = [name for name in TEXTS if not isinstance(scorer.get(name) or "", str)]
            if no_text:
                raise ValueError(f"{no_text[0]} must be a text")
    except (TypeError, ValueError, OverflowError, re.error) as error:
        raise PromptError(
            f"{where}: scorer {kind} cannot be used ({' '.join(str(error).split())}): correct it"
        ) from error


def _check_json(scorer: Row) -> None:
    if not scorer.get("fields") and not scorer.get("schema"):
        raise ValueError("it has neither fields nor a schema")
    if not isinstance(scorer.get("fields") or {}, dict):
        raise ValueError("fields must be an object")
    if schema := scorer.get("schema"):
        jsonschema = _jsonschema()
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ValueError(error.message) from error
