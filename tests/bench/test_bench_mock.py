"""`paceline bench decode --mock-tokens-per-round`: rounds keep what is asked for, times are real, beside the
roofline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_llm import tiny_model
from typer.testing import CliRunner

from paceline.bench.config import MockConfig, MockSetting
from paceline.bench.steps import MockBench
from paceline.cli import app
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.hardware import Machine
from paceline.simulate.costs.catalogue import find
from paceline.simulate.marginals import read_marginals

MACHINE = Machine("test", 1e9, {"float32": 1e8, "bfloat16": 1e8}, 1, 1)


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    """A folder that holds a config.json and nothing else."""
    folder = tiny_model(tmp_path / "model")
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    return folder


def measured(folder: Path, config: MockConfig) -> MockBench:
    rows = max(config.batches)
    settings = {
        "weights": "random",
        "device": "cpu",
        "dtype": "float32",
        "max_batch": rows,
        "max_len": config.needed_len,
    }
    bench = MockBench(LLM(str(folder), drafter="none", **settings), config, find(str(folder)), MACHINE)
    bench.run()
    return bench


@pytest.mark.slow
def test_rounds_keep_what_was_asked_for(config_only: Path) -> None:
    config = MockConfig((2.0, 4.0), (1, 2), prompt_tokens=20, max_tokens=33, repeat=2)
    bench = measured(config_only, config)
    results = bench.results()
    assert [(each["batch"], each["tokens_per_round"], each["num_drafted"]) for each in results] == [
        (batch, value, int(value) - 1) for batch in (1, 2) for value in (1.0, 2.0, 4.0)
    ], "plain decoding is always measured"
    for each in results:
        assert each["kept_tokens_per_round"] == pytest.approx(each["tokens_per_round"], rel=0.1)
        assert each["step_ms"] > 0 and each["tokens_per_s"] > 0 and not each["lossless"]
        one = bench.passes[MockSetting(each["batch"], each["tokens_per_round"])][0]
        assert one.num_passes == pytest.approx(32 / each["tokens_per_round"], abs=1 + each["batch"])
        assert [len(answer.token_ids) for answer in one.answers] == [33] * each["batch"]
    assert results[0]["speedup"] == 1.0 and results[0]["roofline_speedup"] == pytest.approx(1.0)
    assert results[2]["roofline_speedup"] == pytest.approx(
        4 * results[0]["roofline_step_ms"] / results[2]["roofline_step_ms"]
    )


@pytest.mark.slow
def test_trees_keep_what_marginals_make_expected(config_only: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("[[0.7, 0.12, 0.05], [0.6, 0.2, 0.05], [0.65, 0.1, 0.05]]")
    marginals = str(tmp_path / "mine.json")
    config = MockConfig((2.0,), (4,), prompt_tokens=8, max_tokens=200, repeat=2, trees=(8,), marginals=marginals)
    plain, chain, tree = measured(config_only, config).results()
    assert [each["is_tree"] for each in (plain, chain, tree)] == [False, False, True] and tree["num_drafted"] == 8
    assert tree["tokens_per_round"] == pytest.approx(read_marginals(marginals).expected(8)[8].tokens)
    assert tree["kept_tokens_per_round"] == pytest.approx(tree["tokens_per_round"], rel=0.1) and not tree["lossless"]
    assert tree["roofline_step_ms"] > chain["roofline_step_ms"] > plain["roofline_step_ms"]


@pytest.mark.slow
def test_a_fixed_number_of_drafts_makes_every_round_as_wide(config_only: Path) -> None:
    bench = measured(config_only, MockConfig((2.0,), prompt_tokens=20, max_tokens=17, repeat=1, num_drafted=5))
    result = bench.results()[1]
    assert (result["num_drafted"], result["kept_tokens_per_round"]) == (5, pytest.approx(2.0, rel=0.1))
    assert all(
        sum(each.num_drafted for each in answer.rounds) >= 4 * len(answer.rounds)
        for answer in bench.passes[MockSetting(1, 2.0)][0].answers
    )
    narrow = measured(config_only, MockConfig((2.0,), prompt_tokens=20, max_tokens=17, repeat=1)).results()[1]
    assert result["roofline_step_ms"] > narrow["roofline_step_ms"], "a wider pass has more to do"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_round": (0.5,)}, "at least 1"),
        ({"tokens_per_round": (float("nan"),)}, "at least 1"),
        ({"batches": (0,)}, "batches must"),
        ({"num_drafted": 3}, "cannot yield 8"),
        ({"prompt_tokens": 0}, "prompt_tokens must"),
        ({"trees": (0,)}, "trees must be between 1 and 128"),
        ({"trees": (8,), "marginals": "nowhere"}, "nowhere"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MockConfig(**options)


@pytest.mark.slow
def test_the_command_needs_a_config_only(config_only: Path, tmp_path: Path) -> None:
    words = [
        "bench",
        "decode",
        "--model",
        str(config_only),
        "--weights",
        "random",
        "--mock-tokens-per-round",
        "1,2",
        "--json",
    ]
    words += ["--mock-trees", "3"]
    words += [
        "--mock-prompt-tokens",
        "16",
        "--max-tokens",
        "12",
        "--repeat",
        "1",
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    run = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "run")])
    assert run.exit_code == 0, run.output
    line = json.loads(run.stdout.splitlines()[-1])
    assert [each["tokens_per_round"] for each in line["results"][:2]] == [1, 2] and line["results"][2][
        "num_drafted"
    ] == 3
    assert line["marginals"] == "greedy" and "tree of 3" in (tmp_path / "run" / "report.md").read_text()
    assert line["lossless"] is False and line["drafter"] == "dflash"
    assert "NOT lossless" in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("--mock-trees", "3", "--limit", "3"), "--limit"),
        (("--mock-trees", "3", "--temperature", "1"), "--temperature"),
        (("--mock-tokens-per-round", "2", "--speculate", "tree:8", "--marginals"), "--marginals, --speculate"),
        (("--mock-tokens-per-round", "2", "--drafters", "random-dflash,ngram"), "--drafters"),
        (("--mock-prompt-tokens", "4096"), "--mock-prompt-tokens"),
    ],
)
def test_options_without_effect_are_refused(words: tuple[str, ...], option: str) -> None:
    refused = CliRunner().invoke(app, ["bench", "decode", *words])
    assert isinstance(refused.exception, ConfigError) and str(refused.exception).startswith(option), refused.output
