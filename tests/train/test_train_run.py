"""`paceline train` as a user runs it: every stage on a tiny target, killed and resumed, fine-tuned; and bad input."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from shown import Shown
from tiny_dflash import tiny_target
from tiny_runs import TINY, figures, paceline

from paceline.cli import app
from paceline.config import EngineConfig
from paceline.draft.dflash.config import new_config
from paceline.draft.dflash.drafter import DFlashConfig, DFlashDrafter, DFlashNetwork
from paceline.draft.formats.family import read_drafter
from paceline.draft.vocabulary import ALL_TOKENS
from paceline.errors import ConfigError, DrafterMismatchError
from paceline.hardware import Machine
from paceline.model.target import head_weight
from paceline.report.tables import Progress
from paceline.runs.folder import RunFolder
from paceline.runs.ranks import Ranks
from paceline.runs.stopping import Stop
from paceline.train import run as train_run
from paceline.train import train
from paceline.train.config import AnswerConfig, DrafterShape, LoopConfig, TrainConfig
from paceline.train.documents.dataset import MIN_HELDOUT
from paceline.train.features.hidden_states import ScaledFeatures
from paceline.train.learn.initial_weights import continued_vocabulary
from paceline.train.learn.packs import DFlashTrainable
from paceline.train.methods.kinds import draft_ids_of, initial_drafter
from paceline.train.plan import target_facts as facts
from paceline.train.plan.expected_acceptance import Learned, expected_lines, expected_of
from paceline.train.run_file import config_of, read_run_file
from paceline.train.tiny import PARTS, at_scale

STEPS = 6
FORWARD = ("--max-steps", str(STEPS))
INT8 = ("--feature-dtype", "int8", "--stream-buffer", "64K")
pytestmark = pytest.mark.slow

Finished = tuple[Path, dict[str, Any]]


def kept_at(patch: pytest.MonkeyPatch, step: int, run: Path, kept: Path) -> None:
    """Copies the run's folder once this step is logged: as it stays on disk when the process is killed there."""
    log = RunFolder.log

    def logged(self: RunFolder, **line: Any) -> None:
        log(self, **line)
        if line.get("step") == step and not kept.exists():
            shutil.copytree(run, kept)

    patch.setattr(RunFolder, "log", logged)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """(run folder, JSON line) of a whole run; beside the folder, as `killed`, what a kill after step 4 would have
    left."""
    run, shown = tmp_path_factory.mktemp("train") / "run", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        kept_at(patch, 4, run, run.with_name("killed"))
        words = (*TINY, *FORWARD, "--limit", 24, "--checkpoint-minutes", 0, "--out", run, "--json")
        app([str(word) for word in words], prog_name="paceline", standalone_mode=False)
    return run, json.loads(shown.getvalue().splitlines()[-1])


def test_prompts_in_drafter_out(finished: Finished) -> None:
    run, line = finished
    assert line["drafter"] == str(run / "drafter") and line["run"] == str(run)
    assert line["steps"] == STEPS and line["blocks"] == STEPS * 128
    assert 1.0 < line["eal"] <= 8.0 and line["loss"] > 0 and 1.0 <= line["heldout"]["heldout"] <= 8.0
    config = json.loads((run / "config.json").read_text())
    assert config["what"] == "train" and config["train"]["max_steps"] == STEPS
    steps = figures(run)
    assert list(steps) == list(range(1, STEPS + 1))
    assert abs(steps[1]["loss"] - math.log(PARTS["config"]["vocab_size"])) < 1.0, (
        "the first loss is about log(vocabulary)"
    )
    assert steps[STEPS]["loss"] < steps[1]["loss"]
    assert {number for number, each in steps.items() if "heldout" in each} == {STEPS}
    assert steps[STEPS]["heldout"]["eal"] == line["eal"]
    served = json.loads((run / "heldout.json").read_text())
    assert served["tokens_per_round"] == line["heldout"]["heldout"] and served["texts"]
    weights = load_file(run / "drafter" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.bfloat16"}
    assert read_drafter(run / "drafter").block_size == 8


def test_killed_and_run_again_it_follows_the_same_losses(finished: Finished, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(finished[0].with_name("killed"), tmp_path / "run")
    before = figures(tmp_path / "run")
    assert len(before) == 4 and not (tmp_path / "run" / "drafter").exists()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as cut:
        cut.write('{"step": 99, "lo')  # as if it had died while it wrote
    answers = finished[0] / "regenerate" / "answers"
    paceline(*TINY, *FORWARD, "--answers", answers, "--checkpoint-minutes", 0, "--out", tmp_path / "run", "--json")
    line = json.loads(capsys.readouterr().out)
    expected, actual = figures(finished[0]), figures(tmp_path / "run")
    assert list(actual) == list(expected)
    for step, each in expected.items():
        for name in ("loss", "objective", "eal", "grad_norm", "lr"):
            assert actual[step][name] == pytest.approx(each[name], rel=1e-5), (step, name)
    for name in ("steps", "blocks", "eal", "loss"):
        assert line[name] == pytest.approx(finished[1][name], rel=1e-5)
    assert line["heldout"] == pytest.approx(finished[1]["heldout"], rel=1e-5)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()].count(f"step-{STEPS:06d}") == 1


def test_sigterm_finishes_the_step_and_the_same_command_goes_on(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    answers, log = finished[0] / "regenerate" / "answers", RunFolder.log
    words = (*TINY, *FORWARD, "--answers", answers, "--serve-share", "0", "--out", tmp_path / "run", "--json")

    def stopped(self: RunFolder, **line: Any) -> None:
        log(self, **line)
        if line.get("step") == 3:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "log", stopped)
        with pytest.raises(SystemExit) as ended:
            paceline(*words)
    assert ended.value.code == 143
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    step = int(checkpoint.name.removeprefix("step-"))
    message = f"stopped by SIGTERM, the checkpoint of step {step} is written: the same command goes on from there"
    assert capsys.readouterr().err.splitlines()[-1] == message and max(figures(tmp_path / "run")) == step < STEPS
    paceline(*words)
    expected, actual = figures(finished[0]), figures(tmp_path / "run")
    assert [actual[number]["objective"] for number in expected] == pytest.approx(
        [each["objective"] for each in expected.values()], rel=1e-5
    )


def test_a_run_leaves_what_others_need(finished: Finished) -> None:
    run, line = finished
    again = config_of(read_run_file(run / "run.yaml"))
    assert again.out == run and again.loop.max_steps == STEPS and again.scale == "tiny"
    card = (run / "drafter" / "README.md").read_text()
    assert f"| tokens a round, served, greedy | {line['heldout']['heldout']:.2f} |" in card
    served = json.loads((run / "heldout.json").read_text())
    assert served["teacher_forced"] == pytest.approx(served["served_of_walked"], rel=0.05)
    assert served["plain_tokens_per_s"] > 0 and (served["speedup"] is None) == (served["doubt"] is not None)
    assert (run / "checkpoints" / "best" / "model.safetensors").is_file(), "what served best stands beside the last"
    assert figures(run)[STEPS]["unigram_entropy"] > 0
    assert (run / "report.html").is_file()
    assert json.loads((run / "trained.json").read_text())["prompts"] > 0


@pytest.mark.nightly  # of the same answers, in 8 bits; a streamed run of the command is killed and goes on below
def test_streamed_features_give_the_same_curve(finished: Finished, tmp_path: Path) -> None:
    """Within what int8 rounds away; that streaming itself changes no bit stands in test_stream.py."""
    answers = finished[0] / "regenerate" / "answers"
    paceline(*TINY, *FORWARD, "--answers", answers, "--features", "streamed", *INT8, "--out", tmp_path / "run")
    expected, actual = figures(finished[0]), figures(tmp_path / "run")
    assert list(actual) == list(expected)
    for step, each in expected.items():
        assert actual[step]["loss"] == pytest.approx(each["loss"], rel=2e-2), step
    num_stored = len(list((tmp_path / "run").glob("features-*/*/*.safetensors")))
    assert 0 < num_stored <= MIN_HELDOUT, "only those of held-out documents are stored"


@pytest.mark.nightly
def test_a_planned_and_streamed_run_goes_on_after_it_was_killed(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine("some processor", 3e10, {"bfloat16": 5e11, "float32": 2e11}, 1, 16 * 2**30)
    monkeypatch.setattr(facts, "_measured_once", lambda device: facts.MachineFacts(machine))
    target = EngineConfig(str(finished[0] / "target"), device="cpu", dtype="float32", threads=1)
    loop = LoopConfig(max_steps=6, checkpoint_minutes=0.0, serve_share=0.0)
    options = {
        "answers": (finished[0] / "regenerate" / "answers",),
        "answering": AnswerConfig(max_tokens=16),
        "max_len": 256,
    }
    whole = TrainConfig(tmp_path / "whole", target, features="streamed", loop=loop, **options)
    begun = replace(whole, out=tmp_path / "run")
    with monkeypatch.context() as patched:
        kept_at(patched, 3, whole.out, begun.out)
        train(whole)
    plan = (begun.out / "plan.json").read_text()
    assert max(figures(begun.out)) == 3 and {"shape.start", "loop.blocks_per_step"} <= set(json.loads(plan)["values"])
    assert train(begun).steps == 6 and (begun.out / "plan.json").read_text() == plan
    expected, actual = figures(whole.out), figures(begun.out)
    assert list(actual) == list(expected) == list(range(1, 7))
    for step, each in expected.items():
        for name in ("loss", "grad_norm", "lr", "blocks"):
            assert actual[step][name] == pytest.approx(each[name], rel=1e-5), (step, name)


@pytest.mark.parametrize(
    ("passed", "is_chosen", "step", "minutes"),
    [
        (20.0, False, 0, 40.0),
        (59.0, False, 0, 15.0),  # a quarter is for learning, whatever was before
        (1.0, False, 0, 56.25),  # answers of an earlier start
        (20.0, True, 0, 45.0),
        (20.0, False, 7, 45.0),
    ],
)
def test_steps_get_the_minutes_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed: float, is_chosen: bool, step: int, minutes: float
) -> None:
    """45 were planned of 60, and answers and features have taken longer or shorter; a later start keeps what was
    settled."""
    RunFolder(tmp_path).write_json(
        "plan.json", {"minutes": 60.0, "values": {"loop.max_minutes": 45.0, "shape.num_layers": 2}}
    )
    clock = iter([0.0, 60 * passed])
    monkeypatch.setattr(train_run, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    names = ("minutes", "loop.max_minutes") if is_chosen else ("minutes",)
    config = TrainConfig(tmp_path, loop=LoopConfig(max_minutes=45.0), minutes=60.0, given=names)
    stages = train_run._Stages(config, Ranks(), lambda: None, Progress(), Stop(str))
    trainer = cast(Any, SimpleNamespace(state=SimpleNamespace(step=step), config=config.loop))
    stages._set_training_minutes(trainer)
    stored = json.loads((tmp_path / "plan.json").read_text())["values"]
    assert trainer.config.max_minutes == stored["loop.max_minutes"] == minutes and stored["shape.num_layers"] == 2


def test_minutes_of_a_plan_are_not_the_users(tmp_path: Path) -> None:
    """Without it the steps of a run that Python starts take all of the minutes, and hidden states come on top."""
    RunFolder(tmp_path).write_json("plan.json", {"minutes": 60.0, "values": {"loop.max_minutes": 45.0}})
    config = TrainConfig(tmp_path, loop=LoopConfig(anchors=7), minutes=60.0)
    planned = train_run._planned(config, Ranks(), lambda: None, Progress())
    assert planned.loop.max_minutes == 45.0 and not planned.is_given("loop.max_minutes")
    assert planned.is_given("loop.anchors") and planned.is_given("minutes")


def test_a_plan_whose_minutes_shrink_expects_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new expectation, of fewer blocks, stands in plan.json and is shown."""
    planned = expected_of("smollm2-135m", Learned(9e5, 30_000, 150.0))
    plan = {"minutes": 50.0, "values": {"loop.max_minutes": 45.0}, "target": "smollm2-135m", "blocks": 9e5}
    RunFolder(tmp_path).write_json("plan.json", plan | {"expected": planned})
    clock = iter([0.0, 60 * 45.0])
    monkeypatch.setattr(train_run, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    config, shown = TrainConfig(tmp_path, loop=LoopConfig(max_minutes=45.0), minutes=50.0, given=("minutes",)), Shown()
    trainer = cast(Any, SimpleNamespace(state=SimpleNamespace(step=0), config=config.loop))
    train_run._Stages(config, Ranks(), lambda: None, shown, Stop(shown.say))._set_training_minutes(trainer)
    stored = json.loads((tmp_path / "plan.json").read_text())
    minutes = stored["values"]["loop.max_minutes"]
    assert minutes < 45.0 and stored["blocks"] == pytest.approx(9e5 * minutes / 45)
    assert stored["expected"] == expected_of("smollm2-135m", Learned(stored["blocks"], 30_000, 150.0))
    assert stored["expected"]["tokens_per_round"] < planned["tokens_per_round"]
    assert shown.lines[0] == f"{minutes:.3g} minutes are left for learning, where 45 were planned"
    assert shown.lines[1:] == list(expected_lines("smollm2-135m", stored["expected"]))


def test_a_finished_run_is_not_trained_again(finished: Finished, capsys: Any) -> None:
    run, line = finished
    num_lines = len(RunFolder(run).metrics())
    paceline(*TINY, *FORWARD, "--limit", 24, "--checkpoint-minutes", 0, "--out", run, "--json")
    again = json.loads(capsys.readouterr().out)
    assert again | {"verdict": ""} == line | {"verdict": ""}, "the verdict tells a speed, which was measured again"
    assert len(RunFolder(run).metrics()) == num_lines


def test_training_is_a_library_call(finished: Finished, tmp_path: Path, capsys: Any) -> None:
    target = EngineConfig(device="cpu", dtype="float32", threads=1)
    answers, loop = (finished[0] / "regenerate" / "answers",), LoopConfig(max_steps=2)
    result = train(TrainConfig(tmp_path, target, answers=answers, scale="tiny", features="online", loop=loop))
    assert tuple(capsys.readouterr()) == ("", ""), "it shows nothing by itself"
    assert (result.steps, result.run, len(figures(tmp_path))) == (2, tmp_path, 2)
    assert read_drafter(result.drafter).block_size == 8 and 1.0 <= result.heldout["heldout"] <= 8.0


def test_importing_it_is_quick() -> None:
    code = "import sys, paceline.train, paceline.commands.train; assert not {'torch', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_with_other_settings_is_refused(finished: Finished) -> None:
    with pytest.raises(ConfigError, match=r"begun with other settings \(loss.name: 'd-pace' there, 'ce' now\)"):
        paceline(*TINY, *FORWARD, "--limit", 24, "--out", finished[0], "--loss", "ce")


def test_init_goes_on_with_a_drafter(finished: Finished, tmp_path: Path, capsys: Any) -> None:
    run, _ = finished
    words = ("--answers", run / "regenerate" / "answers", "--out", tmp_path, "--max-steps", "2", "--features", "online")
    paceline(*TINY, *words, "--init", run / "drafter", "--json")
    tuned = json.loads(capsys.readouterr().out)
    first, before = figures(tmp_path)[1]["loss"], figures(run)
    assert abs(first - before[STEPS]["loss"]) < abs(first - before[1]["loss"]), "it does not begin anew"
    assert tuned["eal"] > 1.0 and (tmp_path / "drafter" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "drafter" / "config.json").read_text()) == json.loads(
        (run / "drafter" / "config.json").read_text()
    )


def test_the_network_reads_scaled_features_and_the_checkpoint_real_ones(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(Exception):
        pass

    def look(drafter: DFlashTrainable, corpus: Any, features: ScaledFeatures, *rest: Any, **options: Any) -> None:
        scale_F, network = features._scale_F, drafter.network
        assert not torch.equal(scale_F, torch.ones_like(scale_F)), "the test needs features of several scales"
        torch.testing.assert_close(network.state_dict()["fc.weight"], network.fc.weight * scale_F)
        raise Seen

    monkeypatch.setattr(train_run, "Trainer", look)
    with pytest.raises(Seen):
        paceline(*TINY, "--answers", finished[0] / "regenerate" / "answers", "--out", tmp_path, "--features", "online")


def test_a_drafter_of_another_target_is_refused(finished: Finished, tmp_path: Path) -> None:
    raw = new_config(32, 260, 6, num_layers=1, head_dim=16)
    DFlashDrafter(DFlashNetwork.random(DFlashConfig.from_json(raw))).save(tmp_path / "other")
    words = ("--answers", finished[0] / "regenerate" / "answers", "--out", tmp_path / "run")
    with pytest.raises(DrafterMismatchError, match="hidden size: the drafter says 32, the target has 64"):
        paceline(*TINY, *words, "--init", tmp_path / "other")


def test_a_continued_drafter_also_drafts_what_its_new_answers_hold(tmp_path: Path) -> None:
    class Said:
        """A corpus of these answers."""

        def token_counts(self, vocab_size: int) -> Any:
            return np.bincount([7, 7, 3], minlength=vocab_size)

    class Ten:
        vocab_size = 10

    config = DFlashConfig.from_json(new_config(48, 10, 4, num_layers=1, block_size=4, head_dim=8))
    whole, part = DFlashDrafter(DFlashNetwork.random(config)), DFlashDrafter(DFlashNetwork.random(config))
    part.draft_ids = torch.tensor([1, 3, 9])
    whole.save(tmp_path / "whole")
    part.save(tmp_path / "part")
    corpus, target = cast(Any, Said()), cast(Any, Ten())
    chosen = continued_vocabulary(tmp_path / "part", corpus, target).ids
    assert chosen is not None and chosen.tolist() == [1, 3, 7, 9]
    assert continued_vocabulary(tmp_path / "whole", corpus, target) == ALL_TOKENS
    assert continued_vocabulary(None, corpus, target) == ALL_TOKENS

    def of_size(init: str | None, number: int) -> list[int]:
        config = TrainConfig(init=init, shape=DrafterShape(draft_vocab=number))
        ids = draft_ids_of(config, corpus, target, lambda text: None)
        assert ids is not None
        return ids.tolist()

    part = str(tmp_path / "part")
    assert of_size(part, 3) == [1, 3, 7], "a running vLLM takes no other number: new tokens replace the rarest ones"
    assert of_size(part, 4) == [1, 3, 7, 9] and of_size(part, 2) == [3, 7]
    assert of_size(None, 3) == of_size(str(tmp_path / "whole"), 3) == [0, 3, 7]


def test_a_tiny_run_keeps_what_was_given(tmp_path: Path) -> None:
    loop, answering = LoopConfig(epochs=5.0, max_steps=3), AnswerConfig(max_tokens=20)
    tiny = at_scale(TrainConfig(tmp_path, scale="tiny", loop=loop, answering=answering), Ranks())
    assert (tiny.loop.epochs, tiny.loop.max_steps, tiny.answering.max_tokens) == (5.0, 3, 20)
    assert (tiny.loop.anchors, tiny.answering.max_prompt_tokens, tiny.max_len, tiny.shape.num_layers) == (
        16,
        128,
        256,
        2,
    )


@pytest.mark.parametrize(("autocast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_training_in_float32_multiplies_the_head_in_float32_too(autocast: bool, dtype: torch.dtype) -> None:
    """A processor that emulates bfloat16 took minutes for the head's products of the first step."""
    config = TrainConfig(shape=DrafterShape(num_layers=1, num_taps=2), loop=LoopConfig(autocast=autocast))
    target = tiny_target(dtype=torch.bfloat16)
    begins = initial_drafter(config, target, torch.arange(8))
    assert {begins.head.weight_VD.dtype, begins.drafting_head.weight_VD.dtype} == {dtype}
    assert torch.equal(begins.drafting_head.weight_VD.float(), head_weight(target)[:8].float())
