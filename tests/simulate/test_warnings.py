"""Every command that predicts warns of a load that does not fit, with a remedy that can be followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import ConfigError, UnsupportedModelError

LARGE = ["--model", "DeepSeek-V3", "--hardware", "H100"]
WARNING = (
    "does not fit: 671.0 GB of weights and 2.3 GB of cache for 8 x 4096 tokens are 673.3 GB, 1 x H100 have 80 GB: use "
    "--gpus 16 or more, a smaller batch or context, or another --precision"
)


def line(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    return json.loads(result.stdout.splitlines()[-1])


def test_all_predictions_of_a_load_warn_of_it(tmp_path: Path) -> None:
    requests = ["--prompt-tokens", "4000", "--answer-tokens", "192", "--requests", "2", "--rate", "1"]
    chart = ["--batch", "8", "--context", "4096", "--svg", str(tmp_path / "chart.svg")]
    assert WARNING in line("simulate", *LARGE, "--batch", "8")["warnings"]
    assert WARNING in line("simulate-serving", *LARGE, *requests)["warnings"]
    assert WARNING in line("compare", "--simulate", *LARGE, *chart)["warnings"]
    assert WARNING in line("advise", *LARGE, "--streams", "8", "--run", "none")["basis"]
    fitting = [*LARGE, "--gpus", "16", "--batch", "8"]
    assert line("simulate", *fitting)["warnings"] == []


def test_the_remedy_names_gpus_only_where_they_can_be_joined() -> None:
    words = ["simulate", "--model", "Llama-3.3-70B", "--hardware"]
    assert "use --gpus 2 or more, a smaller batch" in line(*words, "H100")["warnings"][0]
    assert "have 16 GB: use a smaller batch or context" in line(*words, "laptop CPU")["warnings"][0]


def test_a_context_beyond_the_models() -> None:
    expected = "a context of 100000 is longer than the 40960 tokens that Qwen3-8B was made for"
    assert line("simulate", "--model", "Qwen3-8B", "--hardware", "H100", "--context", "100000")["warnings"] == [
        expected
    ]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--price-per-hour", "inf"], "--price-per-hour must be above 0, not inf"),
        (["--acceptance", "histogram:1e308,1e308"], "the histogram needs counts"),
        (["--plain-rate", "1e-320"], "--plain-rate must be"),
        (["--overhead-ms", "1e308"], "--overhead-ms must be"),
        (["--precision", ","], "--precision ',' names no format"),
    ],
)
def test_values_without_a_meaning_are_refused(words: list[str], remedy: str) -> None:
    result = CliRunner().invoke(app, ["simulate", "--model", "Qwen3-8B", "--hardware", "H100", *words])
    assert remedy in f"{result.exception}{result.output}"


def test_a_histogram_of_words_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"results": [{"drafter": "default", "accepted_histogram": [3, "many"]}]}))
    result = CliRunner().invoke(app, ["simulate", "--toy", "--acceptance", str(file)])
    assert isinstance(result.exception, ConfigError) and "the histogram needs counts" in str(result.exception)


def test_a_table_with_an_integer_beyond_all_floats_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    file.write_text(json.dumps({"verify": [[1, 1, 10**400]]}))
    result = CliRunner().invoke(app, ["simulate", "--table", str(file)])
    assert isinstance(result.exception, ConfigError) and "with numbers above 0" in str(result.exception)


@pytest.mark.parametrize(
    "words",
    [["simulate", "--batch"], ["advise", "--streams"], ["compare", "--simulate", "--batch"],
     ["simulate-serving", "--concurrency"], ["simulate-serving", "--max-rows"]],
)  # fmt: skip
def test_more_streams_than_a_server_runs_are_refused(words: list[str]) -> None:
    """`advise` recommended millions of GPUs."""
    for number in (65_537, 10**9):
        result = CliRunner().invoke(app, [*words, str(number), "--model", "Qwen3-8B", "--hardware", "H100"])
        assert f"{words[-1]} must be at most 65536, not {number}" in str(result.exception)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ('{"num_hidden_layers": 4097, "hidden_size": 64}', "num_hidden_layers is 4097, which is no size"),
        ('{"num_hidden_layers": 10000000, "hidden_size": 64}', "num_hidden_layers is 10000000, which is no size"),
        ('{"num_hidden_layers": 4, "hidden_size": 1' + 400 * "0" + "}", "hidden_size is 1000"),
        (100_000 * '{"a":' + "1" + 100_000 * "}", "is not JSON"),
    ],
)
def test_a_config_of_impossible_sizes_is_refused_at_once(tmp_path: Path, text: str, remedy: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    result = CliRunner().invoke(app, ["simulate", "--model", str(file), "--hardware", "H100"])
    assert isinstance(result.exception, UnsupportedModelError) and remedy in str(result.exception)
