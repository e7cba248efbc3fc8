"""vLLM and SGLang get a drafter: by a restart, or by its weights while they run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from deployments import opened
from fake_servers import FakeServer, recorded_environments, restart_command, serving

from paceline.errors import ConfigError, DeployError, DownloadError, UnreachableError
from paceline.loop.adapt.config import DeployConfig
from paceline.loop.adapt.servers.deploy import open_deployment
from paceline.loop.adapt.servers.deployment import Deployment
from paceline.loop.adapt.servers.vllm_sglang import restart as restarted


@pytest.mark.slow
def test_vllm_restarts_one_server_after_the_other(server: FakeServer, tmp_path: Path) -> None:
    with serving(FakeServer()) as second:
        config = DeployConfig("vllm", (server.url, second.url), restart=restart_command(tmp_path), num_drafted=5)
        deployment = open_deployment(config, tmp_path / "old")
        deployment.load("tickets", tmp_path / "new")
        assert [one["PACELINE_SERVER"] for one in recorded_environments(tmp_path)] == [server.url]
        deployment.load_others("tickets", tmp_path / "new")
        assert [one["PACELINE_SERVER"] for one in recorded_environments(tmp_path)] == [server.url, second.url]
        speculative = json.loads(recorded_environments(tmp_path)[0]["PACELINE_SPECULATIVE_CONFIG"])
        assert speculative == {"method": "dflash", "model": str(tmp_path / "new"), "num_speculative_tokens": 5}
        assert recorded_environments(tmp_path)[0]["PACELINE_DRAFTER"] == str(tmp_path / "new")


@pytest.mark.slow
def test_each_drafter_is_restarted_with_its_own_method(server: FakeServer, tmp_path: Path) -> None:
    for name, kind in (("old", "DFlashDraftModel"), ("new", "LlamaForCausalLMEagle3")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [kind]}))
    how = {"restart": restart_command(tmp_path), "method": "dflash2"}
    deployment = opened(server, tmp_path / "old", engine="vllm", **how)
    deployment.load("tickets", tmp_path / "new")
    deployment.roll_back()
    methods = [json.loads(one["PACELINE_SPECULATIVE_CONFIG"])["method"] for one in recorded_environments(tmp_path)]
    assert methods == ["eagle3", "dflash2"]


@pytest.mark.slow
def test_a_restart_that_fails_gives_the_old_drafter_back(server: FakeServer, tmp_path: Path) -> None:
    deployment = opened(server, tmp_path / "old", engine="vllm", restart=restart_command(tmp_path, status=1))
    with pytest.raises(DeployError, match="no such service"):
        deployment.load("tickets", tmp_path / "new")
    assert [Path(one["PACELINE_DRAFTER"]).name for one in recorded_environments(tmp_path)] == ["new", "old"]


def test_a_server_that_does_not_come_back(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarted, "POLL_S", 0.01)
    server.is_well = False
    deployment = opened(server, None, engine="sglang", restart=restart_command(tmp_path), patience_s=0.05)
    with pytest.raises(DownloadError, match="nothing is known to go back to"):
        deployment.load("tickets", tmp_path / "new")


@pytest.mark.slow
def test_vllm_takes_weights_where_it_can_and_restarts_where_not(server: FakeServer, tmp_path: Path) -> None:
    how = {"publish": restart_command(tmp_path), "restart": restart_command(tmp_path)}
    deployment = opened(server, tmp_path / "old", engine="vllm", **how)
    deployment.load("tickets", tmp_path / "new")
    posted = [path for method, path, _ in server.calls if method == "POST"]
    assert (
        posted == ["/start_draft_weight_update", "/finish_weight_update"] and len(recorded_environments(tmp_path)) == 1
    )
    server.refuses["/start_draft_weight_update"] = 404, {}
    deployment.load("more", tmp_path / "newer")
    assert server.calls[-1][1] == "/health" and len(recorded_environments(tmp_path)) == 2
    with pytest.raises(DownloadError, match="answered 404.*; --restart would start the server again"):
        opened(server, tmp_path / "old", engine="vllm", publish=restart_command(tmp_path)).load("x", tmp_path / "new")


class Updated(FakeServer):
    """vLLM with a weight-transfer engine. `away`: numbers of FINISH requests, from 1, without an answer of use."""

    def __init__(self, away: tuple[int, ...] = (), is_lost: bool = False) -> None:
        super().__init__()
        self.away, self.is_lost, self.is_updating, self.num_finish = away, is_lost, False, 0

    def answer(self, method: str, path: str, body: Any) -> tuple[int, str]:
        if path == restarted.FINISH:
            self.num_finish += 1
            is_away = self.num_finish in self.away
            if is_away and not self.is_lost:
                return 503, ""
            if not self.is_updating:
                return 500, "finish_weight_update called without a matching start_weight_update."
            self.is_updating = False
            return (503 if is_away else 200), "{}"
        if path == restarted.START:
            if self.is_updating:
                return 500, "start_weight_update called while a weight update is already active"
            self.is_updating = True
        return super().answer(method, path, body)


class TestPublish:
    """vLLM refused every later update if one was not finished, also that which gives the old weights back."""

    def publishing(self, server: FakeServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
        monkeypatch.setattr(restarted, "POLL_S", 0.01)
        script = folder / "publish.sh"
        script.write_text("test ${PACELINE_DRAFTER##*/} != bad || { echo no route to host >&2; exit 1; }\n")
        return opened(server, folder / "old", engine="vllm", publish=f"bash {script}")

    @pytest.mark.parametrize("away", [(), (1,), (1, 2, 3)])
    def test_an_update_is_finished_if_its_command_fails(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: tuple[int, ...]
    ) -> None:
        with serving(server := Updated(away)):
            deployment = self.publishing(server, tmp_path, monkeypatch)
            with pytest.raises(DeployError, match="no route to host"):
                deployment.load("tickets", tmp_path / "bad")
            assert not server.is_updating and not deployment.undo
            assert deployment.members() == {"drafter": str(tmp_path / "old")}

    @pytest.mark.parametrize("is_lost", [False, True])
    def test_a_request_to_finish_is_repeated(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
    ) -> None:
        with serving(server := Updated((1, 2), is_lost)):
            deployment = self.publishing(server, tmp_path, monkeypatch)
            deployment.load("tickets", tmp_path / "new")
            assert not server.is_updating
            assert deployment.members() == {"drafter": str(tmp_path / "new")}

    @pytest.mark.parametrize("is_lost", [False, True])
    def test_a_load_is_repeated_after_a_server_was_away(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
    ) -> None:
        with serving(server := Updated((1,), is_lost)):
            deployment = self.publishing(server, tmp_path, monkeypatch)
            with monkeypatch.context() as patch:
                patch.setattr(restarted, "FINISH_TRIES", 1)
                with pytest.raises(UnreachableError, match="503"):
                    deployment.load("tickets", tmp_path / "new")
            server.away = ()
            deployment.load("tickets", tmp_path / "new")
            assert not server.is_updating
            assert deployment.members() == {"drafter": str(tmp_path / "new")}

    def test_a_load_is_repeated_after_the_answer_to_its_start_was_lost(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with serving(server := Updated()):
            deployment = self.publishing(server, tmp_path, monkeypatch)
            server.loses.add(restarted.START)
            with pytest.raises(UnreachableError, match="does not answer"):
                deployment.load("tickets", tmp_path / "new")
            assert server.is_updating
            server.loses.clear()
            deployment.load("tickets", tmp_path / "new")
            assert not server.is_updating and deployment.members() == {"drafter": str(tmp_path / "new")}

    @pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
    def test_an_update_is_finished_if_the_daemon_is_stopped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
    ) -> None:
        def stopped(*_: Any, **options: Any) -> None:
            raise stop

        with serving(server := Updated()):
            deployment = self.publishing(server, tmp_path, monkeypatch)
            monkeypatch.setattr(restarted, "run_command", stopped)
            with pytest.raises(stop):
                deployment.load("tickets", tmp_path / "new")
            assert server.num_finish == 1 and not server.is_updating

    @pytest.mark.parametrize("is_given_up", [False, True])
    def test_an_update_of_a_daemon_that_was_killed_is_finished(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_given_up: bool
    ) -> None:
        """Killed (SIGKILL) during the command: vLLM refused every update of the next daemon, also a rollback."""
        state = tmp_path / "undo.json"
        with serving(server := Updated()):
            deployment = self.publishing(server, tmp_path, monkeypatch)
            if not (daemon := os.fork()):
                try:
                    restarted.run_command = lambda *_: os._exit(9)
                    deployment.load(
                        "x", tmp_path / "new", lambda: state.write_text(json.dumps(deployment.undo)) and None
                    )
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(daemon, 0)[1]) == 9 and server.is_updating
            following = self.publishing(server, tmp_path, monkeypatch)
            following.resume(json.loads(state.read_text()))
            if is_given_up:
                following.roll_back()
            else:
                following.load("x", tmp_path / "new")
            assert not server.is_updating and server.num_finish == 2
            assert following.members() == {"drafter": str(tmp_path / ("old" if is_given_up else "new"))}

    def test_a_drafter_that_was_kept_has_no_open_update(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A daemon that was started again during its probation."""
        with serving(server := Updated()):
            deployment = self.publishing(server, tmp_path, monkeypatch)
            deployment.resume([["server", server.url, str(tmp_path / "older")]])
            deployment.keep()
            deployment.load("x", tmp_path / "new")
            assert server.num_finish == 1


class TestHotSwap:
    """vLLM with the route of `paceline.interop.draft_weights`."""

    PATH = "/paceline/draft-weights"

    def swapping(self, server: FakeServer, folder: Path, **changes: Any) -> Deployment:
        return opened(server, folder / "old", engine="vllm", hot_swap=True, admin_key="secret", **changes)

    def test_the_running_server_gets_the_weights(self, server: FakeServer, tmp_path: Path) -> None:
        deployment = self.swapping(server, tmp_path)
        deployment.load("tickets", tmp_path / "new")
        assert ("POST", self.PATH, {"folder": str(tmp_path / "new")}) in server.calls
        assert set(server.keys) == {"Bearer secret"}
        deployment.roll_back()
        posted = [body["folder"] for method, path, body in server.calls if (method, path) == ("POST", self.PATH)]
        assert posted == [str(tmp_path / "new"), str(tmp_path / "old")]

    @pytest.mark.slow
    def test_a_refusal_is_a_restart_where_that_is_known(self, server: FakeServer, tmp_path: Path) -> None:
        server.refuses[self.PATH] = 422, {"error": "tensor fc.weight has another shape: only a restart loads it"}
        self.swapping(server, tmp_path, restart=restart_command(tmp_path)).load("x", tmp_path / "new")
        assert [Path(one["PACELINE_DRAFTER"]).name for one in recorded_environments(tmp_path)] == ["new"]

    def test_a_refusal_says_nothing_of_the_drafter(self, server: FakeServer, tmp_path: Path) -> None:
        deployment = self.swapping(server, tmp_path)
        server.answer = lambda method, path, body: (
            (422, '{"error": "another shape"}') if body.get("folder") == str(tmp_path / "new") else (200, "{}")
        )
        with pytest.raises(DeployError, match="another shape.*; --restart would start the server again"):
            deployment.load("tickets", tmp_path / "new")
        assert deployment.undo == []

    @pytest.mark.parametrize("status", [409, 503])
    def test_a_busy_server_gets_them_later(self, server: FakeServer, tmp_path: Path, status: int) -> None:
        deployment = self.swapping(server, tmp_path, restart=restart_command(tmp_path))
        server.refuses[self.PATH] = status, {}
        with pytest.raises(UnreachableError, match=f"answered {status}"):
            deployment.load("tickets", tmp_path / "new")
        assert not (tmp_path / "told.jsonl").exists() and deployment.undo != []

    @pytest.mark.parametrize(
        ("status", "answer", "words"),
        [
            (404, {}, "answered 404.*--worker-extension-cls"),
            (401, {}, "answered 401"),
            (200, {"problem": "vLLM 0.31 cannot"}, "vLLM 0.31 cannot"),
            (200, {}, "--worker-extension-cls"),
        ],
    )
    def test_it_is_checked_at_the_start(
        self, server: FakeServer, tmp_path: Path, status: int, answer: dict[str, Any], words: str
    ) -> None:
        server.refuses[self.PATH] = status, answer
        with pytest.raises(ConfigError, match=words):
            self.swapping(server, tmp_path).check_start()
        opened(server, tmp_path / "old", engine="vllm", restart="true").check_start()

    def test_a_server_that_is_away_is_checked_later(
        self, server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.is_away = True
        self.swapping(server, tmp_path).check_start()
        assert "not checked yet" in caplog.text
        server.is_away = False
        server.refuses[self.PATH] = 200, {"problem": None, "folder": str(tmp_path / "old")}
        self.swapping(server, tmp_path).check_start()

    def test_a_server_that_was_started_again_has_its_first_drafter(self, server: FakeServer, tmp_path: Path) -> None:
        """Its later counts are no evidence on the new one."""
        deployment = self.swapping(server, tmp_path)
        deployment.load("tickets", tmp_path / "new")
        for name, holds in (("new", True), ("old", False)):
            server.refuses[self.PATH] = 200, {"folder": str(tmp_path / name), "problem": None}
            assert deployment.holds("drafter", str(tmp_path / "new")) is holds

    def test_one_restarted_with_a_link_or_without_the_route_has_the_new_drafter(
        self, server: FakeServer, tmp_path: Path
    ) -> None:
        deployment = self.swapping(server, tmp_path, restart="true")
        deployment.load("tickets", tmp_path / "new")
        (tmp_path / "link").symlink_to(tmp_path / "new")
        server.refuses[self.PATH] = 200, {"folder": str(tmp_path / "link"), "problem": None}
        assert deployment.holds("drafter", str(tmp_path / "new"))
        server.refuses[self.PATH] = 404, {}
        assert deployment.holds("drafter", str(tmp_path / "new"))


def test_sglang_takes_a_drafter_s_weights_only_by_the_field_it_has_for_them(server: FakeServer, tmp_path: Path) -> None:
    deployment = opened(server, tmp_path / "old", engine="sglang", draft_field="update_draft_model")
    deployment.load("tickets", tmp_path / "new")
    body = {"model_path": str(tmp_path / "new"), "update_draft_model": True}
    assert server.calls[-1] == ("POST", "/update_weights_from_disk", body)
    server.refuses["/update_weights_from_disk"] = 200, {"success": False, "message": "shapes differ"}
    with pytest.raises(DownloadError, match="shapes differ"):
        deployment.load("worse", tmp_path / "worse")
