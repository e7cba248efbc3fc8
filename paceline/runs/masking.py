"""Hides API keys, tokens and passwords in texts that are logged or stored, such as command lines. The time is
proportional to the length of the text: no pattern reads to the end of a text from many places in it.

masked_command(["audit", "http://h:1", "--api-key", "abc"])     # "audit http://h:1 --api-key ***"
masked("API_KEY=abc ./publish.sh http://me:abc@h")              # "API_KEY=*** ./publish.sh http://***@h"
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

MASK = "***"
OPTION = r"--?(?:[a-z0-9_-]+[_-])?(?:key|password|secret)|--?(?:(?:hf|api|auth|access|bearer)[_-])?token"
"""Options whose value is a secret: --api-key, --hf-token, ...; but not --mask-token or --api-key-file."""
IS_OPTION = re.compile(OPTION, re.IGNORECASE)
IS_MASKED = re.compile(r"([\w-]+=)?\*\*\*")
"""Words that a shell would quote only because of the asterisks."""
VARIABLE = r"\w*(?:KEY|TOKEN|PASSWORD|SECRET)|(?i:api_?key|(?:hf|api|auth|access)_token|password|secret)"
VALUE = r"""(?:\\?'[^']*'|"(?:\\[\s\S]|[^"\\])*"|\\"(?:\\\\\\"|\\[^"]|[^"\\])*\\?"|\\.?|[^\s'"\\])+"""
"""A shell's word, also within another text, where its quotes are \\' and \\"."""
LONE = r"(?:key|token)=(?=(?=[^\s'\"&]{0,256}\d)[^\s'\"&]{8}|[^\s'\"&()]{20})"
"""A variable that often holds an ordinary word or a token id, with a value that looks random."""
IN_TEXT = (
    (re.compile(r"\b(Bearer|Authorization:\s*\w+|(?:x-)?api-key:)\s+[^\s'\"]+", re.IGNORECASE), rf"\1 {MASK}"),
    (re.compile(rf"(?<![\w-])({OPTION})(=|\s+)(?!-){VALUE}", re.IGNORECASE), rf"\1\2{MASK}"),
    (re.compile(rf"\b({VARIABLE})={VALUE}"), rf"\1={MASK}"),
    (re.compile(r"([?&#](?:key|token|sig|signature)=)[^\s'\"&#]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(rf"(?<![\w.-])({LONE})[^\s'\"&]+"), rf"\1{MASK}"),
    (re.compile(r"(://)[^\s/'\"@]+@"), rf"\1{MASK}@"),
)
CURL = re.compile(r"\bcurl\b")
OF_CURL = re.compile(r"""(?<![\w-])(-[A-TV-Za-tv-z]*[uU]\s*|--(?:proxy-)?user(?:=|\s+))('[^']*'|"[^"]*"|[^\s'"]\S*)""")
"""curl's options with a user's name, and a password if it has a colon: -u, -U, --user, --proxy-user; also behind other
letters (-sSu)."""


def masked(text: str) -> str:
    """Returns the text with secrets replaced by "***": values of options such as --api-key, of variables such as
    API_KEY=..., of "Bearer ..." headers, of curl's options -u and -U, and of key=... in addresses; names and passwords
    in addresses; and values of key=... that look random."""
    if curl := CURL.search(text):  # first, as the next pattern: a variable's value may reach to the word after "\\ "
        text = text[: curl.end()] + OF_CURL.sub(_without_password, text[curl.end() :])
    for pattern, replacement in IN_TEXT:
        text = pattern.sub(replacement, text)
    return text


def _without_password(option: re.Match[str]) -> str:
    return option[1] + MASK if ":" in option[2] else option[0]


def masked_command(words: Iterable[str]) -> str:
    """Returns a command line as one text for a shell, with secrets replaced as by `masked`."""
    shown, is_secret = list[str](), False
    for word in words:
        name, equals, _ = word.partition("=")
        if is_secret:
            shown.append(MASK)
        elif equals and IS_OPTION.fullmatch(name):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(masked(word))
        is_secret = not is_secret and IS_OPTION.fullmatch(word) is not None
    return " ".join(word if IS_MASKED.fullmatch(word) else shlex.quote(word) for word in shown)
