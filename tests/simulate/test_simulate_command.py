"""`paceline simulate` from its options to its JSON line; every error is one line that says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulate_steps import MACHINE, steps_file
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import PacelineError

pytestmark = pytest.mark.slow

BLOCK = ["--model", "DeepSeek-V4-Pro", "--hardware", "B200", "--acceptance", "0.89", "--block", "16"]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def line(*words: str) -> dict[str, Any]:
    return json.loads(run(*words, "--json").splitlines()[-1])


def test_the_json_line() -> None:
    result = line(*BLOCK, "--batch", "32", "--drafter-cost", "0.1")
    assert (result["best_draft_length"], round(result["speedup"], 2)) == (16, 2.98)
    assert [length for length, _ in result["curve"]] == list(range(17))
    assert result["curve"][0][1] == 1.0
    assert result["tokens_per_s"] / result["plain_tokens_per_s"] == pytest.approx(result["speedup"])
    assert sum(result["time_split"].values()) == pytest.approx(1.0)
    assert set(result["flags"]) == {"paceline", "vllm", "sglang"}
    assert "deepseek-ai/DeepSeek-V4-Pro" in result["flags"]["vllm"]
    assert result["limits"] and result["sensitivity"]
    assert any("does not fit" in warning for warning in result["warnings"])
    assert result["sweep"] is None


def test_flags_serve_the_model_that_was_named() -> None:
    result = line("--model", "deepseek-ai/DeepSeek-R1", "--hardware", "B200", "--acceptance", "0.8")
    assert "vllm serve deepseek-ai/DeepSeek-R1 " in result["flags"]["vllm"]
    assert "not run" in result["flags"]["paceline"], "as for DeepSeek-V3, whose sizes these are"


def test_a_limit_that_is_none_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def worked(*_: object) -> None:
        raise AssertionError("it predicts before it has read --slo")

    monkeypatch.setattr("paceline.simulate.answer.predict_all", worked)
    with pytest.raises(PacelineError, match="'p90' is no limit"):
        run(*BLOCK, "--slo", "p90")


def test_every_prediction_says_what_it_assumes_and_what_differs() -> None:
    usual = "assumed: 4,096 tokens of context, 1 stream, acceptance 0.8\n"
    assert usual in run("--model", "Qwen3-8B", "--hardware", "H100")
    shown = run("--model", "Qwen3-8B", "--hardware", "H100", "--batch", "64", "--acceptance", "0.65")
    assert "64 streams (differs from the usual 1), acceptance 0.65 (differs from the usual 0.8)" in shown
    words = [
        "simulate-serving",
        "--model",
        "Qwen3-8B",
        "--hardware",
        "H100",
        "--requests",
        "4",
        "--policy",
        "off",
        "--rate",
        "1",
    ]
    served = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert "320 tokens of context (differs from the usual 4,096), up to 8 streams (differs from the usual 1)" in served
    advised = (
        CliRunner().invoke(app, ["advise", "--model", "Qwen3-8B", "--hardware", "H100"], catch_exceptions=False).stdout
    )
    assert "assumed: 4,096 tokens of context, 1 stream, acceptance length " in advised


def test_a_sweep_over_batches() -> None:
    result = line(*BLOCK, "--batch", "1,4,32,128")
    assert [each["batch"] for each in result["sweep"]] == [1, 4, 32, 128]
    assert [round(each["speedup"], 2) for each in result["sweep"]] == [1.63, 1.16, 2.98, 5.06]
    assert result["speedup"] == result["sweep"][0]["speedup"]
    assert len([warning for warning in result["warnings"] if "does not fit" in warning]) == 1


def test_people_read_stdout_unless_it_is_json() -> None:
    shown = run(*BLOCK, "--batch", "32", "--flags")
    for expected in ("2.98x", "best", "acceptance  +1 points", "Limits:", "--speculative-config", "does not fit"):
        assert expected in shown
    with_json = run(*BLOCK, "--json")
    assert shown.count("\n- ") == 3 and f"- {len(json.loads(with_json)['limits']) - 2} more: with --json" in shown
    assert len(with_json.splitlines()) == 1


def test_options_reach_the_model() -> None:
    base = line(*BLOCK, "--batch", "8")["speedup"]
    for options in (
        ["--expert-locality", "0.255"],
        ["--precision", "experts=fp8"],
        ["--context", "100000"],
        ["--max-draft", "3"],
        ["--gpus", "8"],
        ["--drafter-cost", "0.5"],
        ["--drafter-params", "50e9"],
    ):
        assert line(*BLOCK, "--batch", "8", *options)["speedup"] != base, options


def test_the_layered_variant_differs_where_layers_do() -> None:
    """Full attention over many positions is bound by arithmetic, linear attention by reading."""
    words = ["--model", "Qwen3.5-27B", "--hardware", "RTX 4090", "--batch", "64", "--max-draft", "63"]
    whole, apart = line(*words)["curve"][63][1], line(*words, "--per-layer")["curve"][63][1]
    assert apart < whole


def test_the_toy_needs_no_machine() -> None:
    result = line("--toy", "--acceptance", "0.75", "--max-draft", "6")
    assert result["speedup"] == pytest.approx(3.466, abs=1e-3)
    assert (result["kind"], result["tokens_per_s"], result["hardware"]) == ("toy", None, None)
    assert any("--block has no effect" in warning for warning in line("--toy", "--block", "4")["warnings"])


def test_a_table_of_step_times(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    file.write_text(json.dumps(steps_file()))
    result = line("--table", str(file), "--acceptance", "0.8", "--batch", "1,8", "--context", "256")
    assert result["kind"] == "measured"
    assert result["plain_tokens_per_s"] == pytest.approx(1 / (steps_file()["verify"][0][2] + steps_file()["host_s"]))
    beyond = line("--table", str(file), "--batch", "16", "--hardware", "B200")
    assert any("extrapolated" in warning for warning in beyond["warnings"])
    assert any("--hardware has no effect" in warning for warning in beyond["warnings"])
    rooflines = line("--table", str(file), "--per-layer", "--expert-locality", "0.2")["warnings"]
    assert any("--expert-locality, --per-layer has no effect" in warning for warning in rooflines)


def test_calibrate_and_predict(tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_text(json.dumps(steps_file()))
    result = line("--calibrate", str(tmp_path))
    assert result["held_out"]["worst_error"] < 1e-3
    assert {path.name for path in tmp_path.iterdir()} >= {"calibration.json", "calibration.md", "calibration.svg"}
    assert "<svg" in (tmp_path / "calibration.svg").read_text()
    assert "held-out sizes" in (tmp_path / "calibration.md").read_text()
    calibrated = line("--calibration", str(tmp_path), "--context", "256", "--acceptance", "0.8")
    table = line("--table", str(tmp_path), "--context", "256", "--acceptance", "0.8")
    assert calibrated["speedup"] == pytest.approx(table["speedup"], rel=0.01)
    assert (calibrated["kind"], calibrated["hardware"], calibrated["model"]) == ("calibrated", "box", "smollm2-135m")
    assert "overhead" in calibrated["time_split"]


def test_listing() -> None:
    result = line("--list")
    assert {"DeepSeek-V4-Flash", "smollm2-135m"} <= set(result["models"])
    assert "Qwen3.6-Max" in result["unavailable"] and "Qwen3.6-Max" not in result["models"]
    assert "laptop CPU" in result["machines"]
    assert "not public" in run("--list")


def test_a_count_before_the_machines_name() -> None:
    answers = [line("--model", "Qwen3-8B", "--hardware", written) for written in ("8x H100", "8 H100")]
    assert answers[0] == answers[1] and answers[1]["gpus"] == 8


def test_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/test_hardware.py measures."""
    monkeypatch.setattr("paceline.simulate.answer.this_machine", lambda device: MACHINE)
    result = line("--model", "smollm2-135m", "--acceptance", "0.8,0.7", "--max-draft", "4")
    assert result["hardware"] == MACHINE.name
    assert any("place 2" in sentence for sentence in result["limits"])


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--acceptance", "1.5"], "between 0 and 1"),
        (["--acceptance", "nan"], "between 0 and 1"),
        (["--acceptance", "80"], "did you mean 0.8?"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--batch", "many"], "no list of numbers"),
        (["--batch", ""], "--batch is empty"),
        (["--context", "0"], "--context must be"),
        (["--max-draft", "-1"], "--max-draft must be"),
        (["--gpus", "0"], "--gpus must be"),
        (
            ["--model", "Qwen3-8B", "--hardware", "H100", "--gpus", "3"],
            "32 heads over 8 key heads, which 3 GPUs cannot share",
        ),
        (["--model", "Qwen3-8B", "--hardware", "3x H100"], "choose from 1, 2, 4, 8, 16, 32"),
        (["--block", "0"], "--block must be"),
        (["--drafter-cost", "-1"], "--drafter-cost must be"),
        (["--drafter-cost", "0.1", "--drafter-params", "1e9"], "leave one out"),
        (["--model", "no-such-model"], "no model"),
        (["--model", "Qwen3.6-Max"], "not public"),
        (["--hardware", "8 abacus"], "^--hardware 'abacus' is not known: choose from B200.* or this to measure this"),
        (["--precision", "fp7"], "is not known"),
        (["--expert-locality", "2"], "between 0"),
        (["--toy", "--table", "x.json"], "exclude each other"),
        (["--table", "no-such.json"], "bench steps"),
        (["--calibration", "no-such.json"], "--calibrate makes one"),
        (["--calibrate", "no-such"], "bench steps"),
        (["--flags", "--method", "magic"], "choose from"),
        (["--acceptance", ""], "--acceptance is empty"),
        (["--tree", "best", "--marginals", ""], "--marginals is empty"),
        (["--method", ""], "--method is empty"),
        (["--precision", ""], "--precision is empty"),
        (["--requests", "3", "--seed", "5"], "--requests, --seed: only with --price-per-hour or --slo"),
        (["--out", "somewhere"], "--out is written by --calibrate"),
        (["--calibrate", "no-such", "--acceptance", "0.3"], "--calibrate fits costs alone"),
        (["--calibrate", "no-such", "--flags"], "--calibrate fits costs alone"),
    ],
)
def test_nonsense_is_one_line(words: list[str], remedy: str) -> None:
    hardware = [] if "--hardware" in words else ["--hardware", "H100"]
    with pytest.raises(PacelineError, match=remedy):
        run("--model", "Qwen3-8B", *hardware, *words) if "--model" not in words else run(*hardware, *words)


def test_predictions_do_not_load_torch() -> None:
    """A known machine needs no import of PyTorch or NumPy."""
    code = (
        "import sys; from paceline.cli import app; "
        "app(['simulate', '--model', 'Qwen3-8B', '--hardware', 'H100', '--json'], standalone_mode=False); "
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
