"""experiments/own.py: from tickets to the comparison with a tiny model, a second run, and the chart."""

from __future__ import annotations

import io
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import own
import own_chart
import pytest
from rich.console import Console
from tiny_dflash import loud_

from paceline.data.answers import AnswerShards
from paceline.draft.dflash.checkpoint import write_checkpoint
from paceline.draft.dflash.config import DFlashConfig, new_config
from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.runs.folder import RunFolder
from paceline.train.tiny import write_tiny_target

TICKETS = """
import json, os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
os.makedirs(given["--out"], exist_ok=True)
for name in ("train", "heldout"):
    with open(f"{given['--out']}/{name}.jsonl", "w") as file:
        for number in range(int(given[f"--{name}"])):
            row = {"messages": [{"role": "user", "content": f"{name} {number}"}]}
            print(json.dumps(row), file=file)
"""
"""A recipe of short tickets, for a model whose tokens are bytes."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Options of a run of seconds, in a folder of its own."""
    target = write_tiny_target(tmp_path / "target")
    raw = new_config(64, 260, 6, num_layers=1, block_size=4, head_dim=16, intermediate_size=32)
    write_checkpoint(tmp_path / "generic", raw, loud_(DFlashNetwork.random(DFlashConfig.from_json(raw))).state_dict())
    (tmp_path / "recipe.py").write_text(TICKETS)
    monkeypatch.setattr(own, "RECIPE", tmp_path / "recipe.py")
    monkeypatch.setattr(own, "MAX_TOKENS", 8)
    loop = replace(own.LEARNING, blocks_per_step=16, anchors=4, heldout_every=1, autocast=False)
    monkeypatch.setattr(own, "LEARNING", loop)
    words = ["--model", target, "--init", tmp_path / "generic", "--out", tmp_path / "run", "--threads", 1]
    return [str(word) for word in [*words, "--tickets", 12, "--unseen", 2, "--minutes", 0.002]]


@pytest.mark.slow
def test_a_drafter_learns_and_a_second_run_needs_no_training(
    small: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sys, "argv", ["own.py", *small])
    assert own.main() == 0
    shown = capsys.readouterr()
    assert "own drafter" in shown.out and "100%" in shown.out and "paceline advise traces/" in shown.out
    lines = [line for line in shown.err.splitlines() if "acceptance length" in line]
    assert len(lines) >= 2 and lines[0].split()[:4] == ["0", "s", "step", "0"] and shown.err.isascii()
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [result["identical"] for result in results["results"]] == [1.0, 1.0, 1.0]
    assert results["results"][1]["drafter"].endswith("generic")
    assert len({*AnswerShards(tmp_path / "run" / "answers" / "answers").keys()}) == 12

    tickets = own.Tickets(*(tmp_path / "run" / "tickets" / name for name in ("train", "served", "unseen")))
    for minutes, is_enough in ((0.002, True), (1.0, False)):
        monkeypatch.setattr(sys, "argv", ["own.py", *small, "--minutes", str(minutes)])
        assert own.is_trained(own.training_of(own.arguments(), tickets, tmp_path)) == is_enough


def test_another_text_than_plain_decodings_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    same = SimpleNamespace(
        drafter="none", tokens_per_round=1.0, tokens_per_s=9.0, speedup=1.0, identical=1.0, doubt=None,
        num_answers=4, differences=[],
    )  # fmt: skip
    differs = SimpleNamespace(**vars(same) | {"identical": 0.75, "tokens_per_round": 3.0})
    differs.differences = [SimpleNamespace(request="heldout-3", index=7, top2_gap=0.5)]
    loops = [{"looping_share": 0.5, "without_loops": 1.5}]
    assert own.report([same, same, same], [], Path("drafter")) == 0
    assert "loop" not in capsys.readouterr().out
    assert own.report([same, same, differs], loops, Path("drafter")) == 1
    shown = capsys.readouterr()
    assert "heldout-3" in shown.err and "75%" in shown.out
    assert "50% of the answers end in a loop; without them its acceptance length is 1.50" in shown.out


@pytest.mark.slow
def test_answers_that_the_model_would_not_give_are_not_used(tmp_path: Path) -> None:
    answers = [*AnswerShards(own.SHIPPED)][:6]
    AnswerShards(tmp_path).write(answers)
    texts = [SimpleNamespace(messages=[answer.key]) for answer in answers]

    def model(changed: int | None) -> Any:
        ids = {answer.key: answer.prompt_ids for answer in answers}
        replies = {tuple(answer.prompt_ids): [*answer.answer_ids] for answer in answers}
        if changed is not None:
            replies[tuple(answers[changed].prompt_ids)][-1] += 1
        return SimpleNamespace(
            encode_chat=lambda messages: ids[messages[0]],
            generate_ids=lambda prompts, params: [
                SimpleNamespace(prompt_token_ids=each, token_ids=replies[tuple(each)]) for each in prompts
            ],
        )

    assert own.is_answered_alike(model(None), tmp_path, texts)
    assert not own.is_answered_alike(model(own.CHECKED - 1), tmp_path, texts)
    assert not own.is_answered_alike(model(None), tmp_path, texts[:5])
    answers[5].prompt_ids[0] += 1
    assert not own.is_answered_alike(model(None), tmp_path, texts)


@pytest.mark.slow
def test_shipped_answers_belong_to_the_recipes_tickets(tmp_path: Path) -> None:
    answers = [*AnswerShards(own.SHIPPED)]
    assert len(answers) == 300 and max(len(answer.answer_ids) for answer in answers) < own.MAX_TOKENS
    assert {answer.finish_reason for answer in answers} == {"stop"}
    tickets = own.write_tickets(tmp_path, 300, 4)
    ids = {json.loads(line)["id"] for line in tickets.train.read_text().splitlines()}
    assert {answer.key.split("/")[1].split("#")[0] for answer in answers} == ids
    assert tickets.unseen.read_text().count("\n") == 4 and tickets.served.read_text().count("\n") == own.SERVED
    assert not {*tickets.unseen.read_text().splitlines()} & {*tickets.served.read_text().splitlines()}
    assert sum(file.stat().st_size for file in own.SHIPPED.iterdir()) < 300_000


def test_ctrl_c_becomes_the_signal_that_training_handles() -> None:
    seen: list[int] = []
    with own.stoppable():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_the_chart_shows_the_newest_value_up_to_its_time() -> None:
    points = [own_chart.Point(0.0, 0, 1.0), own_chart.Point(30.0, 9, 2.5), own_chart.Point(60.0, 20, 4.0)]
    rows = own_chart.chart(points, 120.0, own_chart.ASCII).splitlines()
    assert len(rows) == own_chart.HEIGHT + 2 and all(len(row) <= 7 + own_chart.WIDTH for row in rows)
    top, bottom = (rows[place].partition("|")[2] for place in (0, own_chart.HEIGHT - 1))
    assert (top.find("#"), bottom.find("#"), len(top), len(bottom)) == (30, 15, 31, 31)
    assert rows[0].split()[0] == "4.0" and rows[-1].split() == ["0", "s", "60", "s", "120", "s"]
    higher = own_chart.chart([*points, own_chart.Point(90.0, 30, 4.2)], 120.0)
    assert higher.split()[0] == "5.0" and own_chart.LEVELS[-1] in higher
    assert own_chart.caption(points) == "acceptance length 4.00 after 60 s (20 steps); 1.00 before training"


def test_the_chart_is_drawn_in_a_terminal_and_only_notes_are_printed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "train")
    progress = own_chart.ChartProgress(run.path, 1.5)
    drawn = io.StringIO()
    progress._console = Console(file=drawn, force_terminal=True, width=100)
    with progress.bar("training", 4) as advance:
        advance("step 1", 0.25)
        run.path.mkdir()
        run.log(step=2, seconds=5.0, served={"tokens_per_round": 3.25})
        run.log(step=3, seconds=6.0)
        advance("step 3", 0.5)
    progress.say("note: little memory")
    progress.say("8 documents")
    assert "acceptance length 3.25 after 5 s (2 steps); 1.50 before training" in drawn.getvalue()
    assert "note: little memory" in drawn.getvalue() and "8 documents" not in drawn.getvalue()
    messages = [line["message"] for line in RunFolder(tmp_path).lines("log.jsonl")]
    assert messages[-2:] == ["note: little memory", "8 documents"]
