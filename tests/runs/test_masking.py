"""Keys, tokens and passwords stay out of stored and logged texts."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.loop.record.config import RecordConfig
from paceline.net.streaming import Client
from paceline.runs.folder import RunFolder, record_of
from paceline.runs.masking import masked, masked_command


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "abc", "--limit", "3"],
        ["--api-key=abc", "--limit", "3"],
        ["--", "--admin-api-key", "abc", "--limit", "3"],
        ["--api_key", "abc", "--limit", "3"],
        ["--hf-token", "abc", "--limit", "3"],
        ["--key", "abc", "--limit", "3"],
        ["--api-key", "a b'c", "--limit", "3"],
        ["http://me:abc@host:1", "--limit", "3"],
        ["--restart", "KEY=abc ssh host './restart --api-key abc'", "--limit", "3"],
        ["--publish", "curl -H 'Authorization: Bearer abc' x", "--limit", "3"],
        ["--publish", "curl -H 'Authorization: Basic abc' -H 'X-Api-Key: abc' x", "--limit", "3"],
        ["--restart", "vllm serve --api-key 'abc'", "--limit", "3"],
        ["--publish", "curl -u me:abc http://h", "--limit", "3"],
        ["--publish", "curl -sS --user 'me:abc' http://h", "--limit", "3"],
        ["--publish", "curl -fsSLu me:abc http://h", "--limit", "3"],
        ["--publish", "curl -X POST -d 'a;b' -u me:abc http://h", "--limit", "3"],
        ["--publish", "curl -u 'me and you:abc' -U you:abc http://h", "--limit", "3"],
        ["--publish", "curl http://h/x#key=abc", "--limit", "3"],
        ["--publish", "curl 'http://h/x?a=1&token=abc'", "--limit", "3"],
        ["--publish", "echo key=abc-4f9Qz71", "--limit", "3"],
        ["--restart", "API_KEY='abc d' hf_token=\"abc\" ./restart", "--limit", "3"],
    ],
)
def test_a_command_line_is_stored_without_its_keys(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `audit` replaced its key, behind a first version of config.json with it."""
    monkeypatch.setattr(sys, "argv", ["paceline", "audit", *words])
    run = RunFolder.create("audit", {}, tmp_path / "run")
    texts = [file.read_text() for file in run.path.iterdir()] + [record_of({})["command"]]
    assert not any("abc" in text or "b'c" in text for text in texts)
    assert shlex.split(texts[-1])[-2:] == ["--limit", "3"] and "***" in texts[-1]


def test_a_masked_word_stays_one_word() -> None:
    words = ["--restart", "KEY=abc ssh host ./restart --api-key abc", "--api-key=abc", "API_KEY=abc"]
    expected = "--restart 'KEY=*** ssh host ./restart --api-key ***' --api-key=*** API_KEY=***"
    assert masked_command(words) == expected


def test_other_words_are_stored_as_they_are() -> None:
    words = ["paceline", "train", "--mask-token", "5", "--api-key-file", "a b.txt", "--max-tokens", "7", "user@host:x"]
    assert shlex.split(masked_command(words)) == words


@pytest.mark.parametrize(
    "text",
    [
        "the key of --mask-token 5",
        "sorted(rows, key=len)",
        "key=value, token=151643",
        "docker run -u 1000:1000 image",
        "sort -u a:b",
        "curl -XPUT http://h:1 -o out:put --output-dir a:b",
        "curl -s http://127.0.0.1:8000/v1/models",
        "http://h/guide.html#keys",
        "monkey=banana-split-2026",
    ],
)
def test_ordinary_words_are_not_masked(text: str) -> None:
    assert masked(text) == text


@pytest.mark.parametrize("url", ["http://me:abc@h:x", "me:abc@h:80", "http://a:abc/d@h", "http://h/?token=abc"])
def test_an_address_with_a_password_is_refused_without_it(url: str) -> None:
    for refused in (lambda: Client(url), lambda: RecordConfig("tiny", upstream=url)):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert "abc" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r'sh -c "API_KEY=\"abc d\" run me"', 'sh -c "API_KEY=*** run me"'),
        (r"sh -c 'API_KEY=\'abc d\' run me'", "sh -c 'API_KEY=*** run me'"),
        ("API_KEY=abc\\ d run me", "API_KEY=*** run me"),
        ('API_KEY="abc\\\nd" run me', "API_KEY=*** run me"),
        ("curl -uuser:abc http://h", "curl -u*** http://h"),
        ("curl -u " + "aB3" * 100 + ": http://h", "curl -u *** http://h"),
        ("curl -u name http://h", "curl -u name http://h"),
        (r"API_KEY=C:\keys\ curl -u me:abc h", "API_KEY=*** -u *** h"),
        (r"TOKEN=abc\ Bearer abc", "TOKEN=*** ***"),
        (r'"HF_TOKEN=\"ab1\\\"c2 d3\" run"', '"HF_TOKEN=*** run"'),
    ],
)
def test_quotes_within_a_text_belong_to_the_secret(text: str, expected: str) -> None:
    assert masked(text) == expected


@pytest.mark.parametrize(
    ("head", "part"),
    [
        ("", r"API_KEY=\" "),
        ("", r"--key=\" "),
        ("", "key=("),
        ("curl -", "u"),
        ("curl -u '", ":"),
        ('curl -u "', ":"),
        ("curl ", "-u/"),
        ("curl ", "/--user="),
        *(
            ("", part)
            for part in ("a", "'", '"', " ", "-", "=", "KEY", "--key ", "- ", "Authorization: ", "://a", "\\")
        ),
    ],
)
def test_the_time_to_mask_grows_with_the_length_alone(head: str, part: str) -> None:
    """Twenty thousand characters of some texts took seconds, and four times as long for twice as many."""

    def seconds(num_chars: int) -> float:
        text, times = head + part * (num_chars // len(part)), list[float]()
        for _ in range(3):
            start = time.process_time()
            masked(text)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(80_000) < 6 * seconds(20_000) + 0.02
