"""The command line: quick help, one-line errors, and options that reach the engine."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from called import Call, call
from small_llm import tiny_model

from paceline.bench.comparison import Comparison
from paceline.commands.generate import model_and_prompt
from paceline.commands.shared import grammar_of, note_without_effect
from paceline.config import EngineConfig
from paceline.errors import PromptError
from paceline.report.pages import render
from paceline.types import GrammarSpec, SamplingParams

__all__ = ["call"]
ROOT = Path(__file__).parent.parent


def test_a_schema_is_a_file_or_itself(tmp_path: Path) -> None:
    schema, file = '{"type": "array"}', tmp_path / "schema.json"
    file.write_text(schema + "\n")
    assert grammar_of(schema, None) == grammar_of(str(file), None) == GrammarSpec("json_schema", schema)
    assert grammar_of(" {} ", None) == GrammarSpec("json_object")
    assert grammar_of(None, "[ab]") == GrammarSpec("regex", "[ab]")
    assert grammar_of(None, None) is None


@pytest.mark.slow
def test_without_a_command_help_is_shown(call: Call) -> None:
    """Run `python -m paceline` in another process."""
    done = subprocess.run([sys.executable, "-m", "paceline"], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0
    assert "generate" in done.stdout
    assert call("--version").stdout.startswith("paceline ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate",), "there is no prompt"),
        (("generate", "  "), "the prompt is empty"),
        (("generate", "a", "b", "c"), "put the prompt in quotes"),
        (("generate", "hi", "--temperature", "-1"), "temperature must be between 0"),
        (("generate", "hi", "--max-tokens", "0"), "--max-tokens must be at least 1"),
        (("generate", "hi", "--max-tokens", "many"), "--max-tokens"),
        (("generate", "hi", "--dtype", "int3"), "dtype"),
        (("generate", "hi", "--backend", "gpu"), "--backend must be one of auto, native, torch"),
        (("bench", "decode", "--weight-format", "int3"), "--weight-format must be one of auto, blocks, dense"),
        (("generate", "hi", "--kv-memory", "lots"), "write it as 512M"),
        (("generate", "hi", "--json-schema", "{}", "--regex", "a"), "exclude each other"),
        (("generate", "hi", "--json-schema", "no such file"), "neither a schema nor a file"),
        (("generate", "hi", "--mock", "0.5"), "--mock must be at least 1"),
        (("generate", "hi", "--raw", "--system", "x"), "--system needs the chat template"),
        (("generate", "hi", "--no-such-option"), "--no-such-option"),
        (("bench", "decode", "--speculate", "off"), "speculate off drafts nothing"),
        (("bench", "decode", "--speculate", "3", "--num-drafted", "4"), "both set the number of drafts"),
        (("generate", "hi", "--against", "vllm"), "--against knows transformers only"),
        (("generate", "hi", "--against", "transformers", "--temperature", "1"), "greedy answers only"),
        (("generate", "--prompt-file", "/no/such/file"), "cannot read the prompt file"),
        (("simulate", "--table", "x" * 300), "cannot reach xxxxxxxxxx"),
        (("bench", "decode", "--batch", "one"), "--batch 'one' is no list of numbers"),
        (("bench", "decode", "--against", "vllm"), "the only peer"),
        (("bench", "decode", "--prompts", "/no/such.jsonl"), "there is no prompt file"),
        (("fly",), "fly"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(call: Call, words: tuple[str, ...], message: str) -> None:
    done = call(*words)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


@pytest.mark.slow
def test_an_answer_beside_plain_decoding_and_transformers(call: Call, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    words = (
        "--compare",
        "--against",
        "transformers",
        "--drafter",
        "ngram",
        "--dtype",
        "float32",
        "--max-tokens",
        "8",
        "--json",
    )
    done = call("generate", str(model), "hi hi hi hi", *words)
    assert done.returncode == 0, done.stderr
    loaded, _, result = done.stderr.strip().splitlines()  # what was loaded, the answer, one line of result
    assert " on cpu, " in loaded
    assert re.fullmatch(
        r"(?:[\d.]+x plain decoding \([\d.]+ -> [\d.]+ tokens/s; 8 tokens are too few for a verdict: time at least 100\)|"  # noqa: E501
        r"[\d.]+ tokens/s \(no speed-up: the machine was busy: repeat\)), [\d.]+ tokens a round, token-identical; "
        r"[\d.]+x Transformers, the same tokens \(--stats says more\)",
        result,
    )
    assert json.loads(done.stdout)["transformers"]["speedup"] > 0
    done = call("generate", str(model), "hi hi hi hi", *words, "--stats")
    assert "token-identical" in done.stderr and "x as fast, the same tokens" in done.stderr
    assert "time: prefill" in done.stderr and "--stats" not in done.stderr


@pytest.mark.parametrize(
    ("lossless", "plain", "expected"),
    [
        (True, None, "20.0 tokens/s, 2.50 tokens a round, lossless (--stats says more)"),
        (
            True,
            Comparison(10.0, 2.0, None),
            "10.0 -> 20.0 tokens/s), 2.50 tokens a round, sampled: texts need not agree (",
        ),
        (True, Comparison(10.0, 2.0, False, 3, 0.25), "2.50 tokens a round, not token-identical after 3 tokens ("),
        (False, Comparison(10.0, 2.0, False, 3, 0.25), "NOT LOSSLESS: acceptance was mocked"),
    ],
)
def test_an_answer_in_one_line(lossless: bool, plain: Comparison | None, expected: str) -> None:
    stats = SimpleNamespace(tokens_per_s=20.0, tokens_per_round=2.5, lossless=lossless, lossy=None)
    line = render("result.txt", stats=stats, plain=plain, peer=None)
    assert expected in line and line.count("\n") == 1


LOADED = SimpleNamespace(config=EngineConfig(dtype="bfloat16"), target=SimpleNamespace(is_width_invariant=False))


@pytest.mark.parametrize("num_same", [0, 7])
def test_other_tokens_than_transformers_are_explained(num_same: int) -> None:
    peer = Comparison(10.0, 2.0, False, num_same)
    line = render("beside.txt", llm=LOADED, plain=None, peer=peer)
    assert "the same 0" not in line and ("the first 7 tokens are the same" in line) == (num_same == 7)
    assert "almost equally likely" in line and "--dtype float32" in line and line.count("\n") == 1
    exact = SimpleNamespace(config=EngineConfig(dtype="float32"))
    assert "NOT the same tokens" in render("beside.txt", llm=exact, plain=None, peer=peer)


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        (Comparison(10.0, 2.0, None), "sampled: texts need not agree"),
        (Comparison(10.0, 2.0, True), "2.00x, token-identical"),
        (
            Comparison(10.0, 2.0, False, 3, 0.25),
            "not token-identical after 3 tokens, where bfloat16 has the top two logits 0.250 apart;",
        ),
    ],
)
def test_beside_plain_decoding(plain: Comparison, expected: str) -> None:
    line = render("beside.txt", llm=LOADED, stats=SimpleNamespace(tokens_per_s=20.0), plain=plain, peer=None)
    assert (
        line.startswith("plain 10.0 tokens/s, with drafts 20.0 tokens/s: ")
        and expected in line
        and line.count("\n") == 1
    )


def test_with_json_an_error_is_json_too(call: Call) -> None:
    done = call("generate", "", "--json")
    assert done.returncode == 2
    assert "empty" in json.loads(done.stdout)["error"]


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [True, False])
def test_scores_of_the_prompt_are_a_json_key(call: Call, tmp_path: Path, as_json: bool) -> None:
    model = str(tiny_model(tmp_path / "tiny"))
    words = ("--prompt-logprobs", "1", "--max-tokens", "2", "--raw", *(["--json"] if as_json else []))
    done = call("generate", model, "hi hi", *words)
    assert done.returncode == 0, done.stderr
    assert ("note: --prompt-logprobs shows only with --json" in done.stderr) is not as_json
    if as_json:
        result = json.loads(done.stdout)
        assert len(result["prompt_logprobs"]) == result["num_prompt_tokens"] - 1 > 0


@pytest.mark.slow
def test_an_error_in_the_engine_names_the_options(call: Call, tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path / "tiny"))
    done = call("generate", model, "hi", "--max-len", "32", "--max-tokens", "30")
    assert "lower --max-tokens, or raise --max-len" in done.stderr and done.returncode == 2
    chat = call("chat", model, "--max-len", "32", "--max-tokens", "30", stdin="hi\n")
    assert "lower --max-tokens, or raise --max-len" in chat.stderr


@pytest.mark.parametrize(
    "words", [("generate", "/no/such/model", "hi"), ("bench", "decode", "--model", "/no/such/model")]
)
def test_transformers_that_is_not_installed_is_said_before_anything_loads(
    call: Call, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = call(*words, "--against", "transformers")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "pip install 'paceline[hf]'" in done.stderr


@pytest.mark.slow
def test_a_terminal_shows_something_at_once(tmp_path: Path) -> None:
    """Before PyTorch is imported; what is piped stays as it was."""
    code = "import sys; sys.modules['torch'] = None; from paceline.cli import main; main()"
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", code, "generate", "smollm2-135m", "hi"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, cwd=ROOT) as started:
        os.close(theirs)
        first = b""
        while b"\n" not in first and (more := os.read(ours, 1000)):
            first += more
        assert first.startswith(b"loading smollm2-135m\r\n")
        with contextlib.suppress(OSError):  # read on until it has ended
            while os.read(ours, 1000):
                pass
    os.close(ours)
    assert started.returncode
    piped = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert "loading" not in piped.stderr


def test_a_missing_model_is_one_line(call: Call) -> None:
    done = call("generate", "/no/such/folder", "hi")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "place", "message"),
    [
        (("audit", "http://127.0.0.1:9"), "file", "is a file, and a run needs a folder"),
        (("audit", "http://127.0.0.1:9"), "one.json", "is named as a file, and a run needs a folder"),
        (("evals", "run", "no-suite.jsonl"), "file", "is a file, and a run needs a folder"),
        (("bench", "decode", "--model", "org/none"), "file", "is a file, and a run needs a folder"),
        (("simulate-serving", "--rate", "1"), "one.md", "is named as a file, and a run needs a folder"),
        (("evals", "make", "no-store"), "", "is a folder: name a file in it"),
    ],
)
def test_an_out_of_the_other_type_is_refused_before_any_work(
    call: Call, tmp_path: Path, words: tuple[str, ...], place: str, message: str
) -> None:
    """An audit of minutes was lost because --out named a file."""
    (tmp_path / "file").write_text("")
    done = call(*words, "--out", str(tmp_path / place))
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (KeyError("x"), "unexpected KeyError, a fault of paceline: report it with the lines above"),
        (OSError(errno.ENOSPC, "No space left on device", "a.json"), "No space left on device: 'a.json'"),
        (ConnectionRefusedError(), "ConnectionRefusedError"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), None),
    ],
)
def test_a_fault_of_paceline_or_the_system_is_no_verdict(
    call: Call, monkeypatch: pytest.MonkeyPatch, fault: Exception, message: str | None
) -> None:
    """Status 1, of Python after a traceback and of Typer for a closed pipe, is how `audit` says that a server is
    faulty. A full disk was called a fault of paceline."""

    def broken(url: str, *_: object, **options: object) -> None:
        raise fault

    monkeypatch.setattr("paceline.loop.audit.run.audit", broken)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # Typer wraps them for a closed pipe
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    done = call("audit", "http://127.0.0.1:9", "--json")
    if message is None:
        assert done == (141, "", "")
    else:
        assert done.returncode == 2 and "Traceback" in done.stderr and "raise fault" in done.stderr
        assert json.loads(done.stdout)["error"].endswith(message) and ("of paceline" in done.stdout) == (
            "of paceline" in message
        )


def test_models_are_listed(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    done = call("models")
    assert done.returncode == 0
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert list(lines) == ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma-3-270m"]
    assert all("fetched at first use" in line for line in lines.values())
    assert "Gemma" in lines.pop("gemma-3-270m")
    assert all("Apache-2.0" in line for line in lines.values())
    assert "98 MB" in lines["smollm2-135m"] and "dflash" in lines["smollm2-135m"]
    assert "491 MB" in lines["qwen2.5-coder-0.5b"] and "dflash" in lines["qwen2.5-coder-0.5b"]
    assert "dflash" in lines["qwen2.5-coder-1.5b"]


def test_models_that_are_here_say_where(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    file = tmp_path / "downloads" / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    file.parent.mkdir()
    file.touch()
    os.truncate(file, 491_400_064)  # takes no space
    done = call("models", "--json")
    assert done.stdout.count("\n") == 1
    models = {each["name"]: each for each in json.loads(done.stdout)["models"]}
    assert [each["path"] for each in models.values()] == [None, str(file), None, None]
    assert {each["drafter"] for each in models.values()} == {"dflash", "ngram"}
    assert all(each["memory_bytes"] > each["file_bytes"] > 9e7 for each in models.values())


def test_model_and_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file")
    assert model_and_prompt(["hi"], False, None) == (None, "hi")
    assert model_and_prompt(["tiny", "hi"], False, None) == ("tiny", "hi")
    assert model_and_prompt(["hi"], True, None) == (None, "hi")
    assert model_and_prompt(["tiny"], False, file) == ("tiny", "from a file")
    assert model_and_prompt([], True, file) == (None, "from a file")
    with pytest.raises(PromptError, match="quotes"):
        model_and_prompt(["one", "two"], True, None)


def test_options_without_effect_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    note_without_effect(SamplingParams(top_p=0.9))
    assert "--top-p has no effect at temperature 0" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_of_the_commands_is_current() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_cli.py"))["render"]()
    assert page == (ROOT / "docs" / "reference" / "cli.md").read_text(), "run python docs/make_cli.py"
