"""The contract of deployments, against a server that only looks like one: load, read, roll back, and what goes
wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from deployments import opened
from fake_servers import FakeServer, restart_command

from paceline.errors import ConfigError, DeployError, DownloadError, UnreachableError
from paceline.loop.adapt.config import DeployConfig
from paceline.loop.adapt.decide import members
from paceline.loop.adapt.servers.deploy import open_deployment
from paceline.loop.adapt.servers.deployment import Deployment

ENGINES = ["paceline", "vllm", "vllm-weights", "sglang", "sglang-weights"]


@pytest.fixture(params=ENGINES)
def any_deployment(request: pytest.FixtureRequest, server: FakeServer, tmp_path: Path) -> Deployment:
    engine, _, by_weights = request.param.partition("-")
    how: dict[str, Any] = {} if engine == "paceline" else {"restart": restart_command(tmp_path)}
    if by_weights:
        how |= {"publish": restart_command(tmp_path)} if engine == "vllm" else {"draft_field": "update_draft_model"}
    return opened(server, tmp_path / "old", engine=engine, **how)


class TestContract:
    """What holds for each of them."""

    @pytest.mark.slow
    def test_load_and_roll_back(self, any_deployment: Deployment, server: FakeServer, tmp_path: Path) -> None:
        before = any_deployment.members()
        any_deployment.load("tickets", tmp_path / "new")
        assert any_deployment.members() != before
        any_deployment.roll_back()
        assert any_deployment.members() == before
        calls = len(server.calls)
        any_deployment.roll_back()  # there is nothing left to undo
        assert len(server.calls) == calls

    def test_what_was_kept_stays(self, any_deployment: Deployment, tmp_path: Path) -> None:
        any_deployment.load("tickets", tmp_path / "new")
        after = any_deployment.members()
        any_deployment.keep()
        any_deployment.roll_back()
        assert any_deployment.members() == after

    def test_health(self, any_deployment: Deployment, server: FakeServer) -> None:
        assert any_deployment.is_well()
        server.is_well = False
        assert not any_deployment.is_well()


def test_paceline_is_asked_through_the_admin_api(server: FakeServer, tmp_path: Path) -> None:
    deployment = opened(server, admin_key="secret")
    deployment.load("tickets", tmp_path / "new")
    assert server.calls[-1] == ("POST", "/admin/drafters/tickets", {"drafter": str(tmp_path / "new")})
    assert server.keys[-1] == "Bearer secret"
    deployment.roll_back()
    assert server.calls[-1][:2] == ("POST", "/admin/drafters/tickets/drain")
    assert deployment.members() == {"general": "default"}
    assert server.calls[-1][:2] == ("DELETE", "/admin/drafters/tickets") and "tickets" not in server.members


def test_what_was_replaced_is_given_back_by_its_name(server: FakeServer, tmp_path: Path) -> None:
    """Or, when the server refuses it now, what replaced it gets no more requests."""
    deployment = opened(server)
    assert deployment.place_of("default") == "general"
    deployment.load("general", tmp_path / "new")
    deployment.roll_back()
    assert server.members == {"general": "default"} and deployment.undo == []
    deployment.load("general", tmp_path / "new")
    server.refuses["/admin/drafters/general"] = 400, {"error": "no memory"}
    deployment.roll_back()
    assert server.drained == {"general"}


def test_place_of_a_drafter_that_does_not_serve_says_what_does(server: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"but with general \(default\): name one with --incumbent"):
        opened(server).place_of("runs/other")
    server.members["mine"] = str(tmp_path.resolve())
    assert opened(server).place_of(str(tmp_path / ".")) == "mine"


def test_a_cluster_is_sent_to_a_member_and_back(server: FakeServer) -> None:
    server.members |= {"old": "a", "new": "b"}
    deployment = opened(server)
    deployment.route("tickets", "old")
    deployment.keep()
    deployment.route("tickets", "new")
    assert server.clusters == {"tickets": "new"} and deployment.pinned("tickets") == "new"
    deployment.roll_back()
    assert server.clusters == {"tickets": "old"}
    with pytest.raises(DeployError, match="knows no requests of 'chat'"):
        deployment.route("chat", "old")


def test_a_member_loaded_by_hand_can_be_rolled_back(server: FakeServer) -> None:
    server.members["mine"] = "mine"
    deployment = opened(server)
    deployment.loaded_by_hand("mine", None)
    deployment.roll_back()
    assert server.drained == {"mine"}


def test_a_refusal_is_told_in_the_server_s_words(server: FakeServer, tmp_path: Path) -> None:
    server.refuses["/admin/drafters/tickets"] = 422, {"error": "weights are not finite"}
    with pytest.raises(DownloadError, match="weights are not finite"):
        opened(server).load("tickets", tmp_path)


@pytest.mark.parametrize("engine", ["paceline", "vllm", "sglang"])
def test_the_key_is_read_from_the_environment(server: FakeServer, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ADMIN_KEY", "secret")
    how = {} if engine == "paceline" else {"restart": "true"}
    assert opened(server, engine=engine, **how).is_well()
    assert opened(server, engine=engine, admin_key="other", **how).is_well()
    assert server.keys == ["Bearer secret", "Bearer other"]


def test_settings_that_cannot_work() -> None:
    for changes, words in (
        ({"engine": "vllm"}, "--restart or --publish, a command, or --hot-swap"),
        ({"engine": "sglang", "restart": "true", "hot_swap": True}, "--hot-swap is for vllm"),
        ({"engine": "vllm", "publish": "true", "hot_swap": True}, "give one of them"),
        ({"engine": "sglang"}, "--draft-field"),
        ({"engine": "paceline", "servers": ("a", "b")}, "one paceline server"),
    ):
        with pytest.raises(ConfigError, match=words):
            DeployConfig(**({"servers": ("http://127.0.0.1:1",)} | changes))
    assert DeployConfig().servers == ()
    with pytest.raises(DownloadError, match="does not answer"):
        open_deployment(DeployConfig(servers=("http://127.0.0.1:9",))).counts()


class TestSilence:
    """A server that does not answer, or says that it cannot now, is told from one that refuses."""

    def test_it_is_told_apart(self, any_deployment: Deployment, server: FakeServer, tmp_path: Path) -> None:
        server.is_away = True
        for call in (any_deployment.counts, any_deployment.is_well):
            with pytest.raises(UnreachableError, match="does not answer"):
                call()
        server.is_away = False
        for status in (429, 503):
            server.refuses["/metrics"] = status, {}
            with pytest.raises(UnreachableError, match=f"answered {status}"):
                any_deployment.counts()
        server.refuses["/metrics"] = 500, {}
        with pytest.raises(DownloadError, match="answered 500") as refused:
            any_deployment.counts()
        assert not isinstance(refused.value, UnreachableError)

    def test_vllm_is_not_restarted_because_it_is_silent(self, server: FakeServer, tmp_path: Path) -> None:
        """Nor taken for a version that takes no weights."""
        deployment = opened(server, tmp_path / "old", engine="vllm", publish=restart_command(tmp_path))
        server.is_away = True
        with pytest.raises(UnreachableError):
            deployment.load("tickets", tmp_path / "new")
        assert not (tmp_path / "told.jsonl").exists() and deployment.members() == {"drafter": str(tmp_path / "old")}

    @pytest.mark.parametrize("status", [429, 503])
    def test_vllm_is_not_restarted_because_it_is_busy(self, server: FakeServer, tmp_path: Path, status: int) -> None:
        how = {"publish": restart_command(tmp_path), "restart": restart_command(tmp_path)}
        deployment = opened(server, tmp_path / "old", engine="vllm", **how)
        server.refuses["/start_draft_weight_update"] = status, {}
        with pytest.raises(UnreachableError, match=f"answered {status}"):
            deployment.load("tickets", tmp_path / "new")
        assert not (tmp_path / "told.jsonl").exists()

    def test_weights_whose_answer_was_lost_are_rolled_back(self, server: FakeServer, tmp_path: Path) -> None:
        deployment = opened(server, tmp_path / "old", engine="sglang", draft_field="update_draft_model")
        server.loses.add("/update_weights_from_disk")
        for _ in range(2):
            with pytest.raises(UnreachableError):
                deployment.load("tickets", tmp_path / "new")
        assert deployment.undo == [["server", server.url, str(tmp_path / "old")]]
        server.loses.clear()
        deployment.roll_back()
        assert server.calls[-1][2]["model_path"] == str(tmp_path / "old") and deployment.undo == []

    def test_a_drafter_that_is_there_is_not_loaded_again(self, server: FakeServer, tmp_path: Path) -> None:
        """A second copy had no room, so that a drafter that was loaded was reported as failed."""
        deployment, path = opened(server), "/admin/drafters/general"
        server.loses.add(path)
        with pytest.raises(UnreachableError):
            deployment.load("general", tmp_path)
        server.loses.clear()
        server.refuses[path] = 507, {"error": "no memory for two"}
        deployment.load("general", tmp_path)
        assert deployment.undo == [["drafter", "general", "default"]] and server.members["general"] == str(tmp_path)

    def test_a_drafter_that_was_restored_is_not_drained(self, server: FakeServer, tmp_path: Path) -> None:
        """A roll-back whose response was lost was repeated, found no room for a second copy and removed the drafter."""
        deployment, path = opened(server), "/admin/drafters/general"
        deployment.load("general", tmp_path)
        server.loses.add(path)
        with pytest.raises(UnreachableError):
            deployment.roll_back()
        server.loses.clear()
        server.refuses[path] = 507, {"error": "no memory for two"}
        deployment.roll_back()
        assert server.members == {"general": "default"} and not server.drained and not deployment.undo

    def test_weights_that_are_refused_leave_nothing_to_undo(self, server: FakeServer, tmp_path: Path) -> None:
        deployment = opened(server, tmp_path / "old", engine="sglang", draft_field="update_draft_model")
        answers = iter([(200, {"success": False}), (200, {"success": True})])
        server.answer = lambda method, path, body: (lambda each: (each[0], json.dumps(each[1])))(next(answers))
        with pytest.raises(DownloadError, match="refused the weights"):
            deployment.load("tickets", tmp_path / "new")
        assert deployment.undo == [] and not list(answers), "the old ones were given back"

    def test_a_roll_back_to_a_silent_server_gives_back_nothing_yet(self, server: FakeServer, tmp_path: Path) -> None:
        """It would drain the new drafter, and never load the old one, if silence were a refusal."""
        deployment = opened(server)
        deployment.load("general", tmp_path / "new")
        server.refuses["/admin/drafters/general"] = 503, {"error": "loading"}
        with pytest.raises(UnreachableError):
            deployment.roll_back()
        assert not server.drained and deployment.undo == [["drafter", "general", "default"]]
        server.refuses.clear()
        deployment.roll_back()
        assert server.members == {"general": "default"}

    def test_a_pinned_member_is_not_taken_for_none(self, server: FakeServer) -> None:
        server.members["mine"], server.clusters["tickets"] = "runs/mine", "mine"
        deployment = opened(server)
        assert members.serving(deployment, "tickets", "default") == ("mine", "runs/mine")
        server.refuses["/admin/drafters"] = 503, {}
        with pytest.raises(UnreachableError):
            members.serving(deployment, "tickets", "default")
