"""Interrupted and resumed: the same losses; and checkpoints that are damaged, foreign, or do not fit on the disk."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_training import Killed, config, tiny_decoder, trainer

from paceline.draft.formats.family import read_drafter
from paceline.errors import CacheError, ConfigError, TrainingError
from paceline.train.config import LossConfig, OptimConfig
from paceline.train.learn import checkpoint as module
from paceline.train.learn.checkpoint import latest_checkpoint
from paceline.train.learn.loop import Trainer

EVERY_STEP = -1.0
"""Minutes between checkpoints, to have one after each step."""


def run(one: Trainer, last: int | None = None) -> dict[int, float]:
    """Objective by step; the run dies while it reports step `last`."""
    objectives: dict[int, float] = {}

    def hear(figures: dict[str, Any]) -> None:
        objectives[figures["step"]] = figures["objective"]
        if figures["step"] == last:
            raise Killed

    with contextlib.suppress(Killed):
        one.run(hear)
    return objectives


@pytest.fixture(scope="module")
def _stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    run(trainer(folder, config(checkpoint_minutes=EVERY_STEP)), last=3)
    return folder


@pytest.fixture
def stopped(_stopped: Path, tmp_path: Path) -> Path:
    """A folder of a run that was killed in step 3."""
    return Path(shutil.copytree(_stopped, tmp_path, dirs_exist_ok=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim": OptimConfig("muon", lr=3e-3), "loss": LossConfig("d-pace", vocab=16)},
        {"loss": LossConfig("lk-hybrid"), "autocast": True, "max_steps": None, "epochs": 2.5},
    ],
    ids=["adamw", "muon-loss-vocabulary", "lk-hybrid-autocast-epochs"],
)
def test_a_resumed_run_follows_the_uninterrupted_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    whole = trainer(tmp_path / "whole", config(**changes))
    expected = run(whole)
    losses: dict[int, float] = {}
    for last, starts_at in ((2, 0), (5, 1), (None, 4)):
        part = trainer(tmp_path / "parts", config(**changes, checkpoint_minutes=EVERY_STEP))
        assert part.resume() == bool(starts_at) and part.state.step == starts_at
        losses |= run(part, last)
    assert losses.keys() == expected.keys() and len(expected) >= 6
    assert [losses[step] for step in expected] == pytest.approx(list(expected.values()), rel=1e-5)
    for name, tensor in part.network.state_dict().items():
        torch.testing.assert_close(tensor, whole.network.state_dict()[name], atol=1e-6, rtol=1e-4)
    times = {"seconds": 0.0, "elapsed_s": 0.0}
    assert replace(part.state, **times) == replace(whole.state, **times)
    assert [path.name for path in (tmp_path / "parts").glob("*step-*")] == [f"step-{len(expected):06d}"], (
        "older ones go"
    )
    over = trainer(tmp_path / "parts", config(**changes))
    assert over.resume() and run(over) == {}, "a run that is over stays so"


@pytest.mark.slow
def test_every_checkpoint_is_a_drafter(tmp_path: Path) -> None:
    one = trainer(tmp_path, config(max_steps=2))
    run(one)
    drafter = read_drafter(tmp_path / "step-000002")
    for name, tensor in drafter.network.state_dict().items():
        assert torch.equal(tensor, one.network.state_dict()[name]) and tensor.dtype is torch.float32
    drafter.bind(tiny_decoder())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"seed": 1}, "seed: 0 there, 1 now"),
        ({"optim": OptimConfig(lr=1e-3)}, r"optim\.lr: 0.003 there, 0.001 now"),
        (
            {"loss": LossConfig("d-pace"), "anchors": 4},
            r"anchors: 3 there, 4 now; loss\.name: 'ce' there, 'd-pace' now",
        ),
        ({"blocks_per_step": 4}, "blocks_per_step: 8 there, 4 now"),
    ],
)
def test_other_settings_are_refused_and_shown(stopped: Path, changes: dict[str, Any], difference: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"begun with other settings \({difference}\): use the same, or another --out.*--init"
    ):
        trainer(stopped, config(**changes)).resume()


def test_other_documents_of_the_same_number_are_refused(stopped: Path) -> None:
    """Resumed, the data position would point into another order of other texts."""
    again = trainer(stopped, config(checkpoint_minutes=EVERY_STEP))
    documents = [*again.corpus.train]
    documents[4] = replace(documents[4], key="another@0/0")
    again.corpus = replace(again.corpus, train=documents)
    with pytest.raises(ConfigError, match=r"begun with other settings \(documents"):
        again.resume()


@pytest.mark.slow
def test_settings_that_decide_nothing_may_change(stopped: Path, tmp_path: Path) -> None:
    changes = {"checkpoint_minutes": 7.0, "heldout_every": 3, "blocks_per_pack": 1, "attention": "sdpa"}
    expected, one = run(trainer(tmp_path / "whole")), trainer(stopped, config(**changes))
    assert one.resume()
    rest = run(one)
    assert list(rest.values()) == pytest.approx([expected[step] for step in rest], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"max_steps": 12}, {"max_steps": 4}, {"max_steps": None, "epochs": 4.0}])
def test_a_resumed_run_may_be_longer_or_shorter(stopped: Path, changes: dict[str, Any]) -> None:
    one = trainer(stopped, config(**changes))
    assert one.resume() and one.state.step == 2
    assert max(run(one)) == one.total_steps != 8


@pytest.mark.slow
def test_a_finished_run_goes_on_when_it_is_made_longer(tmp_path: Path) -> None:
    run(trainer(tmp_path, config(max_steps=4)))
    one, rates = trainer(tmp_path, config(max_steps=8)), list[float]()
    assert one.resume() and one.share_done == 0.5
    one.run(lambda figures: rates.append(figures["lr"]))
    assert len(rates) == 4 and rates == sorted(rates, reverse=True), "the rate is that of the longer run from there"


@pytest.mark.slow
def test_the_last_checkpoints_stay(tmp_path: Path) -> None:
    run(trainer(tmp_path, config(max_steps=5, keep_last=3, checkpoint_minutes=EVERY_STEP)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004", "step-000005"]


@pytest.mark.slow
def test_asked_to_stop_it_writes_the_step_down_and_goes_on_from_there(tmp_path: Path) -> None:
    expected, one, seen = run(trainer(tmp_path / "whole")), trainer(tmp_path / "stopped"), dict[int, float]()

    def hear(figures: dict[str, Any]) -> None:
        seen[figures["step"]] = figures["objective"]

    assert not one.run(hear, should_stop=lambda: one.state.step == 3)
    again = trainer(tmp_path / "stopped")
    assert again.resume() and again.state.step == 3 and again.run(hear)
    assert [seen[step] for step in expected] == pytest.approx(list(expected.values()), rel=1e-6)


@pytest.mark.parametrize("file", ["model.safetensors", "optimiser.safetensors", "trainer.json", "config.json"])
@pytest.mark.parametrize("kept", [0, 40])
def test_a_cut_checkpoint_is_named_with_the_remedy(stopped: Path, file: str, kept: int) -> None:
    path = stopped / "step-000002" / file
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CacheError, match=f"step-000002.*: delete {stopped} to start again"):
        trainer(stopped, config()).resume()


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["save_file", "write_checkpoint", "Path.rename"])
def test_a_full_disk_keeps_the_last_good_checkpoint(
    tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(tmp_path, config(checkpoint_minutes=EVERY_STEP))
    expected = run(trainer(tmp_path / "whole"))
    run(one, last=4)

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "rename", refuse) if fails == "Path.rename" else full.setattr(module, fails, refuse)
        with pytest.raises(
            CacheError, match=r"step-000005 cannot be written \(.*No space left.*free space and run the same"
        ):
            one.run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "whole"]
    again = trainer(tmp_path, config())
    assert again.resume() and again.state.step == 3
    rest = run(again)
    assert list(rest.values()) == pytest.approx([expected[step] for step in rest], rel=1e-5)


@pytest.mark.slow
def test_what_a_kill_while_writing_leaves_is_cleared_away(tmp_path: Path) -> None:
    for left in (".step-000004", "..step-000004-k3j2"):
        (tmp_path / left).mkdir(parents=True)
        (tmp_path / left / "model.safetensors").write_bytes(b"half")
    one = trainer(tmp_path, config(max_steps=2))
    assert not one.resume()
    run(one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002"]


@pytest.mark.slow
def test_saving_the_newest_step_again_does_not_touch_it(tmp_path: Path) -> None:
    one = trainer(tmp_path, config(max_steps=2))
    run(one)
    before = (tmp_path / "step-000002" / "model.safetensors").stat().st_ino
    one.save()
    assert (tmp_path / "step-000002" / "model.safetensors").stat().st_ino == before
    other = trainer(tmp_path, config(max_steps=2, seed=5))  # not resumed: another run in the same folder
    run(other)
    stored = load_file(tmp_path / "step-000002" / "model.safetensors")
    assert all(torch.equal(tensor, other.network.state_dict()[name]) for name, tensor in stored.items())


@pytest.mark.slow
def test_a_poisoned_document_stops_the_run_and_the_last_good_step_stands(tmp_path: Path) -> None:
    """The step that meets it names documents and leaves weights, optimiser and place as they were before it."""
    settings = config(blocks_per_step=3, max_steps=10)
    healthy = trainer(tmp_path / "healthy", settings)
    poisoned = int(healthy.planner.step(replace(healthy.state.place, index=4))[0][0][0])
    one = trainer(tmp_path / "sick", settings, poisoned=poisoned)
    heard: list[int] = []
    with pytest.raises(TrainingError) as caught:
        one.run(lambda figures: heard.append(figures["step"]))
    assert heard == [1, 2, 3, 4]
    message = str(caught.value)
    assert "in step 5" in message and f"doc-{poisoned}@0/0" in message and "the checkpoint of step 4 is in" in message
    assert "\n" not in message
    stored = latest_checkpoint(tmp_path / "sick")
    assert stored is not None and stored.trainer["step"] == 4
    assert all(tensor.isfinite().all() for tensor in stored.weights.values())
    assert all(tensor.isfinite().all() for tensor in stored.optimisers.values())
    (tmp_path / "sick").rename(tmp_path / "cured")
    cured, expected = trainer(tmp_path / "cured", settings), run(healthy)
    assert cured.resume()
    rest = run(cured)
    assert list(rest) == [5, 6, 7, 8, 9, 10]
    assert list(rest.values()) == pytest.approx([expected[step] for step in rest], rel=1e-5)


@pytest.mark.slow
def test_a_first_step_that_fails_leaves_no_checkpoint(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    number = int(one.planner.step(one.state.place)[0][0][0])
    with pytest.raises(TrainingError, match="in step 1 "):
        trainer(tmp_path, poisoned=number).run()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_trainer_json_is_readable(tmp_path: Path) -> None:
    run(trainer(tmp_path, config(max_steps=2)))
    stored = json.loads((tmp_path / "step-000002" / "trainer.json").read_text())
    assert stored["step"] == 2 == stored["state"]["step"] and stored["state"]["num_blocks"] == 16
    assert stored["identity"]["optim"]["name"] == "adamw" and stored["identity"]["drafter"]["block_size"] == 4
