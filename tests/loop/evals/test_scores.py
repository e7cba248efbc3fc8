"""A suite asked: what is kept, what is refused before anything is asked, and models with a drafter that changes
nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from eval_doubles import Says, suite
from loopback import Handler, answering
from small_llm import fake_llm

from paceline.data.prompts import read_prompts
from paceline.errors import ConfigError, ContextLengthError, DownloadError, PromptError
from paceline.loop.evals import compare, read_scores, read_suite, run_suite
from paceline.loop.evals.answerers import EndpointAnswerer, LLMAnswerer
from paceline.loop.evals.config import EvalSampling, PricesConfig
from paceline.loop.evals.suite import Case, Suite
from paceline.net.streaming import Client


def test_scores_costs_and_the_file(tmp_path: Path) -> None:
    prices = PricesConfig(price_in=10.0, price_out=100.0)
    done = run_suite(suite(), Says(["0", "1", "2", "no"]), samples=2, prices=prices)
    assert done.mean == 0.75 and done.num_answers == 8 and done.cases[3].why == ("another text",) * 2
    assert done.price_per_1000 == pytest.approx(1000 * (5 * 10 + 2 * 100) / 1e6)
    done.write(tmp_path / "scores.json")
    assert read_scores(tmp_path) == done
    (tmp_path / "scores.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no scores"):
        read_scores(tmp_path)


def test_an_answerer_that_leaves_cases_out_is_refused() -> None:
    with pytest.raises(PromptError, match="left cases without an answer"):
        run_suite(suite(), Says(["0"]))


def test_a_judge_is_missed_before_anything_is_asked() -> None:
    judged = Suite("s", (Case("a", {"kind": "judge", "reference": "x"}, ({"role": "user", "content": "?"},)),))
    with pytest.raises(ConfigError, match="--judge"):
        run_suite(judged, Says(["never asked"]))


def test_suites_there_and_back(tmp_path: Path) -> None:
    traced = Case("t", {"kind": "exact", "answer": "x"}, token_ids=(5, 6), text="hi", origin={"digest": "d"})
    written = Suite("s", (*suite(2).cases, traced))
    reread = read_suite(written.write(tmp_path / "s.jsonl"))
    assert reread.cases == written.cases and reread.digest == written.digest
    assert len(read_prompts(tmp_path / "s.jsonl")) == 3
    assert reread.digest != reread.first(2).digest
    (tmp_path / "twice.jsonl").write_text(2 * (json.dumps(traced.as_row()) + "\n"))
    with pytest.raises(PromptError, match="two cases"):
        read_suite(tmp_path / "twice.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(PromptError, match="line 1"):
        read_suite(tmp_path / "bad.jsonl")
    with pytest.raises(PromptError, match="paceline evals make"):
        read_suite(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": "Say hi."}, "'messages' must be a list"),
        ({"messages": {"role": "user", "content": "?"}}, "'messages' must be a list"),
        ({"prompt_ids": ["Say"]}, "prompt_ids must be a list of token ids"),
        ({"prompt_ids": [-1]}, "prompt_ids must be a list of token ids"),
        ({"prompt_ids": 5}, "prompt_ids must be a list of token ids"),
        ({"prompt_ids": [5], "text": 5}, "text must be a text"),
        ({"prompt_ids": [5], "origin": "traces"}, "origin an object"),
    ],
)
def test_a_prompt_that_cannot_be_asked_is_refused_with_its_line(
    tmp_path: Path, fields: dict[str, Any], text: str
) -> None:
    """They were read, and ended the run with a TypeError when the model was loaded."""
    file = tmp_path / "s.jsonl"
    file.write_text(json.dumps({"id": "a", "scorer": {"kind": "exact", "answer": "x"}, **fields}) + "\n")
    with pytest.raises(PromptError, match=f"line 1: .*{text}"):
        read_suite(file)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(limit: int) -> None:
    """0 ended in StatisticsError when everything had been loaded, -1 left the last case out."""
    with pytest.raises(PromptError, match=f"limit must be at least 1, not {limit}"):
        suite().first(limit)


@pytest.mark.parametrize("content", [["x"], {"text": "x"}, 5])
def test_an_answer_that_is_no_text_is_the_servers_fault(content: Any) -> None:
    """It was scored: AttributeError, after all answers."""

    class Server(Handler):
        def do_POST(self) -> None:
            body = {"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}
            self.answer(200, json.dumps(body).encode(), "application/json")

    with answering(Server) as url, pytest.raises(DownloadError, match="answered case .* with no completion"):
        run_suite(suite(1), EndpointAnswerer(Client(url), "m"))


def test_a_line_of_deep_brackets_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(PromptError, match="line 1 is no case of a suite"):
        read_suite(tmp_path / "s.jsonl")


def test_a_model_answers_and_a_drafter_changes_nothing() -> None:
    llm, sampling = fake_llm(), EvalSampling(max_tokens=12, seed=3)
    plain = run_suite(suite(), LLMAnswerer(llm, sampling))
    llm.use_drafter("ngram")
    drafted = run_suite(suite(), LLMAnswerer(llm, sampling, "with ngram"))
    comparison = compare(plain, drafted)
    assert comparison.same_text == 4 and comparison.verdict == "no difference seen"
    assert plain.num_tokens == drafted.num_tokens > 0 and plain.core_s is not None and plain.lossless


def test_seeds_are_those_of_the_case_and_samples_differ() -> None:
    llm, sampling = fake_llm(), EvalSampling(max_tokens=12, temperature=1.0, seed=3)
    both = run_suite(suite(), LLMAnswerer(llm, sampling), samples=2)
    last = run_suite(Suite("s", suite().cases[3:]), LLMAnswerer(llm, sampling), samples=2)
    assert last.cases[0].texts == both.cases[3].texts, "its place in the suite does not matter"
    assert any(case.texts[0] != case.texts[1] for case in both.cases)


def test_a_case_that_does_not_fit_and_foreign_tokens() -> None:
    llm = fake_llm()
    with pytest.raises(ContextLengthError, match="case c0"):
        run_suite(suite(), LLMAnswerer(llm, EvalSampling(max_tokens=100_000)))
    foreign = Suite("s", (Case("a", {"kind": "exact", "answer": "x"}, token_ids=(99_999,)),))
    with pytest.raises(ConfigError, match="another vocabulary"):
        run_suite(foreign, LLMAnswerer(llm, EvalSampling(max_tokens=4)))
