"""`paceline bench steps`: every size is measured over a full cache, and the table feeds the calibration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from doubles import FakeTarget
from small_llm import fake_llm, tiny_model
from typer.testing import CliRunner

from paceline.bench.config import StepsConfig
from paceline.bench.steps import FilledDrafter, StepBench, add_round, no_times, spread, table
from paceline.cli import app
from paceline.draft.base import NoDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.errors import ConfigError
from paceline.hardware import Machine
from paceline.model.target import ForwardBatch, ForwardOutput, Target
from paceline.simulate.costs.calibrate import machine_of
from paceline.simulate.costs.rounds import table_of
from paceline.types import Batch, SamplingParams, Sequence, Take

pytest_plugins = ("undrawn",)
MACHINE = Machine("test", 1e9, {"bfloat16": 1e9}, 1, 1)


def target() -> FakeTarget:
    return FakeTarget(vocab_size=64, num_rows=2, max_len=160)


def measured(config: StepsConfig) -> StepBench:
    bench = StepBench(fake_llm(target()), config, "none")
    bench.run()
    return bench


def test_every_size_is_measured_as_often_as_asked() -> None:
    config = StepsConfig((1, 2), max_positions=5, context=60, repeat=3)
    bench = measured(config)
    sizes = {(rows, width) for rows in (1, 2) for width in range(1, 6)}
    assert set(bench.times["verify"]) == set(bench.times["rounds"]) == set(bench.times["host"]) == sizes
    assert {len(runs) for runs in bench.times["verify"].values()} == {3}
    decoding = [each for each in bench.llm.target.calls if min(each.starts) > 0 and max(each.counts) <= 5]
    assert {(len(each.rows), each.counts[0]) for each in decoding} >= sizes, "passes are as wide as they claim"
    assert all(len(set(each.counts)) == 1 for each in decoding)
    assert all(abs(start - 60) <= config.growth for each in decoding for start in each.starts), "and the cache as full"


def test_prompts_are_prefilled_whole_and_anew_each_time() -> None:
    llm = fake_llm(target())
    llm.config = replace(llm.config, prefill_chunk=256)
    bench = StepBench(llm, StepsConfig((1,), max_positions=2, context=60, repeat=3), "none")
    bench.run()
    calls = [each for each in bench.llm.target.calls if each.starts == [0] and each.counts in ([16], [64])]
    assert [each.counts for each in calls] == [[16], [64]] * 4, "a turn before them warms up"
    assert len({tuple(each.tokens) for each in calls}) == 8
    steps = bench.as_json(MACHINE)
    assert [tokens for tokens, _ in steps["prefill"]] == [16, 64], "one of 256 does not fit into a row of 160"
    assert len(bench.times["prefill"][1, 16]) == 3
    assert table_of(steps).prefill.seconds(1, 64) == pytest.approx(steps["prefill"][1][1])
    assert steps["prefill_adapts"] is bench.llm.target.is_width_invariant


def test_the_file_holds_medians_and_what_was_measured() -> None:
    bench = measured(StepsConfig((1, 2), max_positions=3, context=60, repeat=2))
    steps = bench.as_json(MACHINE)
    assert steps["draft"] == [], "nothing drafts"
    assert (steps["context"], steps["lossless"], steps["num_drafted"]) == (60, False, 0)
    assert machine_of(json.loads(json.dumps(steps))) == MACHINE
    read = table_of(steps)
    assert read.verify.span == (1, 2, 1, 3)
    assert read.host_s == steps["host_s"] > 0
    assert table({(1, 2): [3.0, 1.0, 9.0], (1, 1): [2.0]}) == [[1, 1, 2.0], [1, 2, 3.0]]


def test_experts_that_passes_read_are_counted() -> None:
    class Mixture(FakeTarget):
        def forward(self, batch: ForwardBatch) -> ForwardOutput:
            self.experts_read = float(len(batch.tokens))
            return super().forward(batch)

    bench = StepBench(
        fake_llm(Mixture(vocab_size=64, num_rows=2, max_len=160)), StepsConfig((1, 2), 3, 60, repeat=2), "none"
    )
    bench.run()
    assert bench.as_json(MACHINE)["experts"] == [[rows, width, rows * width] for rows in (1, 2) for width in (1, 2, 3)]
    assert measured(StepsConfig((1,), max_positions=2, context=60, repeat=1)).as_json(MACHINE)["experts"] == []


def test_rounds_are_split_into_their_parts() -> None:
    times = no_times()
    add_round(times, 2, 3, wall_s=10.0, draft_s=2.0, verify_s=7.0)
    add_round(times, 1, 0, wall_s=5.0, draft_s=0.5, verify_s=4.0)
    assert times["verify"] == {(2, 4): [7.0], (1, 1): [4.0]}
    assert times["draft"] == {(2, 3): [2.0]}, "a round without drafts has no drafting"
    assert times["host"][2, 4] == [1.0]


def test_the_spread_tells_a_disturbed_machine() -> None:
    assert spread({(1, 1): [1.0, 1.0, 1.0], (1, 2): [2.0]}) == 0.0
    assert spread({(1, 1): [1.0, 1.0, 2.0, 2.0]}) > 0.5


def test_drafts_are_random_tokens_and_as_many_as_asked() -> None:
    drafter = FilledDrafter(NgramDrafter(num_drafted=2), 6, 64)
    seq = Sequence(0, [1, 2, 3], 3, SamplingParams(max_tokens=50), row=0, cached_len=2)
    drafter.start(seq)
    drafts = [drafter.propose(Batch([seq], [Take("filled", 4)])).tokens_B for _ in range(20)]
    assert {len(tokens) for (tokens,) in drafts} == {4}
    assert len({token for (tokens,) in drafts for token in tokens}) > 30, "one token again and again reads few experts"
    assert FilledDrafter(NoDrafter(), 6, 64).num_drafted == 6


def test_filling_up_changes_nothing_else_of_a_drafter() -> None:
    """A drafter that computes on PyTorch's threads kept them to itself: it was measured with one thread."""

    class Threaded(NgramDrafter):
        def bind(self, target: Target) -> None:
            self.has_own_threads = False
            self.tap_layers = (1,)

    drafter = FilledDrafter(Threaded(num_drafted=2), 6, 64)
    assert drafter.has_own_threads
    drafter.bind(target())
    assert not drafter.has_own_threads
    assert drafter.tap_layers == (1,)
    assert drafter.name == "ngram" and drafter.num_drafted == 6


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"batches": ()}, "batch"),
        ({"batches": (0,)}, "batch"),
        ({"max_positions": 1}, "max_positions"),
        ({"context": 0}, "context"),
        ({"repeat": 0}, "repeat"),
    ],
)
def test_impossible_settings(options: dict[str, int], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        StepsConfig(**options)  # pyright: ignore[reportArgumentType]


def test_rows_that_are_too_short_or_too_few() -> None:
    with pytest.raises(ConfigError, match="raise max_len"):
        StepBench(fake_llm(target()), StepsConfig((1,), context=150), "none")
    with pytest.raises(ConfigError, match="raise max_batch"):
        StepBench(fake_llm(target()), StepsConfig((4,), 3, context=20), "none")


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_command_and_what_follows_it(tmp_path: Path) -> None:
    """Measure a model at a few sizes, calibrate from it, predict with it."""
    model = str(tiny_model(tmp_path / "model"))
    runner = CliRunner()
    sizes = ["--batch", "1,2", "--positions", "4", "--context", "40", "--repeat", "2"]
    words = [
        "bench",
        "steps",
        "--model",
        model,
        "--dtype",
        "float32",
        "--drafter",
        "random-dflash",
        *sizes,
        "--out",
        str(tmp_path),
        "--json",
    ]
    done = runner.invoke(app, words, catch_exceptions=False)
    steps = json.loads(done.stdout.splitlines()[-1])
    assert len(steps["verify"]) == 8 and len(steps["draft"]) == 6
    assert steps["drafter_parameters"] > 1e3
    assert (tmp_path / "report.md").read_text().count("\n| ") == 6
    done = runner.invoke(app, ["simulate", "--calibrate", str(tmp_path), "--json"], catch_exceptions=False)
    assert json.loads(done.stdout.splitlines()[-1])["host_s"] > 0
    predict = ["simulate", "--calibration", str(tmp_path), "--context", "40", "--json"]
    done = runner.invoke(app, predict, catch_exceptions=False)
    assert json.loads(done.stdout.splitlines()[-1])["plain_tokens_per_s"] > 1
