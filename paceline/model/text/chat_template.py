"""Renders chat templates, which are untrusted programs, in Jinja's sandbox with limits on time, text and size.

`Tokenizer.apply_chat_template` compiles and renders templates, in any thread. Loops, calls and filters count as steps,
and time is checked every few steps. The size of a result is estimated before it is built.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from types import GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from paceline.errors import TemplateError

MAX_TEMPLATE = 200_000
"""Maximum characters of a template; the longest known have 30,000."""
MAX_TEXT = 10_000_000
"""Maximum characters of a rendered prompt, and of every intermediate text."""
MAX_ITEMS = 250_000
"""Maximum elements of a list or dictionary, including nested ones."""
MAX_BITS = 4096
"""Maximum bits of an integer."""
MAX_S = 2.0
"""Maximum seconds of processor time for one prompt; common templates take a thousandth of a second."""

STEP, CONCAT, WEIGHED = "paceline step", "paceline concat", "paceline weighed"
"""Internal filters: no template can use a name with a space."""
REFUSED = frozenset({"decode", "encode", "format_map", "maketrans", "to_bytes", "translate"})
HTML_FILTERS = ("pprint", "urlize", "wordwrap", "xmlattr")
"""Jinja filters that may take very long and that no prompt needs; they are removed."""
GROWING = frozenset(
    {"batch", "center", "expandtabs", "indent", "ljust", "replace", "rjust", "round", "slice", "tojson", "zfill"}
)
"""Methods and filters with a result that may be as long as the product of their arguments."""
FIELD = re.compile(r"%(?:\([^)]{0,99}\))?([-+ #.*\d]*)|\{([^{}]*)")
"""Regular expression for one field of a format string, with its width."""
STRUCTURAL = frozenset(
    {"count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr", "reverse"}
    | {"select", "selectattr", STEP, WEIGHED}
)
"""Filters that read none of the elements, or one after another."""


class ChatTemplate:
    """A compiled chat template. Raises TemplateError if its source is invalid."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE:
            fault = f"the model's chat template has {len(source):,} characters, more than {MAX_TEMPLATE:,}"
            raise TemplateError(fault, "choose a model with a shorter one")
        self._template = _one_line_errors(lambda: _environment().from_string(source))

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render the template with these variables; returns the prompt text. Raises TemplateError if the template
        rejects the messages, fails, or exceeds a limit on its time, text or size."""
        return _one_line_errors(lambda: self._template.render(variables))


def _one_line_errors(work: Callable[[], Any]) -> Any:
    """Call `work`, converting template errors to one-line TemplateErrors."""
    _spent.begin()
    try:
        return work()
    except Exception as error:  # Jinja's filters raise almost anything, such as AssertionError for an argument
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        fault = f"the model's chat template failed ({reason})"
        raise TemplateError(fault, "check the messages' roles and contents") from error


class _Spent(threading.local):
    """Steps, characters and time used by the current rendering of this thread."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.num_steps, self.num_chars, self.end_s = 0, 0, time.thread_time() + MAX_S

    def step(self, num_chars: int = 0) -> None:
        self.num_steps += 1
        self.num_chars += num_chars
        if self.num_chars > MAX_TEXT:
            raise SecurityError(f"it writes more than {MAX_TEXT:,} characters")
        if not self.num_steps % 16 and time.thread_time() > self.end_s:
            raise SecurityError(f"it takes more than {MAX_S:g} s")


_spent = _Spent()


def _weigh(value: Any) -> int:
    """Number of characters and elements of a nested value, with repeated ones. Raises SecurityError beyond the
    limits."""
    num_items = num_chars = 0
    left = [value]
    while left:
        one = left.pop()
        num_items += 1
        if isinstance(one, str):
            num_chars += len(one)
        elif isinstance(one, dict):
            left += one.keys()
            left += one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            left += one
        elif isinstance(one, Namespace):
            raise SecurityError("a namespace is no value to write or compare")
        if num_items + len(left) > MAX_ITEMS or num_chars > MAX_TEXT:
            raise SecurityError("a value is too large")
    return num_items + num_chars


def _checked(value: Any) -> Any:
    """Return the value. Raises SecurityError if it is longer than the limits."""
    if isinstance(value, (str, bytes)):
        if len(value) > MAX_TEXT:
            raise SecurityError(f"a text has more than {MAX_TEXT:,} characters")
    elif isinstance(value, (list, tuple, dict)) and len(value) > MAX_ITEMS:
        raise SecurityError(f"a list has more than {MAX_ITEMS:,} elements")
    return value


def _check_growth(name: str, values: list[Any]) -> None:
    """Raises SecurityError for a call whose result would be too large; `values` are the method's or filter's inputs."""
    if name in REFUSED or (name == "sum" and any(map(_is_sized, values[1:]))):
        raise SecurityError(f"{name!r} is not for chat templates")
    if name == "join":
        items, separator = (
            sorted(values[:2], key=lambda value: isinstance(value, str)) if len(values) > 1 else (values[0], "")
        )
        size = _weigh(items) + len(items) * len(separator) if isinstance(separator, str) and _is_sized(items) else 0
    elif name == "replace" and len(values) > 2 and all(isinstance(value, str) for value in values[:3]):
        size = len(values[0]) + values[0].count(values[1]) * len(values[2])
    elif name == "format" and isinstance(values[0], str):
        size = _formatted_size(values[0], values[1:])
    elif name in GROWING:
        size = math.prod(max(1, abs(value) if isinstance(value, int) else _weigh(value)) for value in values)
    else:
        size = 0 if name in STRUCTURAL else sum(_weigh(value) for value in values if _is_sized(value))
    if size > MAX_TEXT:
        raise SecurityError(f"{name!r} would build too large a value")


def _is_sized(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict))


def _formatted_size(form: str, values: list[Any]) -> int:
    """Maximum number of characters of a format string's result. Raises SecurityError for a width of `*`."""
    fields = [percent or braces for percent, braces in FIELD.findall(form)]
    if any("*" in field for field in fields):
        raise SecurityError("a width of '*' is not for chat templates")
    widest = max((int(digits) for field in fields for digits in re.findall(r"\d{1,9}", field)), default=0)
    if re.search(r":[^{}]*\{", form):  # a width taken from the values
        widest += sum(abs(value) for value in values if isinstance(value, int))
    return len(form) + (form.count("%") + form.count("{")) * (widest + sum(map(_weigh, values)))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter or test to count a step and limit the result; keeps Jinja's attributes of the function."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **options: Any) -> Any:
        _spent.step()
        given = [
            list(itertools.islice(value, MAX_ITEMS + 1)) if isinstance(value, GeneratorType) else value
            for value in args
        ]
        _check_growth(name, [*given[skipped:], *options.values()])
        return _checked(function(*given, **options))

    return bounded


@pass_context
def _stepped(_context: Any, num_chars: int) -> None:
    """Count a step. Takes the context so that Jinja calls it on every pass rather than once at compile time."""
    _spent.step(num_chars)


@pass_context
def _written(_context: Any, value: Any) -> str:
    """Jinja's `finalize`, applied to every value that is output."""
    text = _text(value)
    _spent.step(len(text))
    return text


def _text(value: Any) -> str:
    return str(_weighed(value))


def _concat(values: list[Any]) -> str:
    texts = [_text(value) for value in values]
    if sum(map(len, texts)) > MAX_TEXT:
        raise SecurityError(f"a text has more than {MAX_TEXT:,} characters")
    return "".join(texts)


def _weighed(value: Any) -> Any:
    if not isinstance(value, str):
        _weigh(value)
    return value


class _Steps(NodeTransformer):
    """Inserts steps into loop bodies, macros and constant text. Routes operations that Jinja compiles to plain Python
    through filters."""

    def visit_Output(self, node: nodes.Output) -> Any:
        self.generic_visit(node)
        num_chars = sum(len(piece.data) for piece in node.nodes if isinstance(piece, nodes.TemplateData))
        return [_step(num_chars), node] if num_chars else node

    def visit_For(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body.insert(0, _step(0))
        return node

    visit_Macro = visit_CallBlock = visit_Block = visit_For

    def visit_Concat(self, node: nodes.Concat) -> Any:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), CONCAT)

    def visit_Compare(self, node: nodes.Compare) -> Any:
        """Nested values may take as long to compare as to output."""
        self.generic_visit(node)
        if not isinstance(node.expr, nodes.Const) and not all(isinstance(one.expr, nodes.Const) for one in node.ops):
            node.expr = _filtered(node.expr, WEIGHED)
        return node

    def visit_Pair(self, node: nodes.Pair) -> Any:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filtered(node.key, WEIGHED)
        return node


def _filtered(node: nodes.Expr, name: str) -> Any:
    return nodes.Filter(node, name, [], [], None, None)


def _step(num_chars: int) -> Any:
    return nodes.ExprStmt(_filtered(nodes.Const(num_chars), STEP))


def _is_large_power(base: Any, exponent: Any) -> bool:
    """True if an integer power has more than MAX_BITS bits; other powers have a fixed size."""
    is_whole = isinstance(base, int) and isinstance(exponent, int)
    return is_whole and abs(base) > 1 and base.bit_length() * max(exponent, 0) > MAX_BITS


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        changed = _Steps().visit(source)
        changed.set_environment(self)
        return super()._generate(changed, *args, **options)

    def call(__self, __context: Any, __obj: Any, *args: Any, **options: Any) -> Any:  # parameter names are Jinja's
        _spent.step()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps `format`
        if isinstance(owner, (str, bytes, int)):
            _check_growth(__obj.__name__, [owner, *args, *options.values()])
        return _checked(super().call(__context, __obj, *args, **options))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(value) if hasattr(value, "__len__") else None for value in (left, right)]
        numbers = [value for value in (left, right) if isinstance(value, int)]
        if any(value.bit_length() > MAX_BITS for value in numbers) or (
            operator == "**" and _is_large_power(left, right)
        ):
            raise SecurityError(f"operator {operator} builds too large a number")
        if operator == "*" and any(sizes) and numbers:
            most = MAX_TEXT if isinstance(left, str) or isinstance(right, str) else MAX_ITEMS
            if sum(size or 0 for size in sizes) * max(numbers) > most:
                raise SecurityError("operator * builds too large a value")
        if operator == "%" and isinstance(left, str):
            _check_growth("format", [left, *(right if isinstance(right, tuple) else [right])])
        return _checked(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, _weighed(argument) if isinstance(argument, tuple) else argument)


class _Generation(Extension):
    """Accepts `{% generation %}`, which marks the assistant's text for training; it has no effect on prompts."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own attribute)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    """The sandbox, with the settings, filters and functions that Transformers gives chat templates."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_written
    )
    environment.filters["tojson"] = _tojson  # jinja2's version escapes HTML
    for name in HTML_FILTERS:
        del environment.filters[name]
    for functions in (environment.filters, environment.tests):
        functions |= {name: _bounded(name, function) for name, function in functions.items()}
    environment.filters |= {STEP: _stepped, CONCAT: _concat, WEIGHED: _weighed}
    del environment.globals["lipsum"]
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment
