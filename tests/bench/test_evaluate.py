"""An evaluation on a fake target: its figures, loops told apart, and a second run that goes on where the first ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.bench.config import BenchConfig
from paceline.bench.decode import Bench
from paceline.bench.evaluate import Evaluation, evaluation_config, heldout, set_figures
from paceline.bench.passes import Answer, Pass
from paceline.bench.summary import speedup_over, speedup_over_prompts
from paceline.commands import evaluate as command
from paceline.commands.evaluate import EvaluateAsk, evaluate
from paceline.config import EngineConfig
from paceline.draft.base import Drafter, NoDrafter
from paceline.engine.engine import Engine
from paceline.errors import CacheError, ConfigError, ModelNotFoundError, PromptError
from paceline.figures import is_loop
from paceline.hardware import Machine
from paceline.prompts import Prompt
from paceline.runlog import RunFolder
from paceline.testing import ByteTokenizer, FakeTarget, ScriptedDrafter

MACHINE = Machine("test", 1e9, {}, 1, 1)
CONFIG = BenchConfig(batches=(1, 2), temperatures=(0.0, 1.0), max_tokens=40, ignore_eos=True)


class FakeLLM:
    """As much of an LLM as an evaluation uses; every name but `none` is a drafter that is right 9 times of 10."""

    num_made = 0

    def __init__(self, model: str = "fake", *, drafter: str = "none", max_batch: int = 2, **settings: Any) -> None:
        FakeLLM.num_made += 1
        self.target = FakeTarget(vocab_size=258, num_rows=max_batch, max_len=256)
        self.tokenizer = ByteTokenizer()
        self.config = EngineConfig(model=model, device="cpu", dtype="float32")
        self.cache_bytes = 0
        self.use_drafter(drafter)

    def use_drafter(self, drafter: str | Drafter, **options: Any) -> None:
        if isinstance(drafter, str):
            drafter = NoDrafter() if drafter == "none" else ScriptedDrafter(self.target, 4, accuracy=0.9)
        self.drafter = drafter
        self.engine = Engine(self.target, cast(Any, self.tokenizer), drafter, eos_token_ids=(257,))

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.tokenizer.encode_chat(messages)


def prompts(*turns: str) -> list[Prompt]:
    return [Prompt(str(n), [{"role": "user", "content": each}], (each,), "test") for n, each in enumerate(turns)]


def run_bench(config: BenchConfig = CONFIG, *turns: str) -> Bench:
    made = Bench(cast(Any, FakeLLM()), prompts(*(turns or ("one", "two", "three", "four", "five"))), config, lambda _: None)
    made.run()
    return made


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EvaluateAsk:
    """An evaluation of a drafter's folder on two files, nothing run yet."""
    monkeypatch.setattr(command, "LLM", FakeLLM)
    monkeypatch.setattr(command, "this_machine", lambda device: MACHINE)
    monkeypatch.setattr(FakeLLM, "num_made", 0)
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    (drafter / "model.safetensors").write_bytes(b"weights")
    for name in ("easy", "hard"):
        rows = [{"prompt": f"{name} {n}"} for n in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = (str(tmp_path / "easy.jsonl"), str(tmp_path / "hard.jsonl"))
    config = BenchConfig(batches=(1,), max_tokens=8, ignore_eos=True)
    return EvaluateAsk(str(drafter), {"model": "fake"}, config, sources, out=tmp_path / "run")


def changed(ask: EvaluateAsk, **values: Any) -> EvaluateAsk:
    from dataclasses import replace

    return replace(ask, **values)


def test_a_loop_is_a_short_period_at_the_end() -> None:
    assert is_loop([1, 2, 3] + [7, 8] * 16)
    assert is_loop([5] * 32)
    assert not is_loop([5] * 31)
    assert not is_loop([1, 2, 3, 4, 5, 6, 7, 8, 9] * 9), "a period of 9 is not counted"
    assert not is_loop([*([7, 8] * 20), 9])


def test_beyond_batch_1_the_interval_is_over_prompts_and_stands_around_the_value() -> None:
    fast = Pass([Answer([1] * 10, "", 1.0), Answer([1] * 10, "", 1.0)], wall_s=1.5)
    slow = Pass([Answer([1] * 10, "", 2.0), Answer([1] * 10, "", 4.0)], wall_s=3.6)
    assert speedup_over([fast], [slow], batch=2).low is None
    assert speedup_over_prompts([fast], [slow], batch=1) == speedup_over([fast], [slow], batch=1)
    found = speedup_over_prompts([fast], [slow], batch=2)
    assert (found.value, found.low, found.high) == (pytest.approx(2.4), pytest.approx(1.6), pytest.approx(3.2))
    alone = speedup_over_prompts([Pass(fast.answers[:1], 1.0)], [Pass(slow.answers[:1], 2.0)], batch=2)
    assert (alone.value, alone.low) == (2.0, None)


def test_the_figures_of_one_set() -> None:
    made = run_bench(evaluation_config("good", CONFIG))
    figures = set_figures(made)
    assert [(each.drafter, each.batch, each.temperature) for each in figures.results][:4] == [
        ("none", 1, 0.0),
        ("good", 1, 0.0),
        ("none", 2, 0.0),
        ("good", 2, 0.0),
    ]
    for result in figures.results:
        low, high = result.speedup_interval
        assert low is not None and high is not None and low <= high
    assert [each.temperature for each in figures.looping] == [0.0, 1.0]
    assert len(figures.texts) == 8
    first = figures.texts[0]
    answer = made.passes[made.settings[1]][0].answers[0]
    assert (first.prompt, first.text, first.num_tokens) == ("one", answer.text, 40)
    assert first.tokens_per_round == pytest.approx(1 + answer.num_accepted / answer.num_rounds)
    assert json.dumps(figures.as_json())
    assert figures.as_json()["looping_share"] == figures.looping[0].looping_share


def test_loops_are_told_apart_from_the_rest() -> None:
    made = run_bench(evaluation_config("good", BenchConfig(max_tokens=40, ignore_eos=True)))
    answers = made.passes[made.settings[1]][0].answers
    for answer in answers[:2]:
        answer.token_ids, answer.num_rounds, answer.num_accepted = [9] * 40, 8, 32
    for answer in answers[2:]:
        answer.token_ids, answer.num_rounds, answer.num_accepted = list(range(40)), 20, 20
    (looping,) = set_figures(made).looping
    assert looping.looping_share == pytest.approx(0.4)
    assert looping.tokens_per_round == pytest.approx((2 * 40 + 3 * 40) / (2 * 8 + 3 * 20))
    assert looping.without_loops == 2.0
    for answer in answers:
        answer.token_ids = [9] * 40
    (looping,) = set_figures(made).looping
    assert (looping.looping_share, looping.without_loops) == (1.0, None)


def test_the_line_names_the_set_of_each_row() -> None:
    config = evaluation_config("good", CONFIG)
    made = run_bench(config)
    evaluation = Evaluation.begin(made.llm, MACHINE, "good", config)
    evaluation.sets["a"] = set_figures(made).as_json()
    line = evaluation.as_line()
    assert {row["prompts"] for row in line["results"]} == {"a"}
    assert len(line["results"]) == 8
    assert line["ceiling_tokens_per_s"] == 1e9 / made.llm.target.weight_bytes
    assert line["heldout"] == {"a": next(r.tokens_per_round for r in made.results() if r.drafter == "good")}
    assert heldout([{**row, "batch": 2} for row in line["results"]]) == {}


def test_nothing_to_evaluate() -> None:
    with pytest.raises(ConfigError, match="none drafts nothing"):
        evaluation_config("none", CONFIG)
    with pytest.raises(ConfigError, match="bench decode --against"):
        evaluation_config("good", BenchConfig(against=("transformers",)))
    assert evaluation_config("good", BenchConfig(batches=(1, 1))).batches == (1,)


def test_a_run_writes_its_evaluation(ask: EvaluateAsk, capsys: pytest.CaptureFixture[str]) -> None:
    line = evaluate(changed(ask, as_json=True))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == line
    assert list(line["sets"]) == list(line["heldout"]) == ["easy", "hard"]
    assert [(row["prompts"], row["drafter"]) for row in line["results"]] == [
        (name, drafter) for name in ("easy", "hard") for drafter in ("none", ask.drafter)
    ]
    assert ask.out is not None
    saved = json.loads((ask.out / "evaluation.json").read_text())
    assert {**saved, "run": str(ask.out)} == line
    assert json.loads((ask.out / "config.json").read_text())["what"] == "evaluate"


def test_a_second_run_does_what_is_missing(ask: EvaluateAsk, capsys: pytest.CaptureFixture[str]) -> None:
    first = evaluate(changed(ask, prompts=ask.prompts[:1]))
    both = evaluate(ask)
    assert "easy is done: skipped" in capsys.readouterr().err
    assert both["sets"]["easy"] == first["sets"]["easy"]
    assert list(both["sets"]) == ["easy", "hard"]
    assert FakeLLM.num_made == 2
    assert evaluate(ask) == both
    assert FakeLLM.num_made == 2, "with nothing left to do the model is not loaded"


def test_a_set_that_was_cut_short_is_run_again(ask: EvaluateAsk, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(llm: Any, each: Any, config: Any, before: Any = command._evaluate_set) -> dict[str, Any]:
        if each.name == "hard":
            raise KeyboardInterrupt
        return before(llm, each, config)

    with monkeypatch.context() as patched:
        patched.setattr(command, "_evaluate_set", stop)
        with pytest.raises(KeyboardInterrupt):
            evaluate(ask)
    assert ask.out is not None
    assert list(json.loads((ask.out / "evaluation.json").read_text())["sets"]) == ["easy"]
    assert list(evaluate(ask)["sets"]) == ["easy", "hard"]


def test_other_settings_are_refused_and_named(ask: EvaluateAsk, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate(ask)
    with pytest.raises(ConfigError, match="bench.max_tokens 8 -> 9"):
        evaluate(changed(ask, config=BenchConfig(batches=(1,), max_tokens=9, ignore_eos=True)))
    with pytest.raises(ConfigError, match="limit None -> 1"):
        evaluate(changed(ask, limit=1))
    Path(ask.prompts[0]).write_text('{"prompt": "another"}\n')
    with pytest.raises(ConfigError, match="prompt set easy: num_prompts 3 -> 1"):
        evaluate(ask)
    monkeypatch.setattr(command, "this_machine", lambda device: Machine("another", 1e9, {}, 1, 1))
    extra = Path(ask.prompts[0]).with_name("extra.jsonl")
    extra.write_text('{"prompt": "more"}\n')
    with pytest.raises(ConfigError, match="machine name test -> another"):
        evaluate(changed(ask, prompts=(str(extra),)))
    (Path(ask.drafter) / "model.safetensors").write_bytes(b"trained further")
    with pytest.raises(ConfigError, match="drafter_sha256"):
        evaluate(ask)


def test_a_training_run_keeps_its_config_and_metrics(ask: EvaluateAsk) -> None:
    run = RunFolder.create("train", {"target": "fake"}, ask.out)
    run.log(step=1, loss=2.0)
    line = evaluate(changed(ask, limit=2))
    assert json.loads((run.path / "config.json").read_text())["what"] == "train"
    assert run.metrics() == [{"step": 1, "loss": 2.0}]
    assert line["sets"]["easy"]["num_prompts"] == 2
    assert (run.path / "evaluation.json").is_file()


def test_without_prompts_the_built_in_set_runs(ask: EvaluateAsk) -> None:
    line = evaluate(changed(ask, prompts=(), limit=1))
    assert list(line["sets"]) == ["built-in"]


def test_files_of_one_name_keep_their_folders(ask: EvaluateAsk, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    other = tmp_path / "more" / "easy.jsonl"
    other.write_text('{"prompt": "again"}\n')
    line = evaluate(changed(ask, prompts=(ask.prompts[0], str(other), ask.prompts[0])))
    assert list(line["sets"]) == [ask.prompts[0], str(other)]


def test_what_is_missing_is_said_before_the_model_is_loaded(ask: EvaluateAsk, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for drafter in ("/no/such/drafter", str(tmp_path / "empty")):
        with pytest.raises(ModelNotFoundError, match="drafter") as caught:
            evaluate(changed(ask, drafter=drafter))
        assert "\n" not in str(caught.value)
    with pytest.raises(PromptError, match="there is no prompt file"):
        evaluate(changed(ask, prompts=("/no/such.jsonl",)))
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="--out"):
        evaluate(changed(ask, out=tmp_path / "file"))
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for text in ("{", "[]", "{}"):
        (damaged / "evaluation.json").write_text(text)
        with pytest.raises(ConfigError, match="choose another --out"):
            evaluate(changed(ask, out=damaged))
    assert FakeLLM.num_made == 0
