"""A recorded benchmark run replayed, and the command: what is read, what is refused, and that errors are told apart."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_server import serving, talker
from replayed import JOBS, STEPS, SURVIVAL, answers_of, served
from typer.testing import CliRunner

from paceline.bench.config import ServersConfig, ServingConfig
from paceline.bench.serving.load import Answer, Contender, Pass, ServingBench
from paceline.bench.serving.servers import _log, bench_serving
from paceline.cli import app
from paceline.data.prompts import Prompt
from paceline.errors import ConfigError
from paceline.report.statistics import Rounds
from paceline.runs.folder import RunFolder
from paceline.simulate.answer import simulate_server
from paceline.simulate.config import CostsConfig
from paceline.simulate.config import ServingConfig as SimulateConfig
from paceline.simulate.costs.rounds import table_of
from paceline.simulate.server.load import Arrivals, poisson
from paceline.simulate.server.replay import (
    Recorded,
    compare,
    own_costs,
    policy_for,
    read_passes,
    recorded_lookups,
    recorded_survival,
)
from paceline.simulate.server.server import Job, Lookups, ServerShape

pytestmark = pytest.mark.slow
pytest_plugins = ("undrawn",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the benchmark, against a server that is the simulator itself."""
    path = tmp_path_factory.mktemp("runs") / "bench-serving"
    run = RunFolder.create("bench-serving", {"server": ["--max-batch", "8"]}, path)
    contenders = [Contender(name, None) for name in ("off", "full")]  # type: ignore[arg-type]
    config = ServingConfig(concurrencies=(3,), rates=(2.0,))
    bench = ServingBench(contenders, "small", [Prompt("0", [], (), "x", (1,))], config)
    for load in (Arrivals(concurrency=3), Arrivals(rate=2.0)):
        for name, policy in (("off", "off"), ("full", "7")):
            outcome = served(policy, load.rate, load.concurrency)
            done = Pass(outcome.wall_s, 0.0, [*answers_of(outcome), Answer(error="refused")])
            bench.passes[load, name].append(done)
            _log(run, bench, load, name, done)
    return path


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    file = tmp_path / "steps.json"
    file.write_text(json.dumps(STEPS))
    return file


def test_a_run_is_read_back(folder: Path) -> None:
    passes = read_passes(folder)
    assert [(str(each.load), each.speculate) for each in passes] == [
        ("3 in flight", "off"),
        ("3 in flight", "full"),
        ("2 per second", "off"),
        ("2 per second", "full"),
    ]
    outcome = served("7", 2.0, None)
    last = passes[-1]
    assert [replace(job, arrives_at=0.0) for job in last.jobs] == JOBS
    assert [job.arrives_at for job in last.jobs] == pytest.approx([each.arrived_at for each in outcome.requests])
    assert last.wall_s == pytest.approx(outcome.wall_s)
    assert last.tokens_per_s == pytest.approx(outcome.num_tokens / outcome.wall_s)


@pytest.mark.usefixtures("undrawn")
def test_a_real_run_can_be_replayed(tmp_path: Path) -> None:
    """Against a live server with a fake model: what the benchmark writes is what the replay needs."""
    with serving(talker()) as live:
        config = ServingConfig(concurrencies=(2,), rates=(50.0,), num_requests=4, max_tokens=6, repeat=2)
        bench_serving(ServersConfig(url=live.url), config, limit=2, out=tmp_path / "run")
    passes = read_passes(tmp_path / "run")
    assert len(passes) == 8 and all(len(each.jobs) == 4 for each in passes)
    opened = [each for each in passes if each.load.rate]
    assert all([job.arrives_at for job in each.jobs] == sorted(job.arrives_at for job in each.jobs) for each in opened)
    assert [job.arrives_at for job in opened[0].jobs] == pytest.approx(poisson(50.0, 4, 0), abs=0.002)
    assert [job.arrives_at for job in opened[-1].jobs] == pytest.approx(poisson(50.0, 4, 1), abs=0.002)
    comparisons = compare(passes, table_of(STEPS), ServerShape(), SURVIVAL)
    assert len(comparisons) == 4 and all(
        each.num_requests == 8 and each.measured_tokens_per_s > 0 for each in comparisons
    )


def test_the_simulator_agrees_with_itself(folder: Path) -> None:
    passes = read_passes(folder)
    costs = table_of(STEPS)
    comparisons = compare(passes, costs, ServerShape(), SURVIVAL)
    assert [each.policy for each in comparisons] == ["off", "7", "off", "7"]
    for each in comparisons:
        assert each.throughput_error == pytest.approx(0, abs=1e-6) and each.first_token_error == pytest.approx(
            0, abs=1e-6
        )
        assert each.simulated_tokens_per_round == pytest.approx(each.measured_tokens_per_round)
        assert each.is_within
    slower = table_of({**STEPS, "verify": [[rows, width, 1.5 * spent] for rows, width, spent in STEPS["verify"]]})
    wrong = compare(passes, slower, ServerShape(), SURVIVAL)
    assert not any(each.is_within for each in wrong[:2]) and wrong[0].throughput_error < -0.2


def test_how_drafts_fared_is_read_from_the_pass_that_drafted_most(folder: Path) -> None:
    survival = recorded_survival(read_passes(folder))
    assert len(survival) == 7 and survival == pytest.approx(SURVIVAL, abs=0.08)
    assert recorded_survival([each for each in read_passes(folder) if each.speculate == "off"]) == ()


def test_places_that_were_seldom_tried_are_estimated() -> None:
    """Four drafts a round on average, some of six: the places beyond the fourth stand as often as the first four."""
    chance = 0.8
    rounds = [round(1000 * chance**count * (1 - chance)) for count in range(4)]
    counted = Rounds(1000, 4000, (*rounds, 300, 50, 60))
    recorded = Recorded("auto", Arrivals(concurrency=1), [Job(0.0, 1, 1)], 1.0, [0.1], counted, counted)
    survival = recorded_survival([recorded])
    assert len(survival) == 6
    conditional = [later / sooner for sooner, later in zip((1.0, *survival), survival, strict=False)]
    assert conditional[:4] == pytest.approx([chance] * 4, abs=0.01)
    assert conditional[4:] == pytest.approx([sum(conditional[:4]) / 4] * 2)


def line_of(**rounds: Any) -> dict[str, Any]:
    """A request of a run, as `paceline bench serving` logs it."""
    fields = {
        "repetition": 0,
        "due_s": 0.0,
        "first_s": 0.1,
        "num_prompt": 9,
        "num_reused": 0,
        "num_tokens": 40,
        "wall_s": 1.0,
    }
    return {"speculate": "auto", "concurrency": 1, "rate": None, **fields, **rounds}


BY_SOURCE = {
    "dflash": {"num_rounds": 100, "num_drafted": 200, "accepted_histogram": [50, 25, 25]},
    "ngram": {"num_rounds": 60, "num_drafted": 480, "accepted_histogram": [0, 0, 0, 0, 0, 0, 0, 0, 60]},
    "none": {"num_rounds": 40, "num_drafted": 0, "accepted_histogram": [40]},
}
ALL = {"num_rounds": 200, "num_drafted": 680, "accepted_histogram": [90, 25, 25, 0, 0, 0, 0, 0, 60]}


def written(folder: Path, *lines: dict[str, Any]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_lookups_do_not_count_as_the_drafters_rounds(tmp_path: Path) -> None:
    """Half of the drafter's rounds keep one draft; lookups, which all stand, and rounds without drafts say nothing of
    it."""
    [recorded] = read_passes(written(tmp_path, line_of(**ALL, rounds_by_source=BY_SOURCE)))
    assert recorded_survival([recorded]) == (0.5, 0.25)
    assert (recorded.own.num_rounds, recorded.own.tokens_per_round) == (100, 1.75)
    assert (recorded.rounds.tokens_per_round, recorded.rounds.drafted_per_round) == (pytest.approx(1 + 555 / 200), 3.4)
    [untold] = read_passes(written(tmp_path, line_of(**ALL)))
    assert len(recorded_survival([untold])) == 8


def test_auto_finds_text_to_draft_as_often_as_recorded(tmp_path: Path) -> None:
    """Lookups cost no drafting, so with all of them standing an answer takes far fewer rounds; `off` has none."""
    lines = [
        line_of(**ALL, rounds_by_source=BY_SOURCE),
        line_of(**ALL, rounds_by_source=BY_SOURCE) | {"speculate": "off"},
    ]
    passes = read_passes(written(tmp_path, *lines))
    lookups = recorded_lookups(passes[:1])
    assert lookups == Lookups(0.3, (1.0,) * 8) and lookups.chance == 1.0
    auto, off = compare(passes, table_of(STEPS), ServerShape(), recorded_survival(passes))
    assert auto.simulated_tokens_per_round > 2 and off.simulated_tokens_per_round == 1
    dear = table_of({**STEPS, "draft": [[rows, width, 0.2] for rows, width, _ in STEPS["draft"]]})
    longer = [replace(each, jobs=[replace(job, answer_tokens=4000) for job in each.jobs]) for each in passes]
    auto, off = compare(longer, dear, ServerShape(), recorded_survival(passes))
    assert auto.simulated_tokens_per_s > 1.2 * off.simulated_tokens_per_s  # only what a drafter computes takes its time
    alone = {name: BY_SOURCE[name] for name in ("ngram", "none")}
    assert recorded_lookups(read_passes(written(tmp_path, line_of(rounds_by_source=alone)))) is None


def test_where_lookups_are_the_drafter_they_count(tmp_path: Path) -> None:
    by_source = {name: BY_SOURCE[name] for name in ("ngram", "none")}
    passes = read_passes(
        written(tmp_path, line_of(rounds_by_source=by_source), line_of(num_rounds=1, accepted_histogram=[1]))
    )
    assert recorded_survival(passes) == pytest.approx((60 / 61,) * 8)


@pytest.mark.parametrize(
    "wrong", [[1], {"dflash": 3}, {"dflash": {"num_rounds": "many"}}, {"ngram": {"accepted_histogram": 1}}]
)
def test_rounds_that_are_no_counts(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="run paceline bench serving again"):
        read_passes(written(tmp_path, line_of(rounds_by_source=wrong)))


@pytest.mark.parametrize("wrong", [3, ["verify", 1, 2], ["verify", 1, 2, "long"]])
def test_times_that_are_no_times(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="run paceline bench serving again"):
        read_passes(written(tmp_path, line_of(**ALL), line_of(steps=[wrong])))


@pytest.mark.parametrize(
    ("speculate", "most", "policy"),
    [
        ("off", 7, "off"),
        ("auto", 7, "adaptive"),
        ("full", 7, "7"),
        ("3", 7, "3"),
        ("15", 7, "7"),
        ("0", 7, "off"),
        ("auto", 0, "off"),
        ("as it is", 7, "off"),
    ],
)
def test_a_contender_becomes_a_policy(speculate: str, most: int, policy: str) -> None:
    assert policy_for(speculate, most) == policy


def test_prefill_times() -> None:
    measured = table_of(STEPS).prefill_s
    assert measured(64, 64) == pytest.approx(0.040) and measured(160, 500) == pytest.approx(0.090)
    guessed = table_of({"verify": STEPS["verify"]}).prefill_s
    assert guessed(32, 32) == pytest.approx(0.026) and guessed(256, 256) == pytest.approx(0.138, rel=0.01)
    with pytest.raises(ConfigError, match="prefill time"):
        table_of({**STEPS, "prefill": [["a", 1]]})
    with pytest.raises(ConfigError, match="prefill of the table must be"):
        table_of({**STEPS, "prefill": 1})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.unlink(), "takes the folder of a run of paceline bench serving"),
        (lambda file: file.write_text("{"), "neither JSON nor JSON lines"),
        (lambda file: file.write_text('{"due_s": 1}\n'), "lacks repetition, due_s"),
        (
            lambda file: file.write_text(json.dumps({"speculate": "off", "concurrency": 1, "first_s": 1}) + "\n"),
            "of this version",
        ),
        (
            lambda file: file.write_text(json.dumps({"error": "x", "repetition": 0, "wall_s": 1.0}) + "\n"),
            "no answered request",
        ),
        (
            lambda file: file.write_text(json.dumps({"error": "x", "repetition": 0, "wall_s": "long"}) + "\n"),
            "of this version",
        ),
    ],
)
def test_runs_that_cannot_be_replayed(tmp_path: Path, spoil: Callable[[Path], Any], message: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("")
    spoil(file)
    with pytest.raises(ConfigError, match=message):
        read_passes(tmp_path)


# The command


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["simulate-serving", *words])
    if done.exception:
        raise done.exception
    return done.stdout


def last_line(text: str) -> dict[str, Any]:
    return json.loads(text.splitlines()[-1])


@pytest.mark.usefixtures("undrawn")
def test_a_run_with_its_own_times_needs_no_others(tmp_path: Path) -> None:
    """The command takes them unless it is told of others; without them a replay with None is refused."""
    with serving(talker()) as live:
        config = ServingConfig(concurrencies=(2,), num_requests=6, max_tokens=20, repeat=2)
        bench_serving(ServersConfig(url=live.url, speculate=("off",)), config, limit=2, out=tmp_path / "run")
    line = last_line(run("--against", str(tmp_path / "run"), "--prefill-chunk", "16", "--json"))
    assert line["kind"] == "own" and len(line["compared"][0]["errors"]) == 2
    table = tmp_path / "steps.json"
    table.write_text(json.dumps(STEPS))
    assert last_line(run("--against", str(tmp_path / "run"), "--steps", str(table), "--json"))["kind"] == "measured"
    passes = read_passes(tmp_path / "run")
    for each in passes:
        assert {kind for kind, *_ in each.steps} == {"verify", "prefill", "step"}
        assert {size for kind, size, *_ in each.steps if kind == "verify"} <= {1.0, 2.0}, "passes without drafts"
    with pytest.raises(ConfigError, match="or give --steps"):
        own_costs([replace(each, steps=[]) for each in passes])


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_over_measured_steps(steps: Path, tmp_path: Path) -> None:
    words = ["--steps", str(steps), "--acceptance", "survival:.8,.6,.5", "--requests", "40", "--prompt-tokens", "10-50"]
    words += ["--answer-tokens", "lognormal:40,0.5", "--policy=off,best,3", "--rate=1,50", "--concurrency=2", "--json"]
    line = last_line(run(*words, "--out", str(tmp_path / "run")))
    assert line["run"] == str(tmp_path / "run")
    assert [(each["policy"], each["rate"], each["concurrency"]) for each in line["results"]] == [
        (policy, rate, concurrency)
        for rate, concurrency in ((1.0, None), (50.0, None), (None, 2))
        for policy in ("off", "best", "3")
    ]
    by = {(each["policy"], each["rate"]): each for each in line["results"]}
    assert by["best", 1.0]["inter_token"]["mean"] < by["off", 1.0]["inter_token"]["mean"]
    assert by["off", 50.0]["is_saturated"] and not by["off", 1.0]["is_saturated"]
    files = {file.name for file in (tmp_path / "run").iterdir()}
    assert {"results.json", "report.md", "report.html", "config.json"} <= files
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("<svg") == 1 + 8 and "saturated" in page
    assert '<p class="verdict good">With speculation an answer comes ' in page


def test_usual_rates_reach_from_idle_to_too_much() -> None:
    words = ("--model", "smollm2-135m", "--hardware", "H100", "--requests", "30", "--policy", "off", "--max-draft", "2")
    output = run(*words)
    assert output.count("per second") >= 5 and "saturated" in output and "Limits:" in output


def test_replayed_against_a_run(steps: Path, folder: Path, tmp_path: Path) -> None:
    words = ("--steps", str(steps), "--against", str(folder), "--request-overhead", "0")
    options = ("--acceptance", "survival:" + ",".join(map(str, SURVIVAL)))
    line = last_line(run(*words, *options, "--json", "--out", str(tmp_path / "run")))
    assert line["num_within"] == len(line["compared"]) == 4
    assert max(abs(each["throughput_error"]) for each in line["compared"]) < 1e-6
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("<svg") == 1 + 2
    assert "at 4 of 4 loads: its other answers about this machine can be believed." in page
    recorded = last_line(run(*words, "--json"))
    assert recorded["survival"] == pytest.approx(SURVIVAL, abs=0.08) and recorded["num_within"] >= 2


def test_a_replay_s_memory_is_checked_for_the_run_s_own_rows(folder: Path, tmp_path: Path) -> None:
    """It was checked for 8 rows, whatever the run's server had."""
    run_folder = shutil.copytree(folder, tmp_path / "run")
    (run_folder / "config.json").write_text(json.dumps({"server": ["--max-batch", "2000"]}))
    answer = simulate_server(CostsConfig(model="Qwen3-8B", hardware="L4"), SimulateConfig(against=run_folder))
    assert answer.server.max_rows == 2000 and "up to 2000 streams" in answer.setup.assumed
    assert ["for 2000 x" in warning for warning in answer.setup.warnings] == [True]


def test_a_replay_leaves_its_run_alone(folder: Path) -> None:
    before = (folder / "metrics.jsonl").read_bytes()
    words = ["simulate-serving", "--against", str(folder), "--out", str(folder)]
    assert "is the folder of another run (bench-serving)" in str(CliRunner().invoke(app, words).exception)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_policy_that_is_none_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def worked(*_: object) -> None:
        raise AssertionError("it simulates before it has read --policy")

    monkeypatch.setattr("paceline.simulate.answer.capacity", worked)
    for policy, message in (("fastest", "'fastest' is not known"), (",", "at least one request, one policy")):
        with pytest.raises(ConfigError, match=message):
            run("--model", "smollm2-135m", "--hardware", "H100", "--policy", policy)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rate", "0"), "--rate must be above 0"),
        (("--rate", "soon"), "is no list of numbers"),
        (("--concurrency", "0"), "--concurrency must be at least 1"),
        (("--requests", "0"), "--requests must be between 1 and 1e6"),
        (("--requests", "1000000000"), "--requests must be between 1 and 1e6"),
        (("--max-draft", "0"), "--max-draft must be at least 1"),
        (("--acceptance", "1.5"), "between 0 and 1"),
        (("--prompt-tokens", "none"), "--prompt-tokens 'none' is no length"),
        (("--max-rows", "-1"), "--max-rows must be at least 1"),
        (("--steps", "/no/such.json"), "there is no /no/such.json"),
        (("--model", "no-such-model"), "no model 'no-such-model'"),
        (("--against", "/no/such/run"), "takes the folder of a run of paceline bench serving"),
        (("--against", "/no/such/run", "--rate", "1"), "--against has its own loads: leave --rate out"),
        (("--against", "/no/such/run", "--requests", "3", "--policy", "off"), "leave --requests, --policy out"),
        (("--acceptance", ""), "--acceptance is empty"),
    ],
)
def test_bad_words(words: tuple[str, ...], message: str) -> None:
    options = words if "--steps" in words or "--model" in words else (*words, "--hardware", "H100")
    with pytest.raises((ConfigError, FileNotFoundError), match=re.escape(message)):
        run(*options)
