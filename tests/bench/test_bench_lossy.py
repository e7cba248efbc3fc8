"""`bench lossy`: what it says where the lossless lane dominates and where not, what beats what, and how answers are
scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doubles import FakeTarget, ScriptedDrafter
from small_llm import Talker, fake_llm

from paceline.bench import lossy
from paceline.bench.config import LossyConfig
from paceline.bench.lossy import LOSSLESS, PLAIN, LossyBench, Result, as_line, draw, pareto, table, verdict
from paceline.bench.tasks import read_task, runs, score_code, score_number, score_ticket
from paceline.errors import ConfigError, PromptError, SamplingError

TICKET = {"messages": [{"role": "user", "content": "Ann: The bed was damaged.\nPolicy RF-204: refund"}]}
ADD = {
    "prompt": "def add(a, b):\n    '''The sum.'''\n",
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}


def result(
    setting: str, speed: float, interval: tuple[float, float], lossless: bool = False, score: float = 0.5
) -> Result:
    return Result(
        task="tickets",
        setting=setting,
        lossless=lossless,
        tokens_per_round=2.0,
        tokens_per_s=100.0 * speed,
        beside_lossless=speed,
        beside_lossless_interval=interval,
        mean_tv=0.0 if lossless else 0.03,
        mean_kl=0.0,
        share_changed=0.0,
        score=score,
        score_interval=(0.4, 0.6),
        score_gain=0.0,
        score_gain_interval=(-0.1, 0.1),
    )


BASE = [result(PLAIN, 0.5, (0.4, 0.6), True), result(LOSSLESS, 1.0, (1.0, 1.0), True)]


def test_it_says_where_lossless_dominates() -> None:
    sentence = verdict(
        [*BASE, result("lenience:l=0.5", 1.02, (0.97, 1.06)), result("mixture:lam=0.8", 0.9, (0.8, 0.95))]
    )
    assert "Lossless speculation dominates everywhere" in sentence and "1 of 2 measured slightly faster" in sentence
    sentence = verdict([*BASE, result("lenience:l=0.5", 1.3, (1.2, 1.4)), result("mixture:lam=0.8", 0.9, (0.8, 0.95))])
    assert "everywhere" not in sentence and "lenience:l=0.5 on tickets: 1.30x [1.20, 1.40]" in sentence
    unchanged = result("lenience:l=0.9", 1.3, (1.2, 1.4))
    unchanged.mean_tv = 0.0
    assert "dominates everywhere" in verdict([*BASE, unchanged]), "what changed nothing is not faster for being lossy"
    assert "dominates the other 1" in sentence and "mean total variation 0.0300" in sentence


def test_what_no_other_setting_beats() -> None:
    assert pareto([(1.0, 3.0), (2.0, 2.0), (1.5, 1.5), (3.0, 1.0), (1.0, 3.0)]) == [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]


@pytest.mark.slow
def test_answers_are_scored() -> None:
    assert score_ticket(TICKET, '{"action": "refund", "policy_id": "RF-204", "reasoning": "x"}')
    for wrong in ('{"action": "refund", "policy_id": "RF-205"}', '{"action": "refund"', "[]", "refund RF-204"):
        assert not score_ticket(TICKET, wrong)
    assert score_number({"answer": "so\n#### 1,234"}, "First 3, so \\boxed{1234}.") and not score_number(
        {"answer": "#### 5"}, "5 or 6"
    )
    assert not score_number({"answer": "#### 5"}, "none")
    assert score_number({"answer": "#### 2024"}, "2023-2024")
    assert score_code(ADD, "```python\ndef add(a, b):\n    return a + b\n```") and score_code(ADD, "    return a + b\n")
    assert not score_code(ADD, "```python\ndef add(a, b):\n    return a - b\n```") and not score_code(
        ADD, "I cannot.\0"
    )


@pytest.mark.slow
def test_code_runs_within_limits(tmp_path: Path) -> None:
    assert runs("print(1)")
    assert not runs("import sys\nsys.exit(0)\nassert False"), "an answer that ends the process passes no test"
    assert not runs("assert False") and runs("if __name__ == '__main__':\n    raise SystemExit(0)")
    assert not runs("input()"), "nobody is asked anything"
    assert not runs(f"with open({str(tmp_path / 'x')!r}, 'w') as file: file.write('much')"), "it writes no files"
    assert not runs("x = bytearray(2**31)"), "it gets little memory"


def test_tasks_and_settings_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "Why?"}\n')
    for task, message in (
        (f"gsm8k={file}", "its rows need answer"),
        ("chess=x", "NAME=FILE"),
        ("tickets", "NAME=FILE"),
    ):
        with pytest.raises(PromptError, match=message):
            read_task(task)
    for row, name in (
        ({"question": "Why?", "answer": "two"}, "gsm8k"),
        ({"messages": [{"role": "user", "content": 1}]}, "tickets"),
    ):
        file.write_text(json.dumps(row) + "\n")
        with pytest.raises(PromptError):
            read_task(f"{name}={file}")
    with pytest.raises(PromptError, match="cannot read"):
        read_task(f"tickets={tmp_path / 'none.jsonl'}")
    file.write_text('{"question": "Why?", "answer": "2"}\n' * 2)
    monkeypatch.setattr("paceline.bench.tasks.read_prompts", lambda file, limit: [])
    with pytest.raises(PromptError, match="has 2 rows but 0 prompts: write one prompt per line"):
        read_task(f"gsm8k={file}")
    with pytest.raises(ConfigError, match="give tasks"):
        LossyConfig()
    with pytest.raises(SamplingError, match="lossy rule"):
        LossyConfig(tasks=("tickets=x",), settings="lenient:1")
    both = LossyConfig(tasks=("tickets=x",), settings="lenience:0.5;typical:eps=0.3,delta=0.09,max_tv=0.1", max_tv=0.02)
    assert [str(each) for each in both.rules()] == [
        "lenience:l=0.5,max_tv=0.02",
        "typical:eps=0.3,delta=0.09,max_tv=0.1",
    ]


@pytest.mark.slow
def test_all_settings_run_in_turns_and_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossy, "is_possible", lambda *_: True)  # how fast a busy machine is decides nothing here
    file = tmp_path / "tickets.jsonl"
    file.write_text("".join(json.dumps(TICKET | {"id": str(number)}) + "\n" for number in range(3)))
    llm = fake_llm(Talker(num_rows=1, max_len=256), speculate="full")
    llm.allow_lossy = True
    assert isinstance(llm.target, FakeTarget)
    drafter = ScriptedDrafter(llm.target, accuracy=0.5)
    make = llm.make_drafter
    llm.make_drafter = lambda name, **more: drafter if name == "scripted" else make(name, **more)  # type: ignore[method-assign]
    config = LossyConfig(
        tasks=(f"tickets={file}",), settings="relaxed:n=258,delta=1;lenience:1", max_tokens=24, repeat=2
    )
    bench, progress = LossyBench(llm, "scripted", config), list[str]()
    bench.run(lambda text, share=None: progress.append(text))
    settings = [PLAIN, LOSSLESS, "relaxed:n=258,delta=1", "lenience:l=1"]
    assert progress == [f"tickets, {each}" for each in [*settings, *settings[::-1]]]
    plain, lossless, relaxed, neutral = bench.results()
    assert [each.lossless for each in (plain, lossless, relaxed, neutral)] == [True, True, False, False]
    assert plain.tokens_per_round == 1.0 < lossless.tokens_per_round < relaxed.tokens_per_round
    assert relaxed.mean_tv == relaxed.share_changed > 0 == neutral.mean_tv == lossless.mean_tv
    assert lossless.beside_lossless == 1.0 and lossless.score_gain == 0.0
    texts = {(each["setting"], number % 3): each["text"] for number, each in enumerate(bench.texts())}
    assert all(texts[PLAIN, n] == texts[LOSSLESS, n] == texts["lenience:l=1", n] for n in range(3))
    line = as_line(bench)
    assert isinstance(line["lossless_dominates"], bool) and len(line["results"]) == 4
    assert "NO" in table(bench.results()).texts()[2] and draw(bench.results()).startswith("<?xml")
