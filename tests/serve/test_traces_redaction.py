"""Redacted text in traces: cut from answers, replaced in prompts, dropped where neither helps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_llm import tiny_model
from trace_files import BYTES, MAIL, rows, sequence, writer, written

from paceline.model.text.tokenizer import Tokenizer
from paceline.serve.admin.redaction import Redactor
from paceline.types import GrammarSpec


@pytest.mark.parametrize(
    ("prompt", "answer", "kept_prompt", "kept_answer", "reason"),
    [
        ("Who?", "Nobody at all.", "Who?", "Nobody at all.", "stop"),
        ("Who?", "Ask jane.doe+x@mail.example.org now", "Who?", "Ask ", "redacted"),
        ("I am jo@a.de, née Zoë.", "Hi jo@a.de", "I am [redacted], née Zoë.", "", "redacted"),
        ("a@b.cd", "ok", "[redacted]", "", "redacted"),
        ("A a@b.cd and e@f.gh.", "ok", "A [redacted] and [redacted]", "", "redacted"),
        ("é✓ jo", "@a.de ✓", "é✓ [redacted]", "", "redacted"),
    ],
)
def test_redaction(tmp_path: Path, prompt: str, answer: str, kept_prompt: str, kept_answer: str, reason: str) -> None:
    """A match in the answer ends it; a match in the prompt leaves a prompt alone."""
    (row,) = written(tmp_path, sequence(prompt, answer), redact=[MAIL])
    assert BYTES.decode(row["prompt_ids"]) == kept_prompt
    assert BYTES.decode(row["answer_ids"]) == row["text"] == kept_answer
    assert row["finish_reason"] == reason
    assert row["prompt_ids"][0] == BYTES.bos_token_id, "special tokens stay"


def test_redaction_with_a_real_tokenizer_and_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(tiny_model(tmp_path / "model"))
    messages = [
        {"role": "system", "content": "Mail help@example.com ✓"},
        {"role": "user", "content": "I am a@b.cd, né?"},
    ]
    prompt_ids = tokenizer.encode_chat(messages)
    clean = [{**message, "content": Redactor([MAIL], tokenizer).text(message["content"])} for message in messages]
    redacted = Redactor([MAIL], tokenizer).tokens(prompt_ids, tokenizer.encode("Hello"))
    assert redacted == (tokenizer.encode_chat(clean), []), "the template's own tokens are untouched"


def test_redaction_reaches_tags_and_parameters(tmp_path: Path) -> None:
    seq = sequence(stop=("jo@a.de",), grammar=GrammarSpec("json_schema", '{"const": "x@y.zz"}'))
    one = writer(tmp_path, redact=[MAIL, r"\b\d{4,}\b"])
    one.offer(seq, "stop", "team-jo@a.de 123456")
    one.close()
    (row,) = rows(tmp_path)
    assert row["tag"] == "[redacted] [redacted]" and json.loads(row["sampling"])["stop"] == ["[redacted]"]
    (path,) = tmp_path.iterdir()
    assert b"a.de" not in path.read_bytes() and "y.zz" not in row["sampling"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (r"bob@example\.com|eve@x\.org", "[redacted]"),
        (r"bob\x40example\u002ecom", "[redacted]"),
        (r'{"enum": ["M\u00fcller", "M\ud83d\ude00"]}', "[redacted]"),
        (r'{"description": "for:\nMeyer"}', "[redacted]"),
        (r'{"pattern": "bob@example\\.com"}', "[redacted]"),
        (r"Müller|\d+\.\w", r"[redacted]|\d+\.\w"),
        ("aMüller", "[redacted]"),
        (r"\[a\]|\ud800", r"\[a\]|\ud800"),
    ],
)
def test_escaped_text_in_grammars_is_redacted(text: str, kept: str) -> None:
    """Choices are a regex, whose dots are escaped; JSON may escape whatever is not ASCII."""
    redactor = Redactor([r"[\w.+-]+@[\w-]+\.[\w.-]+", "a\\[red", "Müller", r"\bMeyer"], BYTES)
    assert redactor.value({"grammar": {"kind": "regex", "text": text}})["grammar"]["text"] == kept


def test_what_cannot_be_redacted_is_not_kept(tmp_path: Path) -> None:
    """A pattern that matches around the placeholder too; and one that sees only text without special tokens."""
    one = writer(tmp_path, redact=[r"secret|a\[red"])
    one.offer(sequence("asecret"), "stop")
    split = sequence()
    split.tokens = [256, *b"a@", 257, *b"b.cd"]
    split.prompt_len = 3
    two = writer(tmp_path, redact=[MAIL])
    two.offer(split, "stop")
    for each in (one, two):
        each.close()
        assert each.dropped["redaction"] == 1 and each.written == 0
    assert not rows(tmp_path)
