"""Counters of several servers over restarts, as `adapt` reads them: Meters, then CountedHours."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from paceline.errors import UnreachableError
from paceline.loop.adapt.servers.counted_hours import CountedHours
from paceline.loop.adapt.servers.counters import Counts, Meters, tokens_per_round
from paceline.loop.adapt.traffic.hours import total
from paceline.net.prometheus import engines_of, totals

MINUTES = 1_000 * 60
NAMES = ("rounds", "accepted", "requests")
PAGES = {
    "vllm": """# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens} 1767225600000
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {rounds}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} {requests}
vllm:request_prefill_time_seconds_sum{{engine="0",model_name="m"}} NaN
""",
    "sglang": """sglang:generation_tokens_total{{engine_type="unified",model_name="m",is_streaming="true"}} {tokens}
sglang:num_requests_total{{engine_type="unified",model_name="m",is_streaming="true"}} {requests}
sglang:spec_verify_calls_total{{engine_type="unified",model_name="m"}} {rounds}
sglang:spec_accept_length{{engine_type="unified",model_name="m",tp_rank="0"}} 1.9
sglang:spec_accept_length{{engine_type="unified",model_name="m",tp_rank="1"}} 1.9
""",
    "llama.cpp": """llamacpp:tokens_predicted_total {tokens}
llamacpp:spec_decode_num_drafts_total {rounds}
llamacpp:spec_decode_num_accepted_tokens_total {accepted}
""",
}


class FixedPage:
    """A client whose server shows `text`; without it the server does not answer."""

    def __init__(self, url: str, text: str = "") -> None:
        self.url, self.text = url, text

    def ask(self, method: str, path: str, body: bytes | None) -> Any:
        return SimpleNamespace(failure="" if self.text else "refused", status=200, body=self.text.encode())


class Server(FixedPage):
    """A simulated server, a minute at a time: a daily curve, idle hours, an acceptance length that drifts, restarts at
    random times that take up to ten minutes, and a /metrics page that counts from 0 after each."""

    def __init__(self, kind: str, number: int, draw: np.random.Generator, uptime_h: float) -> None:
        super().__init__(f"http://{number}")
        self.kind = kind
        minutes = np.arange(MINUTES)
        length = (1.2, 1.6, 3.2)[number] * (1 + 0.3 * minutes / MINUTES)
        curve = np.maximum(np.sin(2 * np.pi * (minutes / 1440 + number / 3)), 0.0)  # idle for half a day
        self.requests = draw.poisson(8 * curve)
        self.restarts = draw.random(MINUTES) < 1 / (60 * uptime_h)
        self.is_away = np.zeros(MINUTES, bool)
        for at in np.flatnonzero(self.restarts):
            self.is_away[at : at + draw.integers(1, 11)] = True
        self.requests[self.is_away] = 0
        self.rounds = draw.poisson(60.0 * self.requests)
        self.accepted = draw.poisson(self.rounds * (length - 1))
        self.sums = {name: np.concatenate([[0], np.cumsum(getattr(self, name))]) for name in NAMES}
        """Sums over all minutes before one."""
        self.counts, self.shown, self.unread, self.lost = Counts(), Counts(), Counts(), Counts()
        """Served since the latest restart; the same at the latest reading; served since that; lost by restarts."""
        self.is_new = False

    def serve(self, since: int, until: int) -> None:
        """Serve the minutes [since, until)."""
        restarts = since + np.flatnonzero(self.restarts[since:until])
        for begin, end in itertools.pairwise([since, *restarts, until]):
            if begin < until and self.restarts[begin]:
                self.lost += self.unread
                self.unread, self.counts, self.is_new = Counts(), Counts(), True
            sums = {name: float(sums[end] - sums[begin]) for name, sums in self.sums.items()}
            served = Counts(tokens=sum(sums.values()), **sums)
            self.unread += served
            self.counts += served
        page = PAGES[self.kind].format(**{name: getattr(self.counts, name) for name in ("tokens", *NAMES)})
        self.text = "" if self.is_away[until - 1] else page

    def ask(self, method: str, path: str, body: bytes | None) -> Any:
        if self.text:
            names = ("tokens", "rounds") if self.kind == "sglang" else ("tokens", "rounds", "accepted")
            if self.is_new and all(getattr(self.counts, name) >= getattr(self.shown, name) for name in names):
                self.lost += self.shown  # nobody can notice this restart
            self.shown, self.unread, self.is_new = self.counts, Counts(), False
        return super().ask(method, path, body)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), [*((kind, seed) for seed, kind in enumerate(PAGES)), ("all of them", 3)])
def test_a_thousand_hours_with_restarts_give_the_true_acceptance_length(tmp_path: Path, kind: str, seed: int) -> None:
    """Within 1%, with readings every one to forty minutes and a restart every few hours.

    Lost at a restart is what was served since the last reading before it, and the little before that if the server has
    served more than that by the next reading; nothing else is lost."""
    draw = np.random.default_rng(seed)
    kinds = list(PAGES) if kind == "all of them" else [kind] * 3
    servers = [Server(name, number, draw, (4.0, 10.0, 25.0)[number]) for number, name in enumerate(kinds)]
    for server in servers:
        server.restarts[:60] = server.is_away[:60] = False
    meters, hours, at = Meters({server.url: {} for server in servers}), CountedHours(tmp_path), 1
    for server in servers:
        server.serve(0, 1)
        server.unread = Counts()
    first = meters.read(cast(Any, servers), None)
    hours.read(0.0, first)
    while at < MINUTES:
        until = min(at + int(draw.integers(1, 41)), MINUTES)
        for server in servers:
            server.serve(at, until)
        at = until
        try:
            hours.read(60.0 * at, meters.read(cast(Any, servers), None))
        except UnreachableError:
            continue
    for server in servers:  # a last reading, with everybody there
        server.is_away[-1] = False
        server.serve(MINUTES, MINUTES)
    last = meters.read(cast(Any, servers), None)
    hours.read(60.0 * MINUTES, last)
    served = [sum(float(getattr(server, name)[1:].sum()) for server in servers) for name in ("rounds", "accepted")]
    truth = 1 + served[1] / served[0]
    sums = total(by["all"] for by in hours.hours(2_000).values())
    assert len(set(hours.hours(2_000))) > 800
    assert sums.tokens_per_round == pytest.approx(truth, rel=0.01)
    assert tokens_per_round(first, last) == pytest.approx(truth, rel=0.01)
    lost = sum((server.lost for server in servers), Counts())
    assert sum(server.restarts.sum() for server in servers) > 300 and 0 < lost.rounds < 0.1 * served[0]
    assert sums.rounds == pytest.approx(served[0] - lost.rounds, rel=1e-9)
    assert sums.tokens == pytest.approx(sum(served) - lost.rounds - lost.accepted, rel=1e-9)


def gained(*pages: str, model: str | None = None) -> Counts:
    """Counts between the first of these pages and the last, of one server."""
    server = FixedPage("http://one", pages[0])
    meters = Meters({server.url: {}})
    counts = [meters.read(cast(Any, [server]), model)]
    for server.text in pages[1:]:
        counts.append(meters.read(cast(Any, [server]), model))
    return Counts(**{name: getattr(counts[-1], name) - getattr(counts[0], name) for name in Counts.__slots__})


def vllm(tokens: int, rounds: int, accepted: int) -> str:
    return PAGES["vllm"].format(tokens=tokens, rounds=rounds, accepted=accepted, requests=9)


def sglang(tokens: int, rounds: int, requests: int) -> str:
    return PAGES["sglang"].format(tokens=tokens, rounds=rounds, requests=requests)


class TestMeter:
    def test_a_restart_that_more_tokens_hide_is_seen_by_rounds_or_accepted_drafts(self) -> None:
        """Its tokens have passed those of before, its accepted drafts have not."""
        assert gained(vllm(300, 100, 200), vllm(400, 350, 50)) == Counts(400, 350, 50, requests=9)
        assert gained(vllm(300, 200, 100), vllm(400, 50, 350)) == Counts(400, 50, 350, requests=9)

    def test_sglang_counts_rounds(self) -> None:
        """Each request's first token needs no round; the gauge, 1.9 of late, is not asked."""
        assert gained(sglang(1010, 500, 10), sglang(4030, 1500, 30)) == Counts(3020, 1000, 2000, requests=20)
        assert gained(sglang(1010, 500, 10), sglang(301, 100, 1)) == Counts(301, 100, 200, requests=1)

    def test_sglang_s_requests_without_a_round_count_as_no_draft(self) -> None:
        """Requests of one token each, and aborted ones without a token."""
        assert gained(sglang(1010, 500, 10), sglang(1015, 500, 15)) == Counts(5, requests=5)
        assert gained(sglang(1010, 500, 10), sglang(1010, 500, 11)) == Counts(requests=1)

    def test_sglang_s_first_reading_is_a_whole_one(self) -> None:
        server = FixedPage("http://one", sglang(3010, 1000, 10))
        assert tokens_per_round(Counts(), Meters({server.url: {}}).read(cast(Any, [server]), None)) == 3.0

    def test_the_gauge_of_an_idle_server_changes_nothing(self) -> None:
        """Three servers of SGLang without its counter of rounds; one of them has drafted at 9.0 long ago."""
        text = "sglang:generation_tokens_total {}\nsglang:spec_accept_length {}\n"
        servers = [FixedPage(f"http://{number}", text.format(9000, 9.0)) for number in range(3)]
        meters = Meters({server.url: {} for server in servers})
        before = meters.read(cast(Any, servers), None)
        for server, tokens, length in zip(servers, (9600, 9300, 9000), (3.0, 1.5, 9.0), strict=True):
            server.text = text.format(tokens, length)
        assert tokens_per_round(before, meters.read(cast(Any, servers), None)) == pytest.approx(900 / 400)

    def test_a_server_that_does_not_answer_hides_no_restart_of_another(self) -> None:
        one, other = FixedPage("http://one", vllm(300, 100, 200)), FixedPage("http://other", vllm(300, 100, 200))
        meters = Meters({one.url: {}, other.url: {}})
        before = meters.read(cast(Any, [one, other]), None)
        one.text, other.text = "", vllm(600, 200, 400)
        with pytest.raises(UnreachableError):
            meters.read(cast(Any, [one, other]), None)
        one.text, other.text = vllm(310, 105, 205), vllm(30, 10, 20)
        after = meters.read(cast(Any, [one, other]), None)
        assert (after.rounds - before.rounds, after.accepted - before.accepted) == (5 + 100 + 10, 5 + 200 + 20)


class TestPage:
    """Samples as the exposition formats of Prometheus and OpenMetrics allow them."""

    @pytest.mark.parametrize(
        "line",
        [
            'vllm:generation_tokens_total{model_name="m"} 7',
            'vllm:generation_tokens_total{model_name="m"} 7 1767225600000',
            'vllm:generation_tokens_total{model_name="m"} 7 -1',
            'vllm:generation_tokens_total{model_name="m"} 7 1767225600.5',
            'vllm:generation_tokens_total{model_name="m"}\t7.0e0\t1767225600000',
            'vllm:generation_tokens_total {model_name="m",} 7',
            'vllm:generation_tokens_total{model_name="m"} 7 # {trace_id="x"} 0.67',
            'vllm:generation_tokens_total{model_name="m"} 7 1767225600.5 # {trace_id="x"} 0.67 1767225600.1',
            'vllm:generation_tokens_total{model_name="m",user="} 9 # {"} 7',
        ],
    )
    def test_a_sample(self, line: str) -> None:
        assert engines_of(line, "m") == {"": {"vllm:generation_tokens_total": 7.0}}

    @pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "x", ""])
    def test_what_is_no_count_is_missing(self, value: str) -> None:
        text = (
            f'vllm:generation_tokens_total{{model_name="m"}} {value}\nvllm:num_requests_running{{model_name="m"}} 1\n'
        )
        assert engines_of(text, "m") == {"": {"vllm:num_requests_running": 1.0}}

    @pytest.mark.parametrize("label", ["tp_rank", "pp_rank", "moe_ep_rank", "gpu", "worker_pid"])
    def test_gauges_of_several_processes_are_not_added(self, label: str) -> None:
        text = "".join(f'sglang:spec_accept_length{{{label}="{at}"}} {at and 3.2}\n' for at in range(4))
        assert engines_of(text)[""]["sglang:spec_accept_length"] == pytest.approx(3.2)

    def test_running_requests_of_each_priority_are_part_of_the_total(self) -> None:
        rows = [("", 5), ("1", 3), ("2", 2)]
        text = "".join(f'sglang:num_running_reqs{{priority="{name}"}} {number}\n' for name, number in rows)
        text += "".join(f'sglang:generation_tokens_total{{priority="{name}"}} {number}\n' for name, number in rows)
        assert engines_of(text)[""] == {"sglang:num_running_reqs": 5.0, "sglang:generation_tokens_total": 10.0}

    def test_a_draft_engine_s_own_series_are_left_out(self) -> None:
        """It has another model's name, too, so that no model need be named."""
        text = vllm(300, 100, 200) + vllm(900, 900, 0).replace(
            'engine="0",model_name="m"', 'engine="draft",model_name="d"'
        )
        assert totals(engines_of(text))["vllm:spec_decode_num_drafts_total"] == 100

    def test_two_models_on_one_page(self) -> None:
        text = vllm(300, 100, 200) + vllm(900, 900, 0).replace('model_name="m"', 'model_name="n"')
        assert gained(text, text.replace("} 300 ", "} 450 ").replace("} 100\n", "} 150\n"), model="m").tokens == 150
        assert totals(engines_of(text, "n"))["vllm:spec_decode_num_drafts_total"] == 900
