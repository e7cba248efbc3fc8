"""A deployment reads acceptance from its servers' metrics, each by its own names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deployments import opened
from fake_servers import FakeServer, serving

from paceline.errors import DeployError, DownloadError
from paceline.loop.adapt.config import DeployConfig
from paceline.loop.adapt.servers.counters import Counts, tokens_per_round
from paceline.loop.adapt.servers.deploy import open_deployment
from paceline.loop.adapt.servers.deployment import Deployment


def test_acceptance_is_read_by_vllm_s_names(server: FakeServer) -> None:
    deployment = opened(server)
    server.count(rounds=100, accepted=150, tokens=260)
    before = deployment.counts()
    assert before == Counts(260, 100, 150, 0, requests=5)
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
