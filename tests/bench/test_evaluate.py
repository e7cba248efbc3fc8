"""An evaluation on a fake target: its figures, loops told apart, and a second run that goes on where the first
ended."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
from benched import FakeLLM, make_drafter
from shown import Shown

from paceline.bench import decode, runs
from paceline.bench import evaluate as library
from paceline.bench.config import BenchConfig
from paceline.bench.decode import Bench, introduction
from paceline.bench.evaluate import Evaluation, PromptSet, evaluate, evaluation_config, set_figures
from paceline.commands import evaluate as command
from paceline.config import EngineConfig
from paceline.data.prompts import Prompt
from paceline.errors import CacheError, ConfigError, ModelNotFoundError, PromptError
from paceline.hardware import Machine
from paceline.report.statistics import is_loop
from paceline.report.tables import SILENT, Progress
from paceline.runs.folder import RunFolder, plain
from paceline.types import Round

MACHINE = Machine("test", 1e9, {}, 1, 1)
CONFIG = BenchConfig(batches=(1, 2), temperatures=(0.0, 1.0), max_tokens=40, ignore_eos=True)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "make_drafter", make_drafter)


def prompts(*turns: str) -> list[Prompt]:
    return [Prompt(str(n), [{"role": "user", "content": each}], (each,), "test") for n, each in enumerate(turns)]


def run_bench(config: BenchConfig = CONFIG, *turns: str) -> Bench:
    benchmark = Bench(
        cast(Any, FakeLLM(max_batch=2)),
        prompts(*(turns or ("one", "two", "three", "four", "five"))),
        config,
        lambda _: None,
    )
    benchmark.run()
    return benchmark


@dataclass
class Asked:
    """The parameters of an evaluation."""

    drafter: str
    prompts: tuple[str, ...]
    out: Path
    config: BenchConfig
    limit: int | None = None

    def run(self, progress: Progress = SILENT, **changes: Any) -> Evaluation:
        merged = replace(self, **changes)
        more: dict[str, Any] = {"engine": EngineConfig(model="fake"), "limit": merged.limit, "out": merged.out}
        return evaluate(merged.drafter, merged.prompts, merged.config, progress=progress, **more)


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """An evaluation of a drafter's folder on two files, nothing run yet."""
    monkeypatch.setattr(runs, "LLM", FakeLLM)
    monkeypatch.setattr(runs, "this_machine", lambda device: MACHINE)
    monkeypatch.setattr(FakeLLM, "num_made", 0)
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    (drafter / "model.safetensors").write_bytes(b"weights")
    for name in ("easy", "hard"):
        rows = [{"prompt": f"{name} {n}"} for n in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = (str(tmp_path / "easy.jsonl"), str(tmp_path / "hard.jsonl"))
    return Asked(str(drafter), sources, tmp_path / "run", BenchConfig(batches=(1,), max_tokens=8, ignore_eos=True))


def test_sets_of_other_tools_or_template_variables_are_other_sets() -> None:
    prompt = Prompt("p", [{"role": "user", "content": "a"}], ("a",), "x")
    others = [prompt, replace(prompt, tools=({"type": "function"},)), replace(prompt, variables=(("tone", "dry"),))]
    hashes = [PromptSet("s", "s", [each]).noted["prompts_sha256"] for each in others]
    assert len(set(hashes)) == 3


def test_a_loop_is_a_short_period_at_the_end() -> None:
    assert is_loop([1, 2, 3] + [7, 8] * 16)
    assert is_loop([5] * 32)
    assert not is_loop([5] * 31)
    assert not is_loop([1, 2, 3, 4, 5, 6, 7, 8, 9] * 9), "a period of 9 is not counted"
    assert not is_loop([*([7, 8] * 20), 9])


@pytest.mark.slow
def test_the_figures_of_one_set() -> None:
    benchmark = run_bench(evaluation_config("good", CONFIG))
    figures = set_figures(benchmark)
    assert [(each.drafter, each.batch, each.temperature) for each in figures["results"]][:4] == [
        ("none", 1, 0.0),
        ("good", 1, 0.0),
        ("none", 2, 0.0),
        ("good", 2, 0.0),
    ]
    for result in figures["results"]:
        low, high = result.speedup_interval
        if low is None or high is None:  # of too few tokens there is no verdict
            assert low is None and high is None and result.drafter != "none"
        else:
            assert low <= high
    assert [each["temperature"] for each in figures["looping"]] == [0.0, 1.0]
    assert len(figures["texts"]) == 8
    first = figures["texts"][0]
    answer = benchmark.passes[benchmark.settings[1]][0].answers[0]
    assert (first["prompt"], first["text"], first["num_tokens"]) == ("one", answer.text, 40)
    assert first["tokens_per_round"] == pytest.approx(
        1 + sum(one.num_accepted for one in answer.rounds) / len(answer.rounds)
    )
    assert json.dumps(plain(figures))
    assert figures["looping_share"] == figures["looping"][0]["looping_share"]


@pytest.mark.slow
def test_loops_are_told_apart_from_the_rest() -> None:
    benchmark = run_bench(evaluation_config("good", BenchConfig(max_tokens=40, ignore_eos=True)))
    answers = benchmark.passes[benchmark.settings[1]][0].answers
    for answer in answers[:2]:
        answer.token_ids, answer.rounds = [9] * 40, [Round(4, 4, "good")] * 8
    for answer in answers[2:]:
        answer.token_ids, answer.rounds = list(range(40)), [Round(4, 1, "good")] * 20
    (looping,) = set_figures(benchmark)["looping"]
    assert looping["looping_share"] == pytest.approx(0.4)
    assert looping["tokens_per_round"] == pytest.approx((2 * 40 + 3 * 40) / (2 * 8 + 3 * 20))
    assert looping["without_loops"] == 2.0
    for answer in answers:
        answer.token_ids = [9] * 40
    (looping,) = set_figures(benchmark)["looping"]
    assert (looping["looping_share"], looping["without_loops"]) == (1.0, None)


@pytest.mark.slow
def test_decode_and_evaluation_report_the_same_figures_under_the_same_names() -> None:
    benchmark = run_bench(evaluation_config("good", BenchConfig(max_tokens=40, ignore_eos=True)))
    figures = set_figures(benchmark)
    assert figures["results"] == benchmark.results()
    (looping,) = figures["looping"]
    drafted = figures["results"][-1]
    assert (drafted.drafter, looping["tokens_per_round"]) == ("good", drafted.tokens_per_round)
    assert looping["tokens_per_round_interval"] == drafted.tokens_per_round_interval
    assert drafted.sources.keys() == {"scripted", "none"} or drafted.sources.keys() == {"scripted"}


@pytest.mark.slow
def test_the_line_names_the_set_of_each_row(tmp_path: Path) -> None:
    config = evaluation_config("good", CONFIG)
    benchmark = run_bench(config)
    evaluation = Evaluation("good", {}, RunFolder(tmp_path), introduction(benchmark.llm, MACHINE, config))
    evaluation.sets["a"] = plain(set_figures(benchmark))
    line = evaluation.as_line()
    assert {row["prompts"] for row in line["results"]} == {"a"}
    assert len(line["results"]) == 8
    assert line["ceiling_tokens_per_s"] == 1e9 / benchmark.llm.target.weight_bytes
    assert line["heldout"] == {"a": next(r.tokens_per_round for r in benchmark.results() if r.drafter == "good")}
    for row in evaluation.sets["a"]["results"]:
        row["batch"] = 2
    assert evaluation.heldout == {}


def test_nothing_to_evaluate() -> None:
    with pytest.raises(ConfigError, match="none drafts nothing"):
        evaluation_config("none", CONFIG)
    with pytest.raises(ConfigError, match="bench decode --against"):
        evaluation_config("good", BenchConfig(against=("transformers",)))
    assert evaluation_config("good", BenchConfig(batches=(1, 1))).batches == (1,)


@pytest.mark.slow
def test_a_run_writes_its_evaluation(ask: Asked) -> None:
    heard = Shown()
    done = ask.run(heard)
    assert list(done.sets) == list(done.heldout) == ["easy", "hard"]
    assert [(row["prompts"], row["drafter"]) for row in done.results] == [
        (name, drafter) for name in ("easy", "hard") for drafter in ("none", ask.drafter)
    ]
    saved = json.loads((ask.out / "evaluation.json").read_text())
    line = done.as_line()
    assert {key: saved[key] for key in line} == line
    assert {"processor", "versions", "commit"} <= set(saved)
    assert json.loads((ask.out / "config.json").read_text())["what"] == "evaluate"
    assert len(heard.tables) == 2 and any("end in a loop" in heading for heading in heard.lines)


@pytest.mark.slow
def test_the_command_shows_and_prints_the_evaluation(ask: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    command.evaluate(
        ask.drafter, EngineConfig(model="org/fake"), ask.config, list(ask.prompts), out=ask.out, as_json=True
    )
    output = capsys.readouterr()
    line = json.loads(output.out.splitlines()[-1])
    assert list(line["sets"]) == ["easy", "hard"]
    assert line["run"] == str(ask.out)
    assert "tokens/round" in output.err and "ceiling" in output.err and "0-512" not in output.err


@pytest.mark.slow
def test_the_command_shows_the_acceptance_length_by_context(ask: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"out": ask.out, "as_json": True, "by_context": True}
    command.evaluate(ask.drafter, EngineConfig(model="org/fake"), ask.config, list(ask.prompts), **options)
    output = capsys.readouterr()
    rows = [row for each in json.loads(output.out.splitlines()[-1])["sets"].values() for row in each["by_context"]]
    assert [(row["from"], row["to"], row["rounds"] > 0) for row in rows] == [(0, 512, True)] * 2
    shown = [line.split()[-2:] for line in output.err.splitlines() if "0-512" in line]
    assert shown == [[str(row["rounds"]), f"{row['tokens_per_round']:.2f}"] for row in rows]


@pytest.mark.slow
def test_a_second_run_does_what_is_missing(ask: Asked) -> None:
    first = ask.run(prompts=ask.prompts[:1])
    heard = Shown()
    both = ask.run(heard)
    assert "easy is done: skipped" in heard.lines
    assert both.sets["easy"] == first.sets["easy"]
    assert list(both.sets) == ["easy", "hard"]
    assert FakeLLM.num_made == 2
    assert ask.run().as_line() == both.as_line()
    assert FakeLLM.num_made == 2, "with nothing left to do the model is not loaded"


@pytest.mark.slow
def test_a_set_that_was_cut_short_is_run_again(ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(llm: Any, each: Any, *more: Any, before: Any = library._evaluate_set) -> dict[str, Any]:
        if each.name == "hard":
            raise KeyboardInterrupt
        return before(llm, each, *more)

    with monkeypatch.context() as patched:
        patched.setattr(library, "_evaluate_set", stop)
        with pytest.raises(KeyboardInterrupt):
            ask.run()
    assert list(json.loads((ask.out / "evaluation.json").read_text())["sets"]) == ["easy"]
    assert list(ask.run().sets) == ["easy", "hard"]


@pytest.mark.slow
def test_other_settings_are_refused_and_named(ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    ask.run()
    with pytest.raises(ConfigError, match="bench.max_tokens 8 -> 9"):
        ask.run(config=BenchConfig(batches=(1,), max_tokens=9, ignore_eos=True))
    with pytest.raises(ConfigError, match="limit None -> 1"):
        ask.run(limit=1)
    Path(ask.prompts[0]).write_text('{"prompt": "another"}\n')
    with pytest.raises(ConfigError, match="prompt set easy: num_prompts 3 -> 1"):
        ask.run()
    monkeypatch.setattr(runs, "this_machine", lambda device: Machine("another", 1e9, {}, 1, 1))
    extra = Path(ask.prompts[0]).with_name("extra.jsonl")
    extra.write_text('{"prompt": "more"}\n')
    with pytest.raises(ConfigError, match="machine test -> another"):
        ask.run(prompts=(str(extra),))
    (Path(ask.drafter) / "model.safetensors").write_bytes(b"trained further")
    with pytest.raises(ConfigError, match="drafter_sha256"):
        ask.run()


@pytest.mark.slow
def test_a_training_run_keeps_its_config_and_metrics(ask: Asked) -> None:
    run = RunFolder.create("train", {"target": "fake"}, ask.out)
    run.log(step=1, loss=2.0)
    done = ask.run(limit=2)
    assert json.loads((run.path / "config.json").read_text())["what"] == "train"
    assert run.metrics() == [{"step": 1, "loss": 2.0}]
    assert done.sets["easy"]["num_prompts"] == 2
    assert (run.path / "evaluation.json").is_file()


def test_without_prompts_the_built_in_set_runs(ask: Asked) -> None:
    assert list(ask.run(prompts=(), limit=1).sets) == ["built-in"]


@pytest.mark.slow
def test_files_of_one_name_keep_their_folders(ask: Asked, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    other = tmp_path / "more" / "easy.jsonl"
    other.write_text('{"prompt": "again"}\n')
    done = ask.run(prompts=(ask.prompts[0], str(other), ask.prompts[0]))
    assert list(done.sets) == [ask.prompts[0], str(other)]


def test_what_is_missing_is_said_before_the_model_is_loaded(ask: Asked, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for drafter in ("/no/such/drafter", str(tmp_path / "empty")):
        with pytest.raises(ModelNotFoundError, match="drafter") as caught:
            ask.run(drafter=drafter)
        assert "\n" not in str(caught.value)
    with pytest.raises(PromptError, match="there is no prompt file"):
        ask.run(prompts=("/no/such.jsonl",))
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="--out"):
        ask.run(out=tmp_path / "file")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for text in ("{", "[]", "{}"):
        (damaged / "evaluation.json").write_text(text)
        with pytest.raises(ConfigError, match="choose another --out"):
            ask.run(out=damaged)
    assert FakeLLM.num_made == 0
