"""Chat templates that would run for hours or fill the memory are refused in one line; others are rendered as before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers

from paceline.errors import PromptError, way_out
from paceline.model.text import chat_template
from paceline.model.text.tokenizer import Tokenizer
from paceline.serve.http.failures import RequestRefused

MESSAGES = [{"role": "user", "content": "hi"}]
TWICE = "{% set ns = namespace(x=START) %}{% for i in range(24) %}{% set ns.x = STEP %}{% endfor %}"
NESTED = TWICE.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]")


def render(template: str) -> str:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    return Tokenizer(backend, chat_template=template).apply_chat_template(MESSAGES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(6000) %}{% for j in range(6000) %}{% endfor %}{% endfor %}",
        "{% for i in range(4000) %}{% for j in range(6000) if j < 0 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(21) }}",
        "{% for i in range(100) %}{% set x = range(99999) | map('upper') | list %}{% endfor %}",
    ],
)
def test_time_is_bounded(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word written; the same with more nines would take days."""
    monkeypatch.setattr(chat_template, "MAX_S", 0.1)
    with pytest.raises(PromptError, match="more than 0.1 s"):
        render(template)


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10001000 }}",
        "{{ 10001000 * 'a' }}",
        "{{ 'abcdefghijkl' * 1000000 }}",
        "{{ [1] * 1000000 }}",
        "{% for i in range(1100) %}{% for j in range(10) %}" + "0123456789" * 100 + "{% endfor %}{% endfor %}",
        "{% for i in range(1100) %}{{ '0123456789' * 1000 }}{% endfor %}",
        "{% set x %}{% for i in range(1100) %}{{ '0123456789' * 1000 }}{% endfor %}{% endset %}",
        TWICE.replace("START", "'a'").replace("STEP", "ns.x + ns.x"),
        TWICE.replace("START", "'a'").replace("STEP", "ns.x ~ ns.x"),
        TWICE.replace("START", "[1]").replace("STEP", "ns.x + ns.x"),
        TWICE.replace("START", "99").replace("STEP", "ns.x * ns.x"),
        NESTED + "{{ ns.x }}",
        NESTED + "{{ ns.x | tojson }}",
        NESTED + "{{ ns.x | string | length }}",
        NESTED + "{{ ('a' ~ ns.x) | length }}",
        NESTED + "{% set old = ns.x %}" + NESTED + "{{ old == ns.x }}",
        "{{ '%20000000d' % 1 }}",
        "{{ '%*d' % (20000000, 1) }}",
        "{{ '%20000000d' | format(1) }}",
        "{{ '{:>20000000}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=20000000) }}",
        "{{ 'a'.center(20000000) }}",
        "{{ 'a' | center(20000000) }}",
        "{{ 'a'.zfill(20000000) }}",
        "{{ ('a' * 5000).replace('a', 'b' * 5000) }}",
        "{{ ('a' * 5000) | replace('a', 'b' * 5000) }}",
        "{{ ('a' * 5000).join(['x'] * 5000) }}",
        "{{ range(5000) | map('string') | join('a' * 5000) }}",
        "{{ ['a' * 5000] * 5000 }}",
        "{{ ('\n' * 5000) | indent(5000) }}",
        "{{ [1, 2] | tojson(indent=20000000) }}",
        "{{ 5 | round(20000000, 'floor') }}",
        "{{ [1] | batch(20000000, 0) | list | length }}",
        "{{ ([[1]] * 9000) | sum(start=[]) | length }}",
        "{{ lipsum(n=2) }}",
        "{{ 'é'.encode('punycode') }}",
        "{# " + "x" * 300_000 + " #}",
    ],
)
def test_size_is_bounded(template: str) -> None:
    with pytest.raises(PromptError, match="chat template") as caught:
        render(template)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'role: ' ~ messages[0].role ~ '!' * 3 }}", "role: user!!!"),
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '\n' if not loop.last }}{% endfor %}", "1/1"),
        ("{{ '%s and %5.1f%%' % ('a', 2.25) }}|{{ '{:>4}{}'.format(1, 'b') }}", "a and   2.2%|   1b"),
        ("{{ messages | map(attribute='content') | join(', ') }}", "hi"),
        ("{{ 'a</think>b'.split('</think>')[-1].lstrip('\n') | replace('b', 'c') | upper }}", "C"),
        ("{{ {'time': 1700000000, 'a': [1, None]} | tojson(indent=4) | length }}", "68"),
        (
            "{% set ns = namespace(n=0) %}{% for i in range(2000) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            "1999000",
        ),
        ("{{ messages[0] == {'role': 'user', 'content': 'hi'} }}{{ none }}{{ 1.5 }}{{ [1] }}{{ x }}", "TrueNone1.5[1]"),
        ("{% macro f(x, y='-') %}{{ x ~ y ~ caller() }}{% endmacro %}{% call f('a') %}b{% endcall %}", "a-b"),
        ("{{ 'x' in 'xyz' and 'role' in messages[0] and 3 is divisibleby(3) }}", "True"),
    ],
)
def test_ordinary_templates_are_rendered_as_before(template: str, text: str) -> None:
    assert render(template) == text


@pytest.mark.slow
def test_limits_are_of_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any thread: neighbours that are refused take nothing from the others, and what was spent is forgotten."""
    monkeypatch.setattr(chat_template, "MAX_S", 0.2)
    hostile, good = (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ '0123456789' * 600000 }}",
    )

    def outcome(template: str) -> int:
        try:
            return len(render(template))
        except PromptError:
            return -1

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(outcome, [hostile, good, good] * 3)) == [-1, 6_000_000, 6_000_000] * 3


def test_small_powers_are_computed_and_large_ones_refused() -> None:
    assert chat_template.ChatTemplate("{{ 2**3 }} {{ 2**-1 }} {{ 1**99999 }} {{ 0.5**2 }}").render({}) == "8 0.5 1 0.25"
    for power in ("2**99999", "(2**4000)**2"):
        with pytest.raises(PromptError, match="builds too large a number"):
            chat_template.ChatTemplate("{{ " + power + " }}").render({})


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no system') }}"])
def test_http_clients_are_told_of_their_own_way_out(template: str | None) -> None:
    """--raw is an option of the command line."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    with pytest.raises(PromptError, match="chat template") as caught, way_out("use --raw"):
        Tokenizer(backend, chat_template=template).apply_chat_template(MESSAGES)
    assert str(caught.value).endswith(" or use --raw")
    message = RequestRefused.of(caught.value).message
    assert "--raw" not in message and "/v1/completions" in message


@pytest.mark.parametrize("template", ["{{ cycler() }}", "{{ messages[0].content | truncate(1) }}"])
def test_arguments_that_jinja_itself_does_not_expect(template: str) -> None:
    """A RuntimeError and an AssertionError."""
    with pytest.raises(PromptError, match=r"the model's chat template failed \(.*\): check the messages"):
        render(template)
