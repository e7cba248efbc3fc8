"""The contract of deployments, against a server that only looks like one: load, read, roll back, and what goes
wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_servers import FakeServer, recorded_environments, restart_command, serving

from paceline.errors import ConfigError, DeployError, DownloadError, UnreachableError
from paceline.loop.adapt.config import DeployConfig
from paceline.loop.adapt.decide import members
from paceline.loop.adapt.servers.counters import Counts, tokens_per_round
from paceline.loop.adapt.servers.deploy import Deployment, open_deployment
from paceline.loop.adapt.servers.vllm_sglang import restart as restarted


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FakeServer()) as fake:
        yield fake


def opened(server: FakeServer, incumbent: Path | None = None, **changes: Any) -> Deployment:
    return open_deployment(DeployConfig(servers=(server.url,), **changes), incumbent)


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

    def test_a_server_that_is_away_is_one_line(self, any_deployment: Deployment, server: FakeServer) -> None:
        server.refuses["/metrics"] = 500, {"error": "out of order"}
        with pytest.raises(DownloadError, match="answered 500"):
            any_deployment.counts()


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


@pytest.mark.parametrize("engine", ["paceline", "vllm", "sglang"])
def test_the_key_is_read_from_the_environment(server: FakeServer, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ADMIN_KEY", "secret")
    how = {} if engine == "paceline" else {"restart": "true"}
    assert opened(server, engine=engine, **how).is_well()
    assert opened(server, engine=engine, admin_key="other", **how).is_well()
    assert server.keys == ["Bearer secret", "Bearer other"]


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
    with pytest.raises(DownloadError, match="give --restart"):
        opened(server, tmp_path / "old", engine="vllm", publish=restart_command(tmp_path)).load("x", tmp_path / "new")


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
        with pytest.raises(DeployError, match="another shape.*or give --restart"):
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


def test_acceptance_is_read_by_vllm_s_names(server: FakeServer) -> None:
    deployment = opened(server)
    server.count(rounds=100, accepted=150, tokens=260)
    before = deployment.counts()
    assert before == Counts(260, 100, 150, 0, requests=99)
    assert tokens_per_round(before, before) is None
    server.count(rounds=300, accepted=750, tokens=900, errors=2)
    assert tokens_per_round(before, deployment.counts()) == pytest.approx(4.0)
    assert deployment.counts().errors == 2
    server.count(rounds=10, accepted=10, tokens=20)  # a restart set them back: what was counted stays counted
    assert tokens_per_round(before, deployment.counts()) == pytest.approx(1 + (750 + 10 - 150) / (300 + 10 - 100))


def test_acceptance_is_read_by_sglang_s_names(server: FakeServer, tmp_path: Path) -> None:
    deployment = opened(server, engine="sglang", restart="true")
    gauge = '# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length{{tp_rank="0"}} {0}\n'
    gauge += 'sglang:spec_accept_length{{tp_rank="1"}} {0}\nsglang:generation_tokens_total {1}\n'
    server.metrics = gauge.format(2.0, 1000)
    before = deployment.counts()
    server.metrics = gauge.format(4.0, 1800)
    assert tokens_per_round(before, deployment.counts()) == pytest.approx(4.0)
    server.metrics = gauge.format(2.0, 2200)
    assert tokens_per_round(before, deployment.counts()) == pytest.approx(1200 / 400)


def test_sglang_s_data_parallel_ranks_share_their_mean_length(server: FakeServer) -> None:
    """The lengths carry `dp_rank`, the tokens do not."""
    deployment = opened(server, engine="sglang", restart="true")
    gauges = "".join(
        f'sglang:spec_accept_length{{{{model_name="m",dp_rank="{rank}"}}}} {{{rank}}}\n' for rank in range(3)
    )
    text = gauges + 'sglang:generation_tokens_total{{model_name="m"}} {3}\n'
    server.metrics = text.format(3.0, 3.0, 0.0, 900)
    before = deployment.counts()
    server.metrics = text.format(5.0, 3.0, 0.0, 1700)
    after = deployment.counts()
    assert (after.tokens - before.tokens, after.rounds - before.rounds) == (800, 200)
    assert tokens_per_round(before, after) == pytest.approx(4.0), "a rank that has not drafted is left out"


PAGE = """vllm:generation_tokens_total{{engine="{engine}",model_name="{model}"}} {tokens}
vllm:spec_decode_num_drafts_total{{engine="{engine}",model_name="{model}"}} {rounds}
vllm:spec_decode_num_accepted_tokens_total{{engine="{engine}",model_name="{model}"}} {accepted}
"""


def page(rounds: int, accepted: int, engine: str = "0", model: str = "m") -> str:
    return PAGE.format(engine=engine, model=model, tokens=rounds + accepted, rounds=rounds, accepted=accepted)


class TestSeveralServers:
    """Differences are taken by server and engine, and summed last: one that restarts moves nothing."""

    @pytest.fixture
    def second(self) -> Iterator[FakeServer]:
        with serving(FakeServer()) as fake:
            yield fake

    @pytest.fixture
    def both(self, server: FakeServer, second: FakeServer) -> Deployment:
        server.metrics, second.metrics = page(1000, 2000), page(1000, 500)
        return open_deployment(DeployConfig("vllm", (server.url, second.url), restart="true"))

    def rate(self, deployment: Deployment, *pages: tuple[FakeServer, str]) -> float | None:
        before = deployment.counts()
        for server, text in pages:
            server.metrics = text
        return tokens_per_round(before, deployment.counts())

    def test_one_that_was_restarted_counts_from_zero(
        self, both: Deployment, server: FakeServer, second: FakeServer
    ) -> None:
        rate = self.rate(both, (server, page(100, 200)), (second, page(5000, 2500)))
        assert rate == pytest.approx(1 + 2200 / 4100)

    def test_both_restarted(self, both: Deployment, server: FakeServer, second: FakeServer) -> None:
        rate = self.rate(both, (server, page(500, 1000)), (second, page(600, 300)))
        assert rate == pytest.approx(1 + 1300 / 1100)

    @pytest.mark.parametrize(
        "cut",
        [
            "",
            "# HELP x\n",
            page(1200, 2400).split("\n")[0] + "\nvllm:spec_decode_num_dra",
            'vllm:num_requests_running{engine="0",model_name="m"} 1\n',
            "vllm:num_requests_running 1\n",
        ],
    )
    def test_a_page_that_cannot_be_read_is_left_out(
        self, both: Deployment, server: FakeServer, second: FakeServer, cut: str
    ) -> None:
        rate = self.rate(both, (server, cut), (second, page(2000, 1000)))
        assert rate == pytest.approx(1.5), "of the other server alone"
        assert self.rate(both, (server, page(1400, 3200))) == pytest.approx(4.0), (
            "all of its rounds since it was last read"
        )

    def test_sglang_s_page_without_its_tokens_is_left_out(self, server: FakeServer) -> None:
        deployment = opened(server, engine="sglang", restart="true")
        server.metrics = "sglang:spec_accept_length 2\nsglang:generation_tokens_total 1000\n"
        deployment.counts()
        server.metrics = "sglang:spec_accept_length 2\n"
        assert deployment.counts().tokens == 1000
        server.metrics = "sglang:spec_accept_length 2\nsglang:generation_tokens_total 1200\n"
        assert deployment.counts() == Counts(1200, 100, 100)

    def test_one_reason_that_is_missing_is_no_restart(self, server: FakeServer) -> None:
        deployment = opened(server, engine="vllm", restart="true")
        server.count(rounds=100, accepted=200, tokens=300, errors=10, ended=90)
        before = deployment.counts()
        server.metrics = "".join(line for line in server.metrics.splitlines(keepends=True) if '"stop"' not in line)
        assert deployment.counts() == before
        server.count(rounds=120, accepted=240, tokens=360, errors=10, ended=95)
        assert deployment.counts() == Counts(360, 120, 240, 10, requests=105)

    def test_engines_of_one_server(self, server: FakeServer) -> None:
        deployment = opened(server, engine="vllm", restart="true")
        server.metrics = page(1000, 2000) + page(1000, 500, "1")
        rate = self.rate(deployment, (server, page(100, 200) + page(5000, 2500, "1")))
        assert rate == pytest.approx(1 + 2200 / 4100)

    def test_several_models_need_a_name(self, server: FakeServer) -> None:
        server.metrics = page(1000, 2000) + page(5000, 0, model="adapter")
        with pytest.raises(DeployError, match="several models, adapter, m: name one"):
            opened(server, engine="vllm", restart="true").counts()
        named = opened(server, engine="vllm", restart="true", served_name="m")
        assert tokens_per_round(Counts(), named.counts()) == 3.0


def test_what_is_no_metrics_page(server: FakeServer) -> None:
    server.metrics = "<html>hello</html> {"
    with pytest.raises(DownloadError, match="Prometheus"):
        opened(server).counts()


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
        with pytest.raises(DownloadError) as refused:
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


def test_rounds_are_read_by_member(server: FakeServer, tmp_path: Path) -> None:
    deployment = opened(server)
    server.count(rounds=100, accepted=150, tokens=260)
    assert deployment.drafts("general") is None, "this server does not count by member"
    for name, number in (("general", 60), ("mine", 40)):
        server.metrics += f'paceline:drafter_drafts_total{{model_name="m",drafter="{name}"}} {number}\n'
    assert [deployment.drafts(name) for name in ("general", "mine", "new")] == [60, 40, 0]
    server.metrics += 'paceline:drafter_drafts_total{model_name="m",drafter="other"} 7\n'
    assert deployment.drafts("mine") == 40 and deployment.drafts("new") is None, "the seven may be its own"
    assert opened(server, tmp_path, engine="sglang", restart="true").drafts("drafter") is None
