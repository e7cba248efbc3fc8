"""experiments/train_vs_peers*.py: curves, times to equal figures, stages that are not run twice, files of the peers."""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module(name)


def test_a_curve_keeps_the_drafters_weights_when_it_is_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = module("train_vs_peers_curve", monkeypatch)
    state = {"fc.weight": torch.zeros(2), "lm_head.weight": torch.ones(3)}
    curve = made.Curve(tmp_path, 10.0, lambda: state)
    for seconds, steps in ((0.0, 0), (4.0, 1), (11.0, 2), (19.0, 3), (35.0, 4), (39.0, 5)):
        state["fc.weight"] = torch.full((2,), float(steps))
        curve.note(seconds, 100 * steps, steps)
    curve.note(39.5, 600, 6, is_last=True)
    lines = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [line["steps"] for line in lines] == [0, 2, 4, 6]
    assert lines[1] == {"seconds": 11.0, "blocks": 200, "steps": 2, "weights": "001.safetensors"}
    kept = load_file(tmp_path / "002.safetensors")
    assert list(kept) == ["fc.weight"] and kept["fc.weight"].tolist() == [4.0, 4.0]


def test_a_stopped_watch_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = module("train_vs_peers_curve", monkeypatch).Stopwatch()
    first = watch.stop()
    time.sleep(0.5)
    watch.go_on()
    assert watch.stop() - first < 0.5


def side(points: list[tuple[float, float]], before: float) -> dict[str, Any]:
    curve = [{"seconds": s, "eal": e, "steps": 1, "blocks": 10 * int(s), "served": e} for s, e in points]
    stage = {"seconds": before / 2, "by": "somebody"}
    return {"answers": stage, "features": stage, "start_s": 1.0, "curve": curve}


def test_ratios_are_taken_where_the_slowest_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    report = module("train_vs_peers_report", monkeypatch)
    sides = {
        "paceline": side([(0, 1.0), (10, 2.0), (20, 3.0)], before=5.0),
        "fast": side([(0, 1.0), (10, 1.4), (20, 1.2), (30, 2.2)], before=40.0),
        "slow": side([(0, 1.0), (30, 1.6), (40, 1.5)], before=10.0),
    }
    told = report.compared(sides)
    equal = told["equal_figure"]
    assert (equal["figure"], equal["of"]) == (1.6, "slow")
    assert equal["steps_s"] == pytest.approx({"paceline": 6.0, "fast": 22.5, "slow": 30.0})
    assert equal["whole_s"] == pytest.approx({"paceline": 11.0, "fast": 62.5, "slow": 40.0})
    assert equal["steps_theirs_over_ours"] == pytest.approx({"fast": 3.75, "slow": 5.0})
    assert equal["whole_theirs_over_ours"]["slow"] == pytest.approx(40 / 11)
    assert told["equal_time"][1] == pytest.approx({"seconds": 10.0, "paceline": 2.0, "fast": 1.4, "slow": 1.2})
    assert told["equal_time"][3]["fast"] == 1.4  # it fell between two looks: the best so far counts
    assert len(told["times_to"]) == 20
    assert told["times_to"][9] == pytest.approx({"figure": 2.0, "paceline": 10.0, "slow": None, "fast": 27.5})
    stages, _, _, times = report.tables(sides, told)
    assert stages.texts()[1][:5] == ["fast", "20.0", "20.0", "30.0", "1.0"]
    assert times.texts()[0] == ["paceline", "6.0", "11.0", "-", "-"] and times.texts()[2][3] == "5.00"


def test_a_figure_that_is_not_reached_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    report = module("train_vs_peers_report", monkeypatch)
    assert report.seconds_to([(0, 1.0), (5, 1.2)], 1.3) is None
    assert report.seconds_to([(0, 1.0), (5, 1.2)], 1.0) == 0
    assert report.figure_at([(0, 1.0), (5, 1.2)], 6.0) is None


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("train_vs_peers", monkeypatch)


def test_a_stage_that_is_done_is_not_run_again(driver: ModuleType, tmp_path: Path) -> None:
    asked = driver.Asked("m", "p", 1, 2, "h", 3, 0.5, 4, 1, 3, 8, "vllm", 64, 512, 0, [])
    runs: list[int] = []

    def make() -> dict[str, Any]:
        runs.append(1)
        return {"seconds": len(runs)}

    assert driver.Stages(asked, tmp_path, tmp_path).once("answers", make) == {"seconds": 1}
    assert driver.Stages(asked, tmp_path, tmp_path).once("answers", make) == {"seconds": 1}
    assert len(runs) == 1
    with pytest.raises(SystemExit, match="other settings"):
        driver.Stages(replace(asked, minutes=1.0), tmp_path, tmp_path)


def test_a_process_that_fails_shows_the_end_of_its_log(driver: ModuleType, tmp_path: Path) -> None:
    asked = driver.Asked("m", "p", 1, 2, "h", 3, 0.5, 4, 1, 3, 8, "vllm", 64, 512, 0, [])
    stages = driver.Stages(asked, tmp_path, tmp_path)
    assert stages.run(sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])", log="a") == "1\n"
    with pytest.raises(SystemExit, match="(?s)peer-steps failed.*no such peer"):
        stages.run(sys.executable, "-c", "raise SystemExit('no such peer')", log="peer-steps")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = module("train_vs_peers_sides", monkeypatch)
    monkeypatch.setattr(made, "version", lambda name: "1")
    return made


def test_features_stand_in_the_peers_files_as_their_readers_want_them(peers: ModuleType, tmp_path: Path) -> None:
    text = module_text(peers)
    taps, last = torch.arange(24.0).view(4, 3, 2), torch.full((4, 2), 9.0)
    peers.write_specforge(0, text, taps, last, tmp_path)
    kept = torch.load(tmp_path / "data_000000.ckpt", weights_only=True)
    assert kept["loss_mask"].tolist() == [0, 0, 1, 1] and kept["input_ids"].tolist() == text.ids
    assert kept["hidden_states"].tolist()[1] == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    peers.write_speculators(7, text, taps, last, tmp_path)
    kept = load_file(tmp_path / "hs_7.safetensors")
    assert kept["token_ids"].tolist() == text.ids and kept["hidden_states"].shape == (4, 4, 2)
    assert kept["hidden_states"][:, -1].unique().tolist() == [9.0]  # the last layer's comes last


def module_text(peers: ModuleType) -> Any:
    return peers.Text([5, 6, 7, 8], 2)


def fake_run(job: Any, num_steps: int, on_step: Any) -> None:
    """A peer's trainer of steps of 50 ms and 16 blocks; it does not end by itself."""
    state = {"fc.weight": torch.zeros(1)}
    on_step(0, lambda: state)
    while True:
        time.sleep(0.05)
        state["fc.weight"] += 1
        on_step(16, lambda: state)


def test_a_peer_trains_as_many_steps_as_its_time_has_room_for(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "specforge_run", fake_run)
    job = SimpleNamespace(minutes=1 / 60, looks=2, out=str(tmp_path), changed=["specforge.batch_size=4"])
    told = peers.steps("specforge", job)
    assert 0.045 < told["probed_step_s"] < 0.25
    assert told["recipe"]["learning_rate"] == 6e-4 and told["recipe"]["batch_size"] == 4
    lines = [json.loads(line) for line in (tmp_path / "curve" / "curve.jsonl").read_text().splitlines()]
    assert lines[0]["seconds"] == 0 and lines[-1]["blocks"] == 16 * lines[-1]["steps"]
    assert lines[-1]["steps"] == told["planned_steps"] or lines[-1]["seconds"] > 1
    assert load_file(tmp_path / "curve" / lines[-1]["weights"])["fc.weight"].item() == lines[-1]["steps"]


def test_a_setting_that_a_recipe_lacks_is_refused(peers: ModuleType) -> None:
    job = SimpleNamespace(changed=["speculators.lr=0.01", "specforge.rate=1"])
    assert peers.recipe_of("speculators", job)["lr"] == 0.01 and peers.RECIPES["speculators"]["lr"] == 1e-3
    with pytest.raises(SystemExit, match="specforge.rate=1.*learning_rate"):
        peers.recipe_of("specforge", job)
