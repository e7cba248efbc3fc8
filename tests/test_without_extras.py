"""A machine with PyTorch and little else: all but the extras' modules import, and safetensors checkpoints run."""

from __future__ import annotations

import importlib.abc
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ABSENT = {
    "triton",
    "gguf",
    "llguidance",
    "fastapi",
    "uvicorn",
    "datasketch",
    "river",
    "ray",
    "trl",
    "datasets",
    "jsonschema",
    "mcp",
}
NEED_EXTRAS = {
    "loop.distill": "teach",
    "loop.mcp": "server",
    "loop.record": "metrics, proxy, reader, rendered, run",
    "loop.rl": "agents, endpoint, judge",
    "model.torch.kernels.triton": "attend, delta, experts, layer, overlap, probe, skinny",
    "serve": "run",
    "serve.dialects": "base, messages, responses",
    "interop": "hidden_states",
    "serve.http": "app, failures, features, security, validation",
    "serve.replies": "choices, events",
    "serve.requests": "chats, completions, grammars, prompts, routing",
    "serve.worker": "drafters, inbox, worker",
}
"""Modules that may need what is not there to be imported: an extra of pyproject.toml, `serve` for most, `distill` for
`teach`; vLLM, which imports `interop`; or Triton, which kernels import when they first run."""


class Absent(importlib.abc.MetaPathFinder):
    """Refuses to find the packages of ABSENT."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def report(folder: Path) -> dict[str, Any]:
    """Runs in a process of its own, where the packages are absent: what imports, and what comes of `folder`'s files."""
    sys.meta_path.insert(0, Absent())
    sys.modules["triton"] = None  # type: ignore[assignment]
    from small_llm import tiny_model

    import paceline
    from paceline import LLM, SamplingParams
    from paceline.draft.formats.packed import read_packed
    from paceline.errors import PacelineError

    refused: dict[str, str] = {}
    names = [each.name for each in pkgutil.walk_packages(paceline.__path__, "paceline.")]
    for name in names:
        if not name.endswith(("__main__", "libpaceline_native")):
            try:
                importlib.import_module(name)
            except (ImportError, PacelineError) as error:
                refused[name] = str(error)
    texts = []
    for drafter in ("none", "random-dflash"):
        llm = LLM(str(tiny_model(folder / "model")), drafter=drafter, dtype="float32", device="cpu", max_len=64)
        texts.append(llm.generate(["ab"], SamplingParams(temperature=0.0, max_tokens=4))[0].token_ids)
    errors = []
    for settings in ({"model": str(folder / "model.gguf")}, {"model": str(folder / "model"), "weight_format": "q4_1"}):
        try:
            LLM(**settings, drafter="none", dtype="float32", device="cpu")
        except PacelineError as error:
            errors.append(f"{type(error).__name__}: {error}")
    dtypes = {str(tensor.dtype) for tensor in read_packed(folder / "packed.safetensors").values()}
    return {"refused": refused, "texts": texts, "errors": errors, "dtypes": sorted(dtypes)}


def gpu_tests() -> list[Path]:
    """Files with tests that are marked `gpu`."""
    every = sorted(Path(__file__).parent.rglob("test_*.py"))
    return [file for file in every if re.search(r"mark\.gpu", file.read_text(encoding="utf-8"))]


def collected() -> int:
    """Runs in a process of its own: collects the tests marked gpu, as CONTRIBUTING.md runs them there."""
    sys.meta_path.insert(0, Absent())
    words = ["-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "--collect-only"]
    return int(pytest.main([*words, *map(str, gpu_tests())]))


def test_tests_of_a_gpu_are_collected() -> None:
    """Whatever a GPU's machine lacks, each file's tests are collected: one that cannot be imported ends a day there."""
    done = in_a_process("import sys; from {name} import collected; sys.exit(collected())")
    files = {line.partition("::")[0].partition("tests/")[2] for line in done.stdout.splitlines() if "::" in line}
    expected = {str(file.relative_to(Path(__file__).parent)) for file in gpu_tests()}
    assert done.returncode == 0 and len(files) >= 4 and files == expected, done.stdout[-2000:]


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code that may import this file as `{name}`."""
    here = Path(__file__)
    folders = [str(each) for each in (here.parent, here.parent / "support", here.parent.parent)]
    paths = f"import sys; sys.path[:0] = {folders!r}; "
    command = [sys.executable, "-c", paths + code.format(name=here.stem)]
    plain = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=here.parent.parent, env=plain)


def test_everything_but_the_extras_imports_and_runs(tmp_path: Path) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file

    from paceline.draft.formats.packed import packed
    from paceline.model.gguf.package import finish

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", torch.ones(4, 32).numpy())
    finish(writer)
    save_file(packed({"fc.weight": torch.randn(4, 64)}), tmp_path / "packed.safetensors")
    code = "import json; from pathlib import Path; from {name} import report; "
    done = in_a_process(code + f"print(json.dumps(report(Path({str(tmp_path)!r}))))")
    assert done.returncode == 0, done.stderr[-2000:]
    outcome = json.loads(done.stdout.splitlines()[-1])
    expected = {f"paceline.{part}.{name}" for part, names in NEED_EXTRAS.items() for name in names.split(", ")}
    assert set(outcome["refused"]) == expected, outcome["refused"]
    assert outcome["texts"][0] == outcome["texts"][1] and len(outcome["texts"][0]) == 4
    assert len(outcome["errors"]) == 2
    assert all("pip install gguf, or use a folder" in each for each in outcome["errors"]), outcome["errors"]
    assert outcome["dtypes"] == ["torch.bfloat16"]
