"""A judge behind an endpoint: swapped places, ties, and the judges that stop an eval; and endpoints that are asked."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from eval_doubles import suite
from loopback import Handler, answering
from small_llm import fake_llm

from paceline.errors import DownloadError, JudgeError
from paceline.loop.evals import answerers, run_suite
from paceline.loop.evals.answerers import EndpointAnswerer, EvalSampling, LLMAnswerer
from paceline.loop.evals.config import MakeConfig
from paceline.loop.evals.judge import Judge, verdict_in
from paceline.loop.evals.make import make_suite
from paceline.loop.evals.suite import Case, Suite, read_suite
from paceline.net.streaming import Client

Answer = Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]]


@contextlib.contextmanager
def served(answer: Answer) -> Iterator[Client]:
    class Asked(Handler):
        def do_POST(self) -> None:
            status, reply = answer(self.path, self.body())
            self.answer(status, json.dumps(reply).encode())

    with answering(Asked) as url, contextlib.closing(Client(url)) as client:
        yield client


def says(word: Callable[[str], str]) -> Answer:
    """A judge that decides by the text of both answers."""
    return lambda path, body: (200, {"choices": [{"message": {"content": word(body["messages"][-1]["content"])}}]})


def longer(text: str) -> str:
    one, two = (text.split(f"<answer_{name}>\n")[1].split("\n</answer")[0] for name in "ab")
    return "TIE" if len(one) == len(two) else "A" if len(one) > len(two) else "B"


def test_a_preference_must_survive_the_swap() -> None:
    with served(says(longer)) as client:
        judge = Judge(client, "m")
        assert judge.prefer("q", "a longer answer", "short") == 1.0
        assert judge.prefer("q", "short", "a longer answer") == 0.0
        assert judge.prefer("q", "equal", "lengt") == 0.5
        assert judge.prefer("q", "the same", "the same ") == 0.5
        assert (judge.steady, judge.ties, judge.swayed) == (2, 1, 0), "equal texts are not asked"


def test_it_scores_a_suite_beside_its_references() -> None:
    case = Case("a", {"kind": "judge", "reference": "ok"}, ({"role": "user", "content": "q"},))
    from eval_doubles import Says

    with served(says(longer)) as client:
        done = run_suite(Suite("s", (case,)), Says(["much longer"]), judge=Judge(client, "m"))
    assert done.mean == 1.0


def test_a_judge_that_goes_by_the_place_stops_the_eval() -> None:
    with served(says(lambda text: "A")) as client:
        judge = Judge(client, "m")
        assert [judge.prefer("q", f"one {number}", "two") for number in range(9)] == [0.5] * 9
        with pytest.raises(JudgeError, match="same place"):
            judge.prefer("q", "another one", "two")


def test_a_judge_that_talks_nonsense_stops_the_eval() -> None:
    with (
        served(says(lambda text: "As a language model I like A and B")) as client,
        pytest.raises(JudgeError, match="neither A, B"),
    ):
        Judge(client, "m").prefer("q", "one", "two")


def test_a_judge_that_is_down_stops_the_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answerers.time, "sleep", lambda _: None)
    judge = Judge(Client("http://127.0.0.1:9"), "m")
    with pytest.raises(JudgeError, match="cannot be asked"):
        judge.prefer("q", "one", "two")


def test_verdicts_in_words() -> None:
    assert [verdict_in(each) for each in ("A", " B.", "**TIE**", "Answer A", "A or B", "", "neither")] == [
        *("A", "B", "TIE", "A"),
        *(None, None, None),
    ]


def test_an_endpoint_is_asked_for_chats_and_for_exact_tokens() -> None:
    requests: list[tuple[str, dict[str, Any]]] = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        requests.append((path, body))
        choice = (
            {"text": "7"}
            if path == "/v1/completions"
            else {"message": {"content": body["messages"][0]["content"][8:-1]}}
        )
        return 200, {
            "choices": [{**choice, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 4, "completion_tokens": 1},
        }

    traced = Case("t", {"kind": "exact", "answer": "7"}, token_ids=(1, 2), text="x")
    with served(answer) as client:
        done = run_suite(Suite("s", (*suite(3).cases, traced)), EndpointAnswerer(client, "m"))
    assert done.mean == 1.0 and done.core_s is None and done.cases[3].answer_tokens == (1,)
    assert {path for path, _ in requests} == {"/v1/chat/completions", "/v1/completions"}
    assert [body["prompt"] for path, body in requests if path == "/v1/completions"] == [[1, 2]]


def test_tools_and_template_variables_of_a_case_are_kept_and_asked(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        bodies.append(body)
        return 200, {"choices": [{"message": {"content": "7"}, "finish_reason": "stop"}]}

    tool = {"type": "function", "function": {"name": "f"}}
    row = {"prompt": "Call f.", "answer": "7", "tools": [tool], "chat_template_kwargs": {"tone": "dry"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    suite = read_suite(make_suite(MakeConfig((str(tmp_path / "rows.jsonl"),))).write(tmp_path / "s.jsonl"))
    with served(answer) as client:
        assert run_suite(suite, EndpointAnswerer(client, "m")).mean == 1.0
    assert (bodies[0]["tools"], bodies[0]["chat_template_kwargs"]) == ([tool], {"tone": "dry"})
    llm = fake_llm()
    llm.tokenizer.chat_template = "{{ tools | length }} tools, {{ tone }}: {{ messages[-1].content }}"
    assert (
        llm.tokenizer.decode(LLMAnswerer(llm, EvalSampling(max_tokens=4))._ids(suite.cases[0]))
        == "1 tools, dry: Call f."
    )


def test_an_endpoint_that_fails_stops_the_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answerers.time, "sleep", lambda _: None)
    calls: list[str] = []

    def flaky(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        calls.append(path)
        return 503, {"error": "overloaded"}

    with served(flaky) as client, pytest.raises(DownloadError, match="case c0.*503"):
        run_suite(suite(1), EndpointAnswerer(client, "m"))
    assert len(calls) == 2, "asked again once"
