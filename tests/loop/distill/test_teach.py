"""The student's training, through TRL."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_teacher import SAID, prompt_of, untaught, write_teacher

pytest.importorskip("trl", reason="needs paceline[distill]")

from paceline.config import EngineConfig
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, TrainingError
from paceline.loop.distill import teach as teaching
from paceline.loop.distill.config import DistillConfig, FilesConfig, GateConfig, StudentConfig, TeachingConfig
from paceline.loop.distill.gate import Finding, GateInputs
from paceline.loop.distill.price import price
from paceline.loop.distill.reading import AnswerLogprobs
from paceline.loop.distill.run import DistillResult, distill
from paceline.model import checkpoint
from paceline.train.documents.dataset import Document
from paceline.types import SamplingParams

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The teacher's file and the folder of its answers."""
    return write_teacher(tmp_path_factory.mktemp("teacher"))


def distill_config(taught: tuple[Path, Path], out: Path, layers: int = 3, **teach: Any) -> DistillConfig:
    settings: dict[str, Any] = {"max_steps": 8, "batch_size": 4, "max_len": 64, "lr": 5e-3}
    settings |= {"heldout_share": 0.2, "top_k": 8}
    engine = EngineConfig(str(taught[0]), dtype="float32")
    gate = GateConfig(num_answers=4)
    teach = settings | {"autocast": False} | teach
    return DistillConfig(
        out,
        engine,
        (taught[1],),
        student=StudentConfig(layers=layers, choice="even"),
        teaching=TeachingConfig(**teach),
        gate=gate,
    )


@pytest.fixture(scope="module")
def whole(taught: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> DistillResult:
    """A whole run with the method that is the default."""
    return distill(distill_config(taught, tmp_path_factory.mktemp("whole") / "run"))


def batch() -> dict[str, torch.Tensor]:
    """Three documents that begin alike, of different lengths."""
    generator = torch.Generator().manual_seed(0)
    same = torch.randint(3, 259, (20,), generator=generator).tolist()
    rows = [
        {
            "input_ids": same + torch.randint(3, 259, (8 + place,), generator=generator).tolist(),
            "answer_start": 22 + place,
            "document": place,
        }
        for place in range(3)
    ]
    return teaching.Collator(2, False)(rows)


def test_what_rows_share_is_computed_once_with_the_same_gradients() -> None:
    inputs, model = batch(), untaught()
    columns = (inputs["labels"][:, 1:] != -100).any(0).nonzero()[:, 0]
    gradients = []
    for shares in (False, True):
        model.zero_grad()
        mask = inputs["attention_mask"]
        if shares:
            assert teaching.num_shared(inputs["input_ids"], mask, int(columns[0])) == 20
            logits = teaching.answer_logits(model, inputs["input_ids"], mask, columns).logits
        else:
            logits = model(inputs["input_ids"], attention_mask=mask).logits[:, columns]
        (logits.log_softmax(-1)[..., 7] * mask[:, columns]).sum().backward()
        gradients.append([each.grad.clone() for each in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-3)


def test_the_divergence_over_all_tokens_is_the_whole_one() -> None:
    """With one token left out the others are that token; with few kept it is less."""
    student, teacher = torch.randn(6, 9), torch.randn(6, 9).log_softmax(-1)
    whole = (teacher.exp() * (teacher - student.log_softmax(-1))).sum(-1)
    for kept in (8, 3):
        top = teacher.topk(kept, dim=-1)
        divergence = teaching.kept_divergence(student, top.indices, top.values)
        assert torch.allclose(divergence, whole, atol=1e-4) if kept == 8 else bool((divergence < whole + 1e-5).all())


def trainer_of(logprobs: list[AnswerLogprobs] | None, tmp_path: Path, start: Path) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    documents = [Document(f"{place}", np.arange(3, 30, dtype=np.int32), 20) for place in range(4)]
    config = TeachingConfig(max_steps=1, batch_size=2, max_len=96, autocast=False)
    lesson = teaching.TrainingInputs(start, None, documents, logprobs, tmp_path / "checkpoints")
    optimiser = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda _: 1.0)
    with teaching._quiet():
        return teaching._trainer(lesson, config, model, (optimiser, schedule), 1)


def test_hard_is_trls_own_loss(taught: tuple[Path, Path], tmp_path: Path) -> None:
    from paceline.loop.distill.start import write_start

    write_start(StudentConfig(layers=2), taught[0], tmp_path / "start")
    trainer, inputs = trainer_of(None, tmp_path, tmp_path / "start"), batch()
    inputs.pop("document")
    ours = trainer.compute_loss(trainer.model, dict(inputs))
    theirs = teaching.SFTTrainer.compute_loss(trainer, trainer.model, dict(inputs))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("method", ["soft", "gkd"])
def test_a_student_is_taught_kept_and_served(
    taught: tuple[Path, Path], whole: DistillResult, tmp_path: Path, method: str
) -> None:
    """All of it: fewer layers, a folder that Transformers loads, a GGUF file that says the teacher's words.

    It says them before it learns; what is learned in a few steps is to be surer of them, of which there is plenty.
    """
    import transformers

    result = whole if method == "soft" else distill(distill_config(taught, tmp_path / "run", method=method))
    assert result.passed and result.layers == (0, 2, 3) and result.steps == 8, result.reason
    losses = result.findings[0].figures["loss"]
    assert losses["teacher"] < 0.1 < 0.2 < losses["before"] and losses["student"] < 0.8 * losses["before"]
    assert result.findings[1].figures["fields"] == 1.0
    assert result.gguf is not None and checkpoint.load_config(result.gguf).num_layers == 3
    assert transformers.AutoModelForCausalLM.from_pretrained(result.student).config.num_hidden_layers == 3
    params = SamplingParams(max_tokens=50)
    models = (LLM(str(each), drafter="none", max_len=96) for each in (taught[0], result.gguf))
    assert [each.generate([prompt_of("z")], params)[0].text for each in models] == [SAID, SAID]
    ours, theirs = (dict(checkpoint.load_tensors(each)) for each in (result.run / "trained", result.gguf))
    for name, tensor in theirs.items():  # it was taught as it is stored
        torch.testing.assert_close(tensor, ours[name], atol=2e-3, rtol=0)
    frozen = [dict(checkpoint.load_tensors(each))["model.embed_tokens.weight"] for each in (taught[0], result.gguf)]
    assert torch.equal(*frozen)


class Never:
    """A gate of one's own that nobody passes."""

    name = "never"

    def __call__(self, inputs: GateInputs) -> Finding:
        return Finding(self.name, False, f"{len(inputs.documents)} prompts are not enough")


def test_one_that_is_refused_takes_no_ones_place(
    taught: tuple[Path, Path], whole: DistillResult, tmp_path: Path
) -> None:
    """A kept student stays when later ones fail: one by a gate of the caller's own, one whose layer adds nothing."""
    out = tmp_path / "run"
    shutil.copytree(whole.run, out)
    before = (out / "student.gguf").read_bytes()
    again = distill(distill_config(taught, out), judges=[Never()])
    assert whole.passed and not again.passed and again.findings[-1].name == "never"
    assert again.gguf == out / "refused.gguf" and (out / "student.gguf").read_bytes() == before
    lacking = distill_config(taught, tmp_path / "other", max_steps=1, lr=1e-6)
    untrained = distill(replace(lacking, student=StudentConfig(keep_layers=(3,))))
    assert not untrained.passed and len(untrained.findings) == 1 and not (tmp_path / "other" / "student").exists()


def test_a_killed_training_goes_on_to_the_same_weights(
    taught: tuple[Path, Path], whole: DistillResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: Any, *arguments: Any, **named: Any) -> None:
        on_step_end(self, *arguments, **named)
        if self.clock.step == 3:
            signal.raise_signal(signal.SIGTERM)

    on_step_end = teaching.Watch.on_step_end
    monkeypatch.setattr(teaching.Watch, "on_step_end", killed)
    with pytest.raises(SystemExit) as ended:
        distill(distill_config(taught, tmp_path / "killed"))
    assert ended.value.code == 143
    monkeypatch.undo()
    parts = distill(distill_config(taught, tmp_path / "killed"))
    assert parts.steps == whole.steps == 8
    ours, theirs = (dict(checkpoint.load_tensors(each.run / "trained")) for each in (parts, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(ConfigError, match="other settings.*method"):
        distill(distill_config(taught, tmp_path / "killed", method="hard"))


def test_a_run_of_an_earlier_version_goes_on_without_its_settings_of_no_effect(
    taught: tuple[Path, Path], whole: DistillResult, tmp_path: Path
) -> None:
    """They are refused now, so the same command could not be given, and without them the settings differed."""
    out = tmp_path / "run"
    shutil.copytree(whole.run, out)
    stored = json.loads((out / "config.json").read_text())
    stored["distill"]["teaching"]["beta"] = 0.5
    (out / "config.json").write_text(json.dumps(stored))
    assert distill(distill_config(taught, out)).passed
    with pytest.raises(ConfigError, match="other settings.*beta: 0.5 there, 0.0 now"):
        distill(distill_config(taught, out, method="gkd"))
    files = FilesConfig(embedding_format="q4_1")
    folder = replace(distill_config(taught, tmp_path / "new"), teacher=EngineConfig(str(out / "student")), files=files)
    with pytest.raises(ConfigError, match="embedding_format means nothing without a GGUF file, which --gguf auto"):
        distill(folder)


def test_numbers_that_diverge_end_the_training(taught: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="lower --lr"):
        distill(distill_config(taught, tmp_path / "run", lr=1e30))
    assert not (tmp_path / "run" / "student").exists()


def test_the_clock_counts_all_parts_and_lowers_the_rate(tmp_path: Path) -> None:
    clock = teaching.Clock(tmp_path, 100, 1.0)
    clock.step = 50
    clock._before = 30.0
    assert clock.share == pytest.approx(0.5, abs=0.01) and 0.5 < clock.rate() < 0.6
    clock._before = 48.0
    assert clock.share == pytest.approx(0.8, abs=0.01)
    clock.write()
    later = teaching.Clock(tmp_path, 100, 1.0)
    later.resume(50)
    assert later.seconds == pytest.approx(48.0, abs=0.5)
    later.step = 100
    assert later.share == 1.0 and later.rate() == pytest.approx(0.1)


def test_a_broken_checkpoint_is_passed_over(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-9", "checkpoint-10"):
        (tmp_path / name / "trainer_state.json").write_text("{}")
    newest = teaching.newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == "checkpoint-10" and not (tmp_path / "checkpoint-11").exists()


def test_a_dry_run_says_what_it_takes_and_writes_nothing(taught: tuple[Path, Path], tmp_path: Path) -> None:
    estimate = price(distill_config(taught, tmp_path / "run", minutes=0.01))
    assert not (tmp_path / "run").exists()
    assert estimate.figures["answers"] == 16 and 1 <= estimate.figures["steps"] <= 8
    assert (
        estimate.figures["weights"]["student"] < estimate.figures["weights"]["teacher"]
        and "core-hours" in estimate.text
    )


def test_a_dry_run_of_gkd_keeps_to_its_minutes(
    taught: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.loop.distill.price._step_seconds", lambda *_: 2.0)
    figures = price(distill_config(taught, tmp_path / "run", method="gkd", minutes=0.1)).figures
    assert figures["step_s"] > 2.0 and figures["steps"] == int(6 / figures["step_s"])
    assert figures["minutes"]["train"] <= 0.1


def test_forms_and_files(taught: tuple[Path, Path], tmp_path: Path) -> None:
    config = distill_config(taught, tmp_path / "run", max_steps=1, method="hard")
    result = distill(replace(config, files=FilesConfig(gguf="none", save_dtype="float32")))
    assert result.gguf is None and not list((tmp_path / "run").glob("*.gguf"))
    assert {each.dtype for _, each in checkpoint.load_tensors(result.student)} == {torch.float32}
