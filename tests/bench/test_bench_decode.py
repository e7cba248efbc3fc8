"""The benchmark's arithmetic on numbers made by hand, and the whole of it on a fake target."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from benched import FakeLLM, make_drafter
from doubles import FakeTarget, ScriptedDrafter

from paceline.bench import decode, runs
from paceline.bench.config import BenchConfig, LossyConfig, MockConfig, StepsConfig
from paceline.bench.decode import Bench, as_line, differences, speedup_over
from paceline.bench.drafting import drafting, sources_table
from paceline.bench.pages.run_page import page, read_run, verdict_on
from paceline.bench.passes import Answer, Pass, Request, make_requests, run_pass
from paceline.config import EngineConfig
from paceline.data.prompts import Prompt
from paceline.errors import ConfigError, ContextLengthError, ModelNotFoundError, SamplingError
from paceline.hardware import Machine
from paceline.report.statistics import bootstrap, first_difference, ratio_of_sums, repetition
from paceline.runs.folder import RunFolder
from paceline.types import Round, SamplingParams

MACHINE = Machine("test", 1e9, {}, 1, 1)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "make_drafter", make_drafter)


def prompts(*turns: tuple[str, ...]) -> list[Prompt]:
    return [Prompt(str(n), [{"role": "user", "content": each[0]}], each, "test") for n, each in enumerate(turns)]


def bench(config: BenchConfig, *turns: tuple[str, ...], max_len: int = 256) -> Bench:
    return Bench(
        cast(Any, FakeLLM(max_len=max_len)),
        prompts(*(turns or (("one",), ("two",), ("three",)))),
        config,
        notice=lambda _: None,
    )


def test_what_is_measured_has_not_seen_the_warm_up() -> None:
    """An engine keeps the prompts it has seen: the first requests would be answered from what the warm-up computed."""
    one = bench(BenchConfig(("none", "good"), (1,), (0.0,), 8, 1))
    target = cast(FakeTarget, one.llm.target)
    target.is_width_invariant = True
    long = [index % 250 for index in range(40)]
    one.requests = [replace(request, token_ids=long + request.token_ids) for request in one.requests[:1]]
    for setting in one.settings:
        begun = len(target.calls)
        one._pass(setting, lambda: None)
        prefills = [call for call in target.calls[begun:] if call.num_tokens > 20]
        assert len(prefills) == 2, "the warm-up's and the measured one's"


@pytest.mark.slow
def test_a_drafter_is_bound_once_however_many_passes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Binding packs the weights of a drafter anew: seconds for each pass."""
    bound: list[str] = []
    before = ScriptedDrafter.bind
    monkeypatch.setattr(
        ScriptedDrafter, "bind", lambda self, target: (bound.append(self.name), before(self, target))[1]
    )
    benchmark = bench(BenchConfig(("none", "good"), (1, 2), (0.0, 1.0), max_tokens=8, repeat=3))
    benchmark.run()
    assert len(bound) == 1


def test_bootstrap_brackets_the_figure() -> None:
    pairs = [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0), (2.0, 1.0)] * 5
    low, high = bootstrap(pairs, ratio_of_sums)
    assert low and high and 1.5 < low < 2.0 < high < 2.5
    assert bootstrap(pairs, ratio_of_sums) == (low, high), "the same draws every time"
    assert bootstrap(pairs[:1], ratio_of_sums) == (None, None)


def test_repetition_and_first_difference() -> None:
    assert repetition([list(range(20))]) == 0.0
    assert repetition([[7] * 108]) == 100 / 101
    assert repetition([[1, 2]]) == 0.0
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_figures_of_drafting_weigh_by_rounds_and_tell_sources_apart() -> None:
    answers = [[Round(4, 4, "dflash")], [Round(2, 1, "ngram")] * 3 + [Round(0, 0, "none")] * 6]
    figures = drafting(answers, num_drafted=4)
    assert figures.tokens_per_round == 1.7
    assert figures.tokens_per_round_interval == (pytest.approx(1 + 3 / 9), 5.0)
    assert figures.acceptance_rate == 0.7
    assert figures.accepted_histogram == [6, 3, 0, 0, 1]
    assert figures.survival == [0.4, 0.1, 0.1, 0.1]
    assert figures.sources == {
        "dflash": {"share_of_rounds": 0.1, "tokens_per_round": 5.0, "acceptance_rate": 1.0},
        "ngram": {"share_of_rounds": 0.3, "tokens_per_round": 2.0, "acceptance_rate": 0.5},
        "none": {"share_of_rounds": 0.6, "tokens_per_round": 1.0, "acceptance_rate": None},
    }
    assert ["x", "ngram", "30%", "2.00", "50%"] in sources_table([("x", figures)]).texts()
    assert drafting([[]]).tokens_per_round == 1.0, "an answer of one token, which is prefill's"


def test_speedup_is_a_ratio_of_rates() -> None:
    fast = Pass([Answer([1] * 10, "", 1.0), Answer([1] * 10, "", 1.0)], wall_s=2.0)
    slow = Pass([Answer([1] * 10, "", 2.0), Answer([1] * 10, "", 4.0)], wall_s=6.0)
    assert speedup_over([fast], [slow]) == (pytest.approx(3.0), (2.0, 4.0))


def test_beyond_batch_1_the_interval_is_over_prompts_and_stands_around_the_value() -> None:
    fast = Pass([Answer([1] * 10, "", 1.0), Answer([1] * 10, "", 1.0)], wall_s=1.5)
    slow = Pass([Answer([1] * 10, "", 2.0), Answer([1] * 10, "", 4.0)], wall_s=3.6)
    assert speedup_over([fast], [slow]) == (pytest.approx(2.4), (pytest.approx(1.6), pytest.approx(3.2)))
    alone = speedup_over([Pass(fast.answers[:1], 1.0)], [Pass(slow.answers[:1], 2.0)])
    assert alone == (2.0, (None, None))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_a_whole_benchmark_on_a_fake_target(batch: int) -> None:
    benchmark = bench(BenchConfig(("good", "bad"), (batch,), (0.0, 1.0), max_tokens=24, repeat=2, ignore_eos=True))
    seen = []
    benchmark.run(on_answer=seen.append)
    assert len(seen) == benchmark.num_answers == 6 * 2 * 3
    results = {(result.drafter, result.temperature): result for result in benchmark.results()}
    plain, good, bad = (results[name, 0.0] for name in ("none", "good", "bad"))
    assert next(iter(results)) == ("none", 0.0)
    assert (plain.tokens_per_round, plain.speedup, plain.identical, plain.survival) == (1.0, 1.0, 1.0, [])
    assert good.identical == bad.identical == 1.0
    assert good.tokens_per_round is not None
    assert good.tokens_per_round > 3
    assert len(good.survival) == 4
    assert sorted(good.survival, reverse=True) == good.survival
    assert bad.tokens_per_round == 1.0
    assert results["good", 1.0].identical is None
    assert all(result.lossless for result in results.values())
    assert all(result.num_output_tokens == 3 * 24 for result in results.values())
    assert benchmark.llm.target.cache.num_free == 4


def test_never_more_in_flight_than_the_batch() -> None:
    llm = FakeLLM()
    requests = [Request(str(n), [1, 2, 3 + n]) for n in range(5)]
    done = run_pass(llm.engine, requests, [SamplingParams(max_tokens=6, ignore_eos=True)] * 5, batch=2)
    assert max(len(call.rows) for call in llm.target.calls) == 2
    assert [answer.token_ids for answer in done.answers] == [llm.target.greedy(each.token_ids, 6) for each in requests]


def test_a_batch_has_at_most_as_many_rows_as_there_are_requests() -> None:
    """Two requests in a batch of four are measured, and reported, as a batch of two, once."""
    heard: list[str] = []
    config = BenchConfig(("good",), (1, 4, 2, 4), (0.0, 0.0), 4)
    one = Bench(cast(Any, FakeLLM()), prompts(("one",), ("two",)), config, notice=heard.append)
    one.run()
    assert [str(setting) for setting in one.settings] == [
        f"{name}, batch {batch}, temperature 0" for batch in (1, 2) for name in ("none", "good")
    ]
    assert heard == ["2 requests fill no batch of 4: measured in batches of at most 2"]


def test_later_turns_follow_the_models_answer() -> None:
    benchmark = bench(BenchConfig(max_tokens=8, drafters=("none",)), ("first", "second"))
    first, second = benchmark.requests
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    assert bytes(token for token in second.token_ids if token < 256).endswith(b"user: second\nassistant: ")


def test_tools_and_template_variables_of_a_prompt_are_part_of_each_turn() -> None:
    llm, tool = FakeLLM(), {"type": "function", "function": {"name": "f"}}
    llm.tokenizer.chat_template = "{{ tools | length }} tools, {{ tone }}: {{ messages[-1].content }}"
    prompt = Prompt(
        "p", [{"role": "user", "content": "a"}], ("a", "b"), "x", tools=(tool,), variables=(("tone", "dry"),)
    )
    requests, _ = make_requests(cast(Any, llm), [prompt], 4)
    assert [llm.tokenizer.decode(each.token_ids) for each in requests] == ["1 tools, dry: a", "1 tools, dry: b"]


def test_what_does_not_fit_is_left_out_and_counted() -> None:
    config = BenchConfig(max_tokens=16, drafters=("none",))
    assert bench(config, ("x" * 300, "then"), ("short",)).num_skipped == 2
    with pytest.raises(ContextLengthError, match="raise max_len or lower max_tokens"):
        bench(config, ("x" * 300,))


def test_a_difference_is_reported_with_its_gap() -> None:
    llm = FakeLLM()
    request = Request("r", [5, 6])
    right = llm.target.greedy(request.token_ids, 4)
    wrong = [*right[:2], (right[2] + 1) % 258, right[3]]
    (difference,) = differences(llm.target, [request], Pass([Answer(wrong, "", 1.0)]), Pass([Answer(right, "", 1.0)]))
    logits = llm.target.logits_after(request.token_ids + right[:2])
    assert difference.index == 2
    assert difference.top2_gap == pytest.approx(float(logits.topk(2).values.diff().abs()))
    assert llm.target.cache.num_free == 4


def test_bad_settings() -> None:
    for settings in ({"batches": (0,)}, {"repeat": 0}, {"temperatures": ()}, {"against": ("vllm",)}):
        with pytest.raises(ConfigError):
            BenchConfig(**cast(Any, settings))
    with pytest.raises(SamplingError):
        BenchConfig(temperatures=(-1.0,))
    with pytest.raises(ConfigError, match="cache rows"):
        bench(BenchConfig(batches=(5,)))


@pytest.mark.slow
def test_report_and_json_line(tmp_path: Path) -> None:
    benchmark = bench(BenchConfig(("none", "good"), max_tokens=16, ignore_eos=True))
    benchmark.run()
    line = as_line(benchmark, MACHINE)
    assert (line["backend"], line["isa"], line["weight_format"]) == ("torch", None, "float32")
    assert line["ceiling_tokens_per_s"] == 1e9 / benchmark.llm.target.weight_bytes
    pytest.importorskip("matplotlib")
    run = RunFolder.create("bench-decode", {"prompts": "some.jsonl"}, tmp_path / "run")
    assert runs.write_run(run, benchmark, MACHINE, line) is None
    text = (run.path / "report.md").read_text()
    assert "ceiling: test reads 1.0 GB/s" in text
    assert "| good | 1 | 0 |" in text and "## Rounds by source of drafts" in text
    saved = json.loads((run.path / "results.json").read_text())
    assert [each["drafter"] for each in saved["results"]] == ["none", "good"]
    assert len(saved["runs"][0]["answers"]) == 3
    assert {"command", "date", "processor", "versions", "commit"} <= set(saved)
    verdict = verdict_on(line["results"], line["looping"])
    assert verdict.startswith("No verdict on the speed-up (one request at a time, greedy): "), "48 tokens are too few"
    assert text.index(verdict) < text.index("ceiling: test reads")
    shown = (run.path / "report.html").read_text()
    assert shown == page(read_run(run.path)), "paceline report draws the same page"
    assert "Decoding speed: fake" in shown and '<p class="verdict">No verdict' in shown
    for each in ("Survival, T=0", "Speed-up, with 95% intervals", "<td>good</td>", "<h3>some.jsonl: "):
        assert each in shown, each


@pytest.mark.slow
def test_without_matplotlib_the_page_is_left_out_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = bench(BenchConfig(("none", "good"), max_tokens=8))
    benchmark.run()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = RunFolder.create("bench-decode", {}, tmp_path / "run")
    assert "pip install 'paceline[plots]'" in (
        runs.write_run(run, benchmark, MACHINE, as_line(benchmark, MACHINE)) or ""
    )
    assert (run.path / "report.md").exists() and not (run.path / "report.html").exists()


@pytest.mark.parametrize(
    ("measure", "config", "what"),
    [
        (runs.bench_decode, BenchConfig(), "bench-decode"),
        (runs.bench_mock, MockConfig(), "bench-decode"),
        (runs.bench_steps, StepsConfig(), "bench-steps"),
        (runs.bench_lossy, LossyConfig(("gsm8k=x.jsonl",)), "bench-lossy"),
    ],
)
def test_a_run_stays_until_the_model_of_the_next_one_is_loaded(
    tmp_path: Path, measure: Callable[..., Any], config: Any, what: str
) -> None:
    """A mistyped --model deleted the results of the run before."""
    run = RunFolder.create(what, {"llm": "good"}, tmp_path / "run")
    run.results({"speedup": 2.0})
    before = {file.name: file.read_text() for file in run.path.iterdir()}
    with pytest.raises(ModelNotFoundError, match="typo"):
        measure(EngineConfig(model="./typo"), config, out=run.path)
    assert {file.name: file.read_text() for file in run.path.iterdir()} == before and "results.json" in before
    with pytest.raises(ConfigError, match="folder of another run .train."):
        measure(EngineConfig(model="./typo"), config, out=RunFolder.create("train", {}, tmp_path / "other").path)
