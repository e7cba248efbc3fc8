"""The gate that decides which students are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_llm import EOS, Parrot, fake_llm

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.loop.distill.config import DistillConfig, GateConfig, TeachingConfig
from paceline.loop.distill.corpus import few_a_prompt
from paceline.loop.distill.gate import GateInputs, agreement, answers, json_object, same_fields
from paceline.loop.distill.reading import AnswerLogprobs
from paceline.loop.distill.run import _Stages
from paceline.report.tables import Progress, ignore
from paceline.runs.stopping import Stop
from paceline.train.documents.dataset import Document


def answer_logprobs(right: int, loss: float, wrong: int = 0) -> AnswerLogprobs:
    """Log-probabilities at ten positions: this many have token 1 first, the others token 2."""
    first = np.array([1] * right + [2] * (10 - right), dtype=np.int32)
    return AnswerLogprobs(
        np.stack([first, first + 5], 1), np.zeros((10, 2), dtype=np.float32), np.full(10, -loss, dtype=np.float32)
    )


def seat(student: AnswerLogprobs, start: AnswerLogprobs, number: int = 12) -> GateInputs:
    documents = [Document(f"{place}", np.ones(15, dtype=np.int32), 5) for place in range(number)]
    return GateInputs(
        fake_llm(), documents, [answer_logprobs(10, 0.1)] * number, [student] * number, [start] * number, Progress()
    )


@pytest.mark.parametrize(
    ("student", "passed", "reason"),
    [
        (answer_logprobs(10, 0.2), True, "100.0% of the teacher's tokens"),
        (answer_logprobs(8, 0.2), False, "only 80.0% of the teacher's tokens"),
        (answer_logprobs(10, 5.0), False, "learned nothing: 5.000 nats a held-out token, 4.000 before"),
        (answer_logprobs(10, float("inf")), False, "learned nothing"),
    ],
)
def test_agreement_with_the_teacher(student: AnswerLogprobs, passed: bool, reason: str) -> None:
    finding = agreement(GateConfig(), seat(student, answer_logprobs(1, 4.0)))
    assert finding.passed is passed and reason in finding.reason


def test_the_lower_end_of_the_interval_counts() -> None:
    """On average 92% of 90% needed; but some prompts go wrong, so it may be less."""
    mixed = seat(answer_logprobs(10, 0.2), answer_logprobs(1, 4.0))
    mixed = GateInputs(
        mixed.llm,
        mixed.documents,
        mixed.teacher,
        [answer_logprobs(10, 0.2)] * 11 + [answer_logprobs(0, 0.2)],
        mixed.start,
        Progress(),
    )
    finding = agreement(GateConfig(), mixed)
    assert finding.figures["agreement"] == pytest.approx(0.917, abs=1e-3) and not finding.passed


def test_answers_of_one_prompt_count_as_one_prompt() -> None:
    """Three of ten prompts go wrong; the first, which goes right, has many answers."""
    documents = [Document(f"p{max(0, place - 40)}@0#{place}", np.ones(15, dtype=np.int32), 5) for place in range(50)]
    assert [each.key for each in few_a_prompt(documents)][3:6] == ["p0@0#3", "p1@0#41", "p2@0#42"]
    right, wrong = answer_logprobs(10, 0.2), answer_logprobs(0, 0.2)
    teacher, start = [answer_logprobs(10, 0.1)] * 50, [answer_logprobs(1, 4.0)] * 50
    inputs = GateInputs(fake_llm(), documents, teacher, [right] * 47 + [wrong] * 3, start, Progress())
    finding = agreement(GateConfig(least_agreement=0.8), inputs)
    assert finding.figures["num_prompts"] == 10 and not finding.passed, "few prompts: the interval is wide"


def test_one_held_out_prompt_decides_nothing() -> None:
    """With one there is no interval, and its share decided; a few may all agree by chance."""
    with pytest.raises(ConfigError, match="max_heldout must be at least 6"):
        TeachingConfig(max_heldout=1)
    assert TeachingConfig(max_heldout=6).max_heldout == 6


def test_a_student_that_was_being_replaced_when_the_run_was_killed_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the next run refuses its own student, the earlier one was in no folder that anybody knows."""
    out = tmp_path / "run"
    stages = _Stages(DistillConfig(out, EngineConfig(str(tmp_path))), (), Progress(), Stop(ignore), None)
    stages._open()
    for name in ("student", "candidate"):
        (out / name).mkdir()
        (out / name / "name").write_text(name)
    rename = Path.rename

    class Killed(BaseException):
        """Stands for SIGKILL."""

    def killed(self: Path, target: Path) -> Path:
        if self.name == "candidate":
            raise Killed
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(Killed):
        stages._rename(True, out / "candidate", None)
    assert not (out / "student").exists()
    stages._open()
    assert (out / "student" / "name").read_text() == "student"


def answers_of(answer: str, expected: str) -> tuple[bool, str, dict]:
    """The finding about a student that always says `said`."""
    llm = fake_llm(Parrot("go:", [*answer.encode(), EOS]))
    tokens = np.array([*b"go:", *expected.encode()], dtype=np.int32)
    documents = [Document(f"{place}", tokens, 3) for place in range(4)]
    finding = answers(GateConfig(), GateInputs(llm, documents, [], [], [], Progress()))
    return finding.passed, finding.reason, finding.figures


def test_own_answers_field_by_field() -> None:
    expected = '{"a": 1, "b": "x"}'
    assert answers_of(expected, expected)[0]
    passed, reason, figures = answers_of('{"b": "x", "a": 2}', expected)
    assert not passed and figures["fields"] == 0.5 and "only 50.0% of the teacher's fields" in reason
    assert answers_of("no JSON", expected)[2]["fields"] == 0
    passed, reason, figures = answers_of("other words", "some words")
    assert passed and figures["identical"] == 0 and "no limit" in reason


def test_fields() -> None:
    assert json_object("[1]") is None and json_object("{}") is None and json_object("{") is None
    assert same_fields('{"a": null}', {"a": None, "b": 1}) == (1, 2)
