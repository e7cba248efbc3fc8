"""The daemon, with trainings and gates that are only played, beside a server that only looks like one."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from adapt_requests import HOUR, keyed, store
from canaries import swapped
from fake_servers import FakeServer
from played import NOW, PASSED, Deciding, Played, events, ticked, traffic, watcher

from paceline.data.answers import AnswerShards
from paceline.errors import ConfigError
from paceline.loop.adapt.config import CandidateConfig, PolicyConfig, RetrainConfig
from paceline.loop.adapt.decide.decide import Decision
from paceline.loop.adapt.decide.policy import SeasonalPolicy
from paceline.loop.adapt.gate.examine import is_held_out
from paceline.loop.adapt.gate.retrain import Job


@pytest.mark.slow
def test_train_gate_swap_keep(tmp_path: Path, server: FakeServer) -> None:
    traffic(tmp_path)
    jobs = Played((0, ""), (0, PASSED))
    one = watcher(tmp_path, server, jobs)
    ticked(one, 0, 5)
    assert events(one) == ["training", "swapped"]
    assert jobs.commands[0][-1] == "--json" and "train" in jobs.commands[0] and "--keep" in jobs.commands[0]
    assert "gate" in jobs.commands[1] and "--held-out-only" in jobs.commands[1]
    assert server.members == {"general": one.lineage.entries()[0]["drafter"]}  # in the place of the incumbent
    server.count(rounds=3000, accepted=7000, tokens=9000)
    one.tick(NOW + 60 * 30)
    assert events(one)[-1] == "kept" and one.stage is None and one.incumbent == server.members["general"]
    [entry] = one.lineage.entries()
    assert entry["parents"] == ["default"] and entry["state"] == "serving" and entry["window"]["requests"] > 50


def test_what_the_gate_judges_by_is_not_trained_on(tmp_path: Path, server: FakeServer) -> None:
    traffic(tmp_path)
    one = watcher(tmp_path, server, Played((0, "")))
    one.tick(NOW)
    [window] = (tmp_path / "state" / "windows").iterdir()
    prompts = {answer.key.rsplit("@", 1)[0] for answer in AnswerShards(window)}
    assert prompts and not any(is_held_out(prompt) for prompt in prompts)
    assert any(is_held_out(f"traces/{number}") for number in range(120))


@pytest.mark.slow
def test_a_refused_candidate_never_reaches_the_server(tmp_path: Path, server: FakeServer) -> None:
    traffic(tmp_path)
    verdict = {"passed": False, "reason": "it loses 4% on 'chat'", "gains": {}}
    one = watcher(tmp_path, server, Played((0, ""), (3, verdict)))
    ticked(one, 0, 6)
    assert events(one) == ["training", "refused"] and server.members == {"general": "default"}
    assert one.lineage.entries()[0]["reason"] == verdict["reason"]
    assert one.policy.trained_at is not None and not one.policy.is_training


@pytest.mark.slow
@pytest.mark.parametrize(("state", "is_known"), [("rolled back", True), ("refused", True), ("serving", False)])
def test_weights_that_were_turned_away_are_not_swapped_in_again(
    tmp_path: Path, server: FakeServer, state: str, is_known: bool
) -> None:
    """The gate would let them through: what went wrong in probation, it does not see."""
    traffic(tmp_path)
    earlier, ends = tmp_path / "earlier", Played((0, ""), (0, PASSED))

    def start(command: list[str], log: Path) -> Job:
        if "train" in command:
            shutil.copytree(earlier, Path(command[command.index("--out") + 1]) / "drafter")
        return ends(command, log)

    earlier.mkdir()
    (earlier / "model.safetensors").write_bytes(b"weights")
    one = watcher(tmp_path, server, cast(Any, start))
    one.lineage.add(str(earlier), parents=["default"], state=state, reason="slower by 20%")
    ticked(one, 0, 5)
    assert events(one) == ["training", "refused" if is_known else "swapped"]
    assert (server.members == {"general": "default"}) is is_known
    assert (
        "very same weights were turned away before: slower by 20%" in one.lineage.entries()[-1]["reason"]
    ) is is_known


@pytest.mark.slow
def test_what_the_gate_let_through_is_swapped_in(tmp_path: Path, server: FakeServer) -> None:
    """Part of the way between the incumbent and what was trained, where it found all of it too much."""
    traffic(tmp_path)
    between = str(tmp_path / "drafter-75")
    jobs = Played((0, ""), (0, {**PASSED, "drafter": between, "share": 0.75}))
    one = watcher(tmp_path, server, jobs, candidate=CandidateConfig(shares=(1.0, 0.75)))
    ticked(one, 0, 5)
    assert jobs.commands[1][jobs.commands[1].index("--shares") + 1] == "1,0.75"
    assert events(one) == ["training", "swapped"] and server.members == {"general": between}
    [entry] = one.lineage.entries()
    assert entry["drafter"] == between and entry["gate"]["share"] == 0.75 and entry["state"] == "serving"


@pytest.mark.slow
def test_the_best_of_several_is_taken(tmp_path: Path, server: FakeServer) -> None:
    traffic(tmp_path)
    better = {**PASSED, "reason": "better", "gains": {"drifted": {"low": 0.9, "incumbent": 2.0, "candidate": 5.0}}}
    refused = {"passed": False, "reason": "no", "gains": {}}
    ends: list[tuple[int, Any]] = [(0, ""), (0, PASSED), (0, ""), (0, better), (0, ""), (3, refused)]
    rates = RetrainConfig(learning_rates=(1e-4, 2e-4, 4e-4))
    one = watcher(tmp_path, server, Played(*ends), retrain=rates)
    for minute in range(16):
        one.tick(NOW + minute)
    assert events(one) == ["training", "swapped"]
    assert [line["why"] for line in one.log.lines() if line.get("event") == "swapped"] == ["better"]
    assert [entry["state"] for entry in one.lineage.entries()] == ["passed", "serving", "refused"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "line"),
    [
        (137, ""),
        (2, '{"error": "no disk"}'),
        (0, "not json"),
        (0, '["passed"]'),
        (0, '{"passed": "yes", "reason": ""}'),
    ],
)
def test_a_dead_training_or_gate_is_a_line_in_the_log(
    tmp_path: Path, server: FakeServer, status: int, line: str
) -> None:
    traffic(tmp_path)
    for name, ends in (("a", [(status or 1, line)]), ("b", [(0, ""), (status, line)])):
        folder = tmp_path / name
        folder.mkdir()
        traffic(folder)
        one = watcher(folder, server, Played(*ends))
        ticked(one, 0, 6)
        assert events(one) == ["training", "refused"] and server.members == {"general": "default"}


@pytest.mark.slow
class TestProbation:
    def test_fewer_tokens_a_round_are_rolled_back(self, tmp_path: Path, server: FakeServer) -> None:
        one = swapped(tmp_path, server)
        server.count(rounds=3500, accepted=2900, tokens=7000)  # 1.40 a round, 2.00 before
        one.tick(NOW + 300)
        assert events(one)[-1] == "rolled back" and server.members == {"general": "default"}
        assert one.lineage.entries()[-1]["state"] == "rolled back" and one.incumbent == "default"

    def test_by_cluster_the_mix_does_not_matter(self, tmp_path: Path, server: FakeServer) -> None:
        """Traces show the same acceptance in each cluster; the whole server's fell because the weaker one has more
        traffic."""
        begun = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
        rich = {"drafted": [3] * 20, "accepted": [3] * 20, "tag": "rich"}
        poor = {"drafted": [3] * 20, "accepted": [0] * 20, "tag": "poor"}
        before = begun - datetime.timedelta(hours=2)
        after = begun + datetime.timedelta(seconds=250)
        rows = [keyed(1000 + each, ended=before, **(rich if each % 2 else poor)) for each in range(60)]
        rows += [keyed(2000 + each, ended=after, **(rich if each % 5 == 0 else poor)) for each in range(60)]
        store(tmp_path / "traces", rows, "traces-2.parquet")
        one = swapped(tmp_path, server)
        assert one.stage is not None and one.stage.before["rich"] == 4.0 and one.stage.before["poor"] == 1.0
        server.count(rounds=3500, accepted=2900, tokens=7000)
        one.tick(NOW + 300)
        assert events(one)[-1] == "swapped"

    def test_slower_rounds_are_rolled_back(self, tmp_path: Path, server: FakeServer) -> None:
        """As many rows, the same acceptance, and each round takes half as long again."""
        one = swapped(tmp_path, server)
        assert one.stage is not None and one.stage.pace == []  # this server's counters did not tell
        one.stage.pace = [1.0, 0.02]
        one.stage.counted[1], one.stage.counted[4:] = 2400.0, [1000.0, 20.0]
        server.count(rounds=2600, accepted=2600, tokens=5200)
        server.metrics += 'paceline:rounds_total{engine="0"} 1200\npaceline:draft_seconds_total{engine="0"} 1\n'
        server.metrics += 'paceline:verify_seconds_total{engine="0"} 21\npaceline:host_seconds_total{engine="0"} 4\n'
        one.tick(NOW + 300)
        assert events(one)[-1] == "rolled back" and "30.0 ms, 20.0 before" in one.log.lines()[-1]["why"]

    def test_a_server_that_is_not_well_is_given_the_old_one_back(self, tmp_path: Path, server: FakeServer) -> None:
        one = swapped(tmp_path, server)
        server.is_well = False
        one.tick(NOW + 300)
        assert events(one)[-1] == "rolled back"

    @pytest.mark.parametrize("name", ["mine", "general"])
    def test_what_was_forced_in_by_hand_is_watched_too(self, tmp_path: Path, server: FakeServer, name: str) -> None:
        """Beside the others, or in the place of one."""
        traffic(tmp_path)
        one = watcher(tmp_path, server, Played(), policy=SeasonalPolicy())
        one.tick(NOW)
        server.count(rounds=2000, accepted=2000, tokens=4000)
        one.tick(NOW + 60)
        server.members[name] = "poisoned"
        one.tick(NOW + 120)
        server.count(rounds=3000, accepted=2100, tokens=5100)
        one.tick(NOW + 180)
        assert events(one) == ["reported", "rolled back"]
        one.tick(NOW + 240)
        assert server.members == {"general": "default"}

    def test_a_daemon_that_was_stopped_goes_on(self, tmp_path: Path, server: FakeServer) -> None:
        swapped(tmp_path, server)
        again = watcher(tmp_path, server, Played())
        assert again.stage is not None and again.stage.name == "probation"
        server.count(rounds=3500, accepted=2900, tokens=7000)
        again.tick(NOW + 300)
        assert events(again)[-1] == "rolled back" and server.members == {"general": "default"}


def test_traffic_beyond_the_tracked_clusters_is_trained_and_judged_together(tmp_path: Path) -> None:
    """The policy's "other" is the name of no cluster in traces."""
    rows = [keyed(each, answer_ids=[3, 4, each], tag=f"tag{each // 40}") for each in range(160)]
    store(tmp_path / "traces", rows)
    policy, jobs = Deciding(Decision("retrain", ("other",))), Played((0, ""), (0, PASSED))
    policy.config = PolicyConfig(max_clusters=2)
    one = watcher(tmp_path, None, jobs, policy=policy)
    ticked(one, 0, 3)
    assert events(one)[0] == "training"
    [window] = (tmp_path / "state" / "windows").iterdir()
    numbers = {answer.answer_ids[-1] for answer in AnswerShards(window)}
    assert 50 <= len(numbers) <= 80 and min(numbers) >= 80
    gate = jobs.commands[1]
    assert gate[gate.index("--cluster") + 1] == "other"
    assert [gate[at + 1] for at, word in enumerate(gate) if word == "--tracked"] == ["tag0", "tag1"]


def test_all_clusters_that_fell_are_named_to_the_gate(tmp_path: Path) -> None:
    rows = [keyed(each, answer_ids=[3, 4, each], tag=f"tag{each % 2}") for each in range(160)]
    store(tmp_path / "traces", rows)
    policy, jobs = Deciding(Decision("retrain", ("tag0", "tag1"))), Played((0, ""), (0, PASSED))
    ticked(watcher(tmp_path, None, jobs, policy=policy), 0, 3)
    gate = jobs.commands[1]
    assert [gate[at + 1] for at, word in enumerate(gate) if word == "--cluster"] == ["tag0", "tag1"]


def test_a_dry_run_and_no_server_only_say(tmp_path: Path, server: FakeServer) -> None:
    traffic(tmp_path)
    one = watcher(tmp_path, server, Played(), dry_run=True)
    one.tick(NOW)
    assert events(one) == ["reported"] and one.stage is None
    proposing = Deciding(Decision("propose", ("tickets",)))
    one = watcher(tmp_path, server, Played(), policy=proposing, dry_run=True)
    one.tick(NOW)
    assert events(one) == ["reported", "reported"] and not one.policy.proposed, "nobody carried it out"


def test_a_window_of_few_prompts_is_not_trained_on(tmp_path: Path, server: FakeServer) -> None:
    """One client that repeats itself, and hardly anybody else."""
    store(tmp_path / "traces", [keyed(7)] * 500)
    one = watcher(tmp_path, server, Played())
    one.tick(NOW)
    assert events(one) == ["failed"] and "too few" in one.log.lines()[-1]["why"]


def test_a_store_that_is_away_stops_nothing(tmp_path: Path, server: FakeServer) -> None:
    one = watcher(tmp_path, server, Played())
    one.tick(NOW)
    assert one.log.lines() == []


def test_a_full_disk_stops_nothing(tmp_path: Path, server: FakeServer) -> None:
    traffic(tmp_path)
    (tmp_path / "state").write_text("a file where the folder should be")
    one = watcher(tmp_path, server, Played())
    one.tick(NOW)
    assert server.members == {"general": "default"}


def test_a_damaged_state_says_so(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="move it away"):
        watcher(tmp_path, None, Played())


def test_figures_for_prometheus(tmp_path: Path, server: FakeServer) -> None:
    traffic(tmp_path)
    one = watcher(tmp_path, server, Played((0, "")))
    one.tick(NOW)
    read = one.metrics.registry.get_sample_value
    assert read("paceline:adapt_alarm", {"cluster": "tickets"}) == -1
    assert read("paceline:adapt_training") == 1
    assert read("paceline:adapt_events_total", {"event": "training"}) == 1
    assert read("paceline:adapt_last_decision_seconds") == (HOUR + 1) * 3600
