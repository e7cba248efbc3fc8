"""Every option of SGLang that we print, render or start it with, read by SGLang 0.5.23 itself.

    PEERS_VENV=FOLDER PACELINE_NIGHTLY=1 pytest tests/interop/test_sglang_flags.py

FOLDER/vllm/bin/python has SGLang's package beside vLLM (`install_peers sglang` of experiments/peers.sh); without it
they are skipped. Only its parser and its resolution of options run, for a GPU that is not there: no model is loaded.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_lines import in_blocks, words_of
from small_drafter import write_drafter

from paceline.config import EngineConfig
from paceline.draft.eagle3.drafter import Eagle3Drafter
from paceline.engine.llm import LLM
from paceline.loop.adapt.servers.vllm_sglang.drafter_folder import Given, Start, command_of, given_to
from paceline.simulate.flags import METHODS, Serving, server_flags
from paceline.train.card import write_card
from paceline.train.config import TrainConfig

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("PEERS_VENV", ""), "vllm", "bin", "python")
LAUNCH = "sglang.launch_server"
GPU = ("--device", "cuda", "--attention-backend", "triton")
"""Options for what SGLang would detect from the hardware."""

pytest_plugins = ("small_drafter",)
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.skipif(
        not [*PYTHON.parents[1].glob("lib/python*/site-packages/sglang")],
        reason="PEERS_VENV names no folder with vllm/bin/python that has sglang",
    ),
]


@pytest.fixture(scope="module")
def drafters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Given]:
    """A DFlash drafter with a draft vocabulary and an EAGLE-3 one, as SGLang gets them."""
    folder = tmp_path_factory.mktemp("drafters")
    write_drafter(folder / "own")
    llm = LLM.of(EngineConfig(model=str(target), drafter="none", dtype="float32"))
    Eagle3Drafter.random(llm.target).save(folder / "eagle")
    return {
        method: given_to(Start("sglang", str(target), str(folder / name)), folder / f"for-{name}")
        for method, name in (("dflash", "own"), ("eagle3", "eagle"))
    }


class Sglang:
    """Reads command lines, in one process for all tests."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def read(self, words: list[str]) -> dict[str, Any]:
        """Returns the settings that it would start with. Fails if it refuses the words."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([*words, *GPU]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "refused" not in answer, f"{shlex.join(words)}: {answer['refused']}"
        return answer


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    errors = tmp_path_factory.mktemp("sglang") / "stderr"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    script = ROOT / "tests" / "support" / "sglang_parser.py"
    with errors.open("w") as err:
        process = subprocess.Popen(
            [PYTHON, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            env=environment | {"HF_HUB_OFFLINE": "1"},
            cwd=errors.parent,
        )
    try:
        yield Sglang(process)
    finally:
        process.kill()
        process.communicate()


def behind_launch(command: list[str]) -> list[str]:
    """Options behind `python -m sglang.launch_server`."""
    assert command[1:3] == ["-m", LAUNCH]
    return command[3:]


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_serve_engine(sglang: Sglang, target: Path, drafters: dict[str, Given], method: str) -> None:
    """The options of `paceline serve --engine sglang`, all of them, with one of SGLang's behind `--`."""
    start = Start(
        "sglang", str(target), "d", "0.0.0.0", 9000, None, "bfloat16", 3, 99, ("a name",), "a key",
        words=("--tp-size", "8"),
    )  # fmt: skip
    given = drafters[method]
    values = sglang.read(behind_launch(command_of(start, given)))
    expected = {
        "model_path": str(target), "served_model_name": "a name", "host": "0.0.0.0", "port": 9000, "api_key": "a key",
        "dtype": "bfloat16", "tp_size": 8, "context_length": 99, "max_running_requests": 3,
        "speculative_algorithm": method.upper(), "speculative_draft_model_path": str(given.folder),
        "speculative_num_draft_tokens": given.num_drafted + 1, "speculative_eagle_topk": 1,
        "speculative_num_steps": given.num_drafted if method == "eagle3" else 1,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected


def test_the_block_is_the_one_in_our_export(sglang: Sglang, target: Path, drafters: dict[str, Given]) -> None:
    """Without a number SGLang takes it from the folder: it must read there what we give it."""
    given = drafters["dflash"]
    words = behind_launch(command_of(Start("sglang", str(target), "d"), given))
    at = words.index("--speculative-num-draft-tokens")
    values = sglang.read([*words[:at], *words[at + 2 :]])
    assert values["speculative_num_draft_tokens"] == given.num_drafted + 1 == 4


@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize("num_drafted", [0, 5])
@pytest.mark.parametrize("method", METHODS)
def test_simulate_flags(
    sglang: Sglang, target: Path, drafters: dict[str, Given], method: str, num_drafted: int, num_gpus: int
) -> None:
    folder = drafters["eagle3" if method == "eagle3" else "dflash"].folder if method != "draft-model" else target
    serving = Serving(str(target), method, str(folder), num_drafted, 4, num_gpus, has_8bit_cache=num_gpus > 1)
    values = sglang.read(behind_launch(shlex.split(server_flags(serving)["sglang"])))
    assert values["speculative_algorithm"] == (METHODS[method]["sglang"] if num_drafted else None)
    assert values["speculative_num_draft_tokens"] == (num_drafted + 1 if num_drafted else None)
    assert (values["max_running_requests"], values["tp_size"]) == (4, num_gpus)
    assert values["kv_cache_dtype"] == ("fp8_e4m3" if num_gpus > 1 else "auto")


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_the_manifest(
    sglang: Sglang, target: Path, drafters: dict[str, Given], method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    yaml = pytest.importorskip("yaml")
    render = runpy.run_path(str(ROOT / "deploy" / "jobs" / "render.py"))
    render["render"].__globals__["ray_version"] = lambda: "0"
    words = ["sglang", "--model", "org/m", "--drafter", "/data/drafter", "--method", method]
    assert render["main"](words) == 0
    deployment = next(yaml.safe_load_all(capsys.readouterr().out))
    (one,) = deployment["spec"]["template"]["spec"]["containers"]
    assert one["command"] == ["python3", "-m", LAUNCH]
    names: dict[str, str] = {"org/m": str(target), "/data/drafter": str(drafters[method].folder)}
    values = sglang.read([names.get(str(word), str(word)) for word in one["args"]])
    assert values["enable_metrics"] and (values["host"], values["port"], values["tp_size"]) == ("0.0.0.0", 8000, 8)
    assert values["speculative_algorithm"] == method.upper() and values["speculative_num_draft_tokens"] == 8


def documented() -> list[list[str]]:
    """Options behind every launch of SGLang in the documents, and of every `serve --engine sglang -- ...`."""
    commands = list[list[str]]()
    for page in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("drafters/*/*/README.md")]:
        if page.parent.name != "log":
            text = page.read_text(encoding="utf-8").replace("\\\n", " ")
            commands += [shlex.split(each) for each in re.findall(rf"-m {LAUNCH} (--[^\n`]*)", text)]
            lines = [words_of(line) for line in in_blocks(page) if "--engine sglang" in line]
            commands += [["--model-path", "org/m", *words[words.index("--") + 1 :]] for words in lines if "--" in words]
    return commands


def test_documents_and_the_card_of_a_drafter(
    sglang: Sglang, target: Path, drafters: dict[str, Given], tmp_path: Path
) -> None:
    card = write_card(TrainConfig(tmp_path, EngineConfig(str(target))), write_drafter(tmp_path / "drafter"), {}, {})
    lines = [line for line in card.read_text().splitlines() if LAUNCH in line]
    assert len(lines) == 1 and len(documented()) >= 2
    for words in [behind_launch(shlex.split(lines[0])), *documented()]:
        named = [*words]
        named[named.index("--model-path") + 1] = str(target)
        if "--speculative-draft-model-path" in named:
            named[named.index("--speculative-draft-model-path") + 1] = str(drafters["dflash"].folder)
        sglang.read(named)


def test_a_wrong_option_would_be_seen(sglang: Sglang, target: Path) -> None:
    with pytest.raises(AssertionError, match="by the parser"):
        sglang.read(["--model-path", str(target), "--speculative-number-of-drafts", "7"])
    with pytest.raises(AssertionError, match="requires setting --speculative-draft-model-path"):
        sglang.read(["--model-path", str(target), "--speculative-algorithm", "DFLASH"])
