"""experiments/fleet_vllm.py: its verdicts on a run, and what it starts."""

from __future__ import annotations

import json
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapt_clients
import adapt_story
import fleet_servers
import fleet_vllm
import pytest

from paceline.loop.adapt.log import AdaptLog, event_line
from paceline.loop.adapt.servers.vllm_sglang.drafter_folder import Given
from paceline.train.features.remote import vllm_command


class TestServers:
    @pytest.mark.slow
    def test_nginx_stands_before_all_replicas_and_writes_into_the_run_folder(self, tmp_path: Path) -> None:
        replicas = [fleet_servers.Replica(port, "key") for port in (8101, 8102)]
        text = fleet_servers.nginx_conf(replicas, 8100, tmp_path)
        assert "server 127.0.0.1:8101" in text and "server 127.0.0.1:8102" in text
        assert "listen 127.0.0.1:8100;" in text, "only this machine is answered"
        assert "X-Forwarded-For" in text, "vLLM's route for weights refuses what came through a proxy"
        assert "/tmp/paceline-nginx" not in text and f"pid {tmp_path / 'nginx'}.pid;" in text
        if program := shutil.which("nginx", path="/usr/sbin:/usr/bin"):
            (tmp_path / "nginx.conf").write_text(text)
            done = subprocess.run([program, "-t", "-e", "stderr", "-c", tmp_path / "nginx.conf"], capture_output=True)
            assert done.returncode == 0, done.stderr.decode()

    def test_the_command_that_a_training_prints_is_the_one_that_is_started(self, tmp_path: Path) -> None:
        command = vllm_command("/models/a target", (1, 8), 512, tmp_path / "states")
        text = f"12 answers\nvLLM at http://127.0.0.1:8103 is started like this:\n  {command}\nwaiting"
        words = fleet_servers.printed_command(text)
        module = fleet_servers.module_command(Path("/peers/bin/python"), words)
        assert module[:5] == ["/peers/bin/python", "-m", fleet_servers.VLLM_MODULE, "--model", "/models/a target"]
        assert json.loads(module[module.index("--kv-transfer-config") + 1])["kv_connector"] == "HiddenStatesConnector"
        assert fleet_servers.printed_command("12 answers\n") is None
        with pytest.raises(ValueError, match="no vllm serve"):
            fleet_servers.module_command(Path("python"), ["sglang", "serve", "x"])

    def test_a_replica_takes_weights_while_it_runs(self, tmp_path: Path) -> None:
        given = Given(tmp_path / "drafter", "dflash", 7)
        words = fleet_servers.Replica(8101, "key").command(
            Path("py"), tmp_path, given, fleet_servers.Limits("float32", 1024)
        )
        assert "--enforce-eager" in words, "compiled code would keep the earlier weights"
        assert words[words.index("--worker-extension-cls") + 1] == "paceline.interop.draft_weights.DraftWeights"
        assert words[words.index("--middleware") + 1] == "paceline.interop.draft_weights.DraftWeightsRoute"
        assert json.loads(words[words.index("--speculative-config") + 1])["model"] == str(tmp_path / "drafter")

    def test_counters_of_all_replicas_are_differences_first_and_sums_then(self) -> None:
        before = [{"rounds": 10.0, "accepted": 5.0, "stop": 2.0}, {"rounds": 100.0, "accepted": 90.0}]
        after = [{"rounds": 30.0, "accepted": 25.0, "stop": 5.0}, {"rounds": 180.0, "accepted": 170.0, "length": 1.0}]
        figures = fleet_servers.difference(before, after)
        assert figures == {"rounds": 100.0, "accepted": 100.0, "stop": 3.0, "length": 1.0, "acceptance_length": 2.0}
        assert fleet_servers.difference(after, after)["acceptance_length"] == 0.0

    @pytest.mark.slow
    def test_a_process_that_ends_is_named_with_the_end_of_its_log(self, tmp_path: Path) -> None:
        words = ["sh", "-c", "echo no memory; exit 3"]
        with (
            pytest.raises(adapt_story.Missed, match="vLLM 1: it ended with status 3; see .* no memory"),
            fleet_servers.process(words, tmp_path / "log") as started,
        ):
            fleet_servers.wait_until("vLLM 1", lambda: False, started, tmp_path / "log", 60)


class TestVerdicts:
    NAMES = ("training", "swapped", "spread", "kept", "reported", "rolled back")

    def checks(self, folder: Path, **changes: Any) -> dict[str, bool]:
        """The verdicts on a run in which all went well, but for `changes`."""
        run = fleet_vllm.Fleet(Namespace(out=folder, hour_s=8.0, limit_minutes=45.0, dtype="float32", max_len=1024))
        for event in changes.pop("events", self.NAMES):
            AdaptLog(folder / "adapt").append(event_line(1, event, why=""))
        run.given = SimpleNamespace(folder=folder / "old")
        old, new = str(folder / "old"), str(folder / "new")
        run.traffic = adapt_clients.Traffic(1, {}, 9, 1, 1.0, {})
        run.traffic.done = [adapt_clients.Done(run.began, "tickets", 200, 100, True, "text") for _ in range(20)]
        run.traffic.failed = changes.pop("failed", [])
        run.unseen_texts = [run.traffic.done[:3], run.traffic.done[:3]]
        counted = {"rounds": 9.0, "accepted": 9.0, "stop": 20.0}
        run.results = {
            "unseen_before": {"acceptance_length": 1.8},
            "unseen_after": {"acceptance_length": 3.7},
            "documents_by_vllm": 300,
            "folders_of_the_canary": [new, old],
            "folders_at_the_end_of_the_canary": [new, new],
            "servers_alive_at_the_end": [True, True],
            "gate_of_the_poisoned": {"passed": False, "status": 3},
            "after_force": {"ended": "rolled back", "serves": new, "served_before": new},
            "counted": [counted, counted],
        } | changes.pop("results", {})
        return fleet_vllm.verdicts(run, changes.pop("missed", None))

    def test_all_went_well(self, tmp_path: Path) -> None:
        checks = self.checks(tmp_path)
        assert all(checks.values()) and len(checks) == 11

    @pytest.mark.parametrize(
        ("changes", "name"),
        [
            ({"results": {"unseen_after": {"acceptance_length": 3.5}}}, "acceptance length on unseen tickets at least"),
            ({"results": {"documents_by_vllm": 0}}, "its hidden states came from vLLM"),
            (
                {"results": {"folders_of_the_canary": ["new", "new"]}},
                "it passed the gate, and one replica had it first",
            ),
            ({"results": {"folders_at_the_end_of_the_canary": ["new", "old"]}}, "then the other"),
            ({"results": {"servers_alive_at_the_end": [True, False]}}, "no replica was started again"),
            ({"results": {"gate_of_the_poisoned": {"passed": True, "status": 0}}}, "the poisoned one is refused"),
            ({"results": {"counted": [{"rounds": 1.0, "error": 1.0}]}}, "no failed request"),
            ({"failed": ["tickets: status 502"]}, "no failed request"),
            ({"missed": "nothing came"}, "in time"),
            ({"events": ("training", *NAMES)}, "one training"),
        ],
    )
    def test_what_did_not(self, tmp_path: Path, changes: dict[str, Any], name: str) -> None:
        wrong = [each for each, is_so in self.checks(tmp_path, **changes).items() if not is_so]
        assert wrong[0].startswith(name)

    def test_a_run_that_never_began_says_so(self, tmp_path: Path) -> None:
        run = fleet_vllm.Fleet(Namespace(out=tmp_path, hour_s=8.0, limit_minutes=45.0, dtype="float32", max_len=1024))
        assert fleet_vllm.verdicts(run, "there is no nginx") == {"the servers ran": False}

    def test_the_answer_s_own_metrics_are_read(self) -> None:
        answer = {"metrics": {"speculative_decoding": {"num_spec_steps": 10, "num_accepted_draft_tokens": 25}}}
        assert adapt_clients.rounds_of_vllm(answer) == (35, 10)
        assert adapt_clients.rounds_of_vllm({"metrics": None}) == (0, 0)
