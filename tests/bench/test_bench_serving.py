"""`bench serving`: answers to figures, loads as asked for, and a run against a live server."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_server import serving, talker
from loopback import Handler, answering
from server_words import LAST, USAGE, event, stream, text_event
from small_llm import tiny_model

from paceline.bench.config import WARM_UP_TOKENS, ServersConfig, ServingConfig
from paceline.bench.serving import servers
from paceline.bench.serving.load import WARM_UP_REQUESTS, Contender, ServingBench
from paceline.commands.bench import bench_serving, words_of
from paceline.config import EngineConfig
from paceline.data.prompts import Prompt
from paceline.errors import ConfigError, DownloadError, ModelNotFoundError
from paceline.net.streaming import Client, Stream
from paceline.report.pages import render
from paceline.report.tables import SILENT
from paceline.simulate.server.load import Arrivals, poisson

pytestmark = pytest.mark.slow
pytest_plugins = ("undrawn",)

FAST = ("--concurrency", "2", "--rate", "50", "--requests", "3", "--max-tokens", "6")


@pytest.fixture(autouse=True)
def no_key_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_API_KEY", raising=False)


def test_arrivals_are_a_poisson_process() -> None:
    times = poisson(4.0, 20_000, seed=1)
    gaps = [later - sooner for sooner, later in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.25, rel=0.03) and deviation == pytest.approx(0.25, rel=0.03)
    assert times == poisson(4.0, 20_000, seed=1) != poisson(4.0, 20_000, seed=2)


class Recording(Client):
    """Answers after a while, and keeps what was asked and how much at once."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__("http://127.0.0.1:1")
        self.seconds, self.num_now, self.most, self.bodies = seconds, 0, 0, list[dict[str, object]]()
        self.lock = threading.Lock()

    def post(self, path: str, body: bytes, due_s: float | None = None) -> Stream:
        with self.lock:
            self.num_now += 1
            self.most = max(self.most, self.num_now)
            self.bodies.append({"path": path, **json.loads(body)})
        time.sleep(self.seconds)
        with self.lock:
            self.num_now -= 1
        return stream(text_event("a") + LAST, event(USAGE) + event(b"[DONE]"))


PROMPTS = [Prompt("0", [{"role": "user", "content": "hi"}], ("hi",), "x"), Prompt("1", [], (), "x", (1, 2))]


def test_loads_requests_and_turns() -> None:
    off, auto = Recording(0.002), Recording(0.002)
    contenders = [Contender("off", off, {"speculate": "off"}), Contender("auto", auto)]
    config = ServingConfig(
        concurrencies=(3,), rates=(1000.0,), num_requests=7, max_tokens=5, seed=40, repeat=2, ignore_eos=True
    )
    bench = ServingBench(contenders, "m", PROMPTS, config)
    order: list[tuple[str, str]] = []
    loads: list[Arrivals] = []
    bench.run(lambda load, _: loads.append(load), lambda load, name, _: order.append((str(load), name)))
    assert len(loads) == bench.num_answers == 2 * 2 * 2 * 7
    closed, opened = "3 in flight", "1000 per second"
    turns = [(closed, "off"), (closed, "auto"), (opened, "auto"), (opened, "off")]
    assert order == [*turns, (closed, "auto"), (closed, "off"), (opened, "off"), (opened, "auto")]
    sent = sorted([body for body in off.bodies if body["max_tokens"] == 5][:7], key=lambda body: str(body["seed"]))
    assert (
        [body["seed"] for body in sent] == [*range(40, 47)] and sent[0]["speculate"] == "off" and sent[0]["ignore_eos"]
    )
    assert (sent[0]["path"], sent[0]["messages"]) == ("/v1/chat/completions", PROMPTS[0].messages)
    assert (sent[1]["path"], sent[1]["prompt"]) == ("/v1/completions", [1, 2])
    assert "speculate" not in auto.bodies[0]
    for result in bench.results():
        assert (result.num_answers, result.num_failed, result.identical, result.speedup) == (14, 0, 1.0, 1.0)
        assert result.tokens_per_round == 2.0 and result.reused == pytest.approx(1 / 3)


def test_tools_and_template_variables_of_a_prompt_are_sent() -> None:
    client, tool = Recording(0.0), {"type": "function", "function": {"name": "f"}}
    prompt = replace(PROMPTS[0], tools=(tool,), variables=(("enable_thinking", False),))
    ServingBench(
        [Contender("x", client)], "m", [prompt], ServingConfig(concurrencies=(1,), num_requests=1, max_tokens=1)
    ).run()
    assert client.bodies
    for body in client.bodies:
        assert (body["tools"], body["chat_template_kwargs"]) == ([tool], {"enable_thinking": False})


def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    client = Recording(0.002)
    bench = ServingBench([Contender("x", client)], "m", PROMPTS, ServingConfig(concurrencies=(3,), max_tokens=1))
    bench.run()
    assert client.most == 3
    assert bench.num_requests(Arrivals(concurrency=3)) == 12 and bench.num_requests(Arrivals(rate=0.5)) == 5
    assert bench.results()[0].speedup is None and bench.results()[0].identical is None


def test_a_warm_up_is_small_whatever_the_load() -> None:
    client, config = Recording(0.0), ServingConfig(rates=(400.0,), num_requests=40, max_tokens=5, repeat=1)
    ServingBench([Contender("x", client)], "m", PROMPTS, config).run()
    lengths = [body["max_tokens"] for body in client.bodies]
    assert lengths == [WARM_UP_TOKENS] * WARM_UP_REQUESTS + [5] * 40


@pytest.mark.parametrize(
    "values",
    [
        {"concurrencies": (0,)},
        {"concurrencies": ()},
        {"rates": (0.0,)},
        {"rates": (float("inf"),)},
        {"num_requests": 0},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"repeat": 0},
        {"timeout_s": 0.0},
    ],
)
def test_impossible_settings(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServingConfig(**values)  # pyright: ignore[reportArgumentType]


def run(*words: str) -> None:
    from typer.testing import CliRunner

    from paceline.cli import app

    done = CliRunner().invoke(app, ["bench", "serving", *words])
    if done.exception:
        raise done.exception


def test_a_live_server_off_and_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(talker(), served_names=("small",)) as live:
        config = ServingConfig(concurrencies=(2,), rates=(50.0,), num_requests=3, max_tokens=6)
        ask = ServersConfig(url=live.url + "/v1/")
        bench_serving(ask, config, EngineConfig(), limit=2, out=tmp_path / "run", as_json=True)
    line = json.loads(capsys.readouterr().out)
    assert [(each["load"]["concurrency"], each["speculate"]) for each in line["results"]] == [
        (2, "off"),
        (2, "auto"),
        (None, "off"),
        (None, "auto"),
    ]
    assert all(each["num_failed"] == 0 and each["identical"] == 1.0 for each in line["results"])
    assert all(each["tokens_per_round"] == 1.0 and each["client_cpu"] > 0 for each in line["results"])
    files = {file.name for file in (tmp_path / "run").iterdir()}
    assert files >= {"config.json", "command.txt", "metrics.jsonl", "report.md", "report.html", "results.json"}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["steps"] for line in lines if "steps" in line]
    assert len(lines) == 12 + 4 and len(steps) == 4, "a line for each request, and one for each pass"
    for one in steps:
        counts = {kind: sum(count for own, _, count, _ in one if own == kind) for kind, *_ in one}
        assert counts.keys() == {"step", "prefill", "verify"} and counts["prefill"] >= 3
        assert counts["verify"] <= 15, "three requests of six tokens, and nothing of the passes before"
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("<svg") == 1 + 8 and "Time to the first token" in page
    assert "2 in flight" in (tmp_path / "run" / "report.md").read_text()
    assert '<p class="verdict">No verdict on the speed-up (auto, 2 in flight): ' in page, "18 tokens are too few"
    assert "<dt>inter-token</dt>" in page and "<summary>Settings</summary>" in page


@pytest.mark.parametrize(
    ("gains", "sentence"),
    [
        ([], "There is nothing to compare"),
        (
            [(1.02, "auto", "1 in flight")],
            "1.02x as fast (auto, 1 in flight): it brings nothing here. Next: serve with --speculate off",
        ),
        (
            [(1.1, "8", "8 in flight"), (1.9, "full", "1 in flight")],
            "1.90x as fast at best (full, 1 in flight), 1.10x at worst (8, 8 in flight): it pays at every load. "
            "Next: serve with --speculate full.",
        ),
        (
            [(0.8, "full", "8 in flight"), (1.9, "full", "1 in flight")],
            "costs time at others. Next: serve with --speculate auto",
        ),
    ],
)
def test_a_verdict_on_a_load(gains: list[tuple[float, str, str]], sentence: str) -> None:
    verdict = render("load_verdict.txt", gains=gains, num_failed=0, num_answers=9)
    assert sentence in verdict and "failed" not in verdict
    assert "3 of 9 answers failed" in render("load_verdict.txt", gains=gains, num_failed=3, num_answers=9)


@pytest.mark.usefixtures("undrawn")
def test_failures_are_counted_and_do_not_stop_the_others(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "hi"}) + "\n" + json.dumps({"prompt": "long " * 200}) + "\n")
    with serving(talker()) as live:
        run("--url", live.url, "--prompts", str(prompts), *FAST, "--out", str(tmp_path / "run"))
        report = (tmp_path / "run" / "report.md").read_text()
        assert "2 in flight, speculate off: 1x status 400: the prompt has" in report
        assert re.search(r"\d of \d+ answers failed: see Failures", report)
        prompts.write_text(json.dumps({"prompt": "long " * 200}) + "\n")
        with pytest.raises(ConfigError, match="every request failed, first with: status 400"):
            run("--url", live.url, "--prompts", str(prompts), *FAST, "--out", str(tmp_path / "run"))
    results = json.loads((tmp_path / "run" / "results.json").read_text())["results"]
    assert results[0]["num_failed"] == 3 and results[0]["first_token"]["p50"] is None


@pytest.mark.usefixtures("undrawn")
def test_what_can_be_wrong_with_a_server(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("# mine\nright\n")
    out = ("--out", str(tmp_path / "run"))
    with pytest.raises(DownloadError, match="there is no server at http://127.0.0.1:1 "):
        run("--url", "http://127.0.0.1:1", *out)
    with serving(talker(), api_keys=("right",)) as live:
        with pytest.raises(ConfigError, match="wants an API key: give the right one"):
            run("--url", live.url, *out)
        with pytest.raises(ModelNotFoundError, match="does not serve 'gpt': choose --model from fake"):
            run("--url", live.url, "--model", "gpt", "--api-key-file", str(key), *out)
        run("--url", live.url, "--api-key-file", str(key), *FAST, *out)
        assert (
            "right"
            not in (tmp_path / "run" / "command.txt").read_text() + (tmp_path / "run" / "config.json").read_text()
        )
        key.write_text("wrong")
        with pytest.raises(ConfigError, match="does not take this API key"):
            run("--url", live.url, "--api-key-file", str(key), *out)


@pytest.mark.parametrize(
    ("words", "said_of_it"),
    [
        (("--url", "http://127.0.0.1:1", "--dtype", "float32"), "--dtype cannot change a server that runs"),
        (("--speculate", "sometimes"), "'sometimes' is not known"),
        (("--speculate", ","), "speculate is empty: give at least one of off, auto, full"),
        (("--concurrency", "two"), "is no list of numbers"),
        (("--concurrency", ""), "at least one --concurrency or --rate"),
        (("--api-key-file", "/no/such/file"), "cannot read the API key"),
        (("--prompts", "/no/such.jsonl"), "there is no prompt file"),
    ],
)
def test_bad_words(words: tuple[str, ...], said_of_it: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=re.escape(said_of_it)):
        run(*words)


@pytest.fixture
def other_server() -> Iterator[str]:
    """Speaks HTTP/1.0 and hangs up at the end, as simple servers do; not ours by its own words."""

    class Other(Handler):
        def do_GET(self) -> None:
            self._answer(json.dumps({"data": [{"id": "theirs", "owned_by": "them"}]}).encode())

        def do_POST(self) -> None:
            request = self.body()
            assert "speculate" not in request and "return_metrics" not in request
            self._answer(text_event("hi") + LAST + event(b"[DONE]"))

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    with answering(Other) as url:
        yield url


@pytest.mark.usefixtures("undrawn")
def test_a_server_of_others_is_measured_as_it_is(other_server: str, tmp_path: Path) -> None:
    run("--url", other_server, *FAST, "--out", str(tmp_path))
    [closed, opened] = json.loads((tmp_path / "results.json").read_text())["results"]
    assert closed["speculate"] == opened["speculate"] == "as it is"
    assert closed["num_failed"] == 0 and closed["tokens_per_round"] is None
    with pytest.raises(ConfigError, match="knows nothing of --speculate"):
        run("--url", other_server, "--speculate", "off", *FAST)


@pytest.mark.nightly
@pytest.mark.usefixtures("undrawn")
def test_it_starts_and_ends_its_own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = tiny_model(tmp_path / "tiny")
    words = ("--drafter", "ngram", "--dtype", "float32", "--max-len", "256", "--limit", "2", "--speculate", "auto")
    run("--model", str(model), *words, *FAST, "--out", str(tmp_path / "run"))
    results = json.loads((tmp_path / "run" / "results.json").read_text())["results"]
    assert [each["speculate"] for each in results] == ["auto"] * 2
    assert all(each["num_failed"] == 0 for each in results)
    match = re.search(r"listening on http://127.0.0.1:(\d+)", (tmp_path / "run" / "server-auto.log").read_text())
    assert match and not servers._answers(f"http://127.0.0.1:{match.group(1)}/health")


STAND_IN = """#!{python} -I
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

if "--broken" in sys.argv:
    sys.exit("error: out of luck")
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(sys.argv[1:], f"listening on http://127.0.0.1:{{server.server_port}}, as a stand-in", flush=True)
server.serve_forever()
"""
"""Script used in place of `python`, and so of `python -m paceline serve`."""


def test_every_contender_has_a_server_and_all_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    with servers.started([("off", ("--speculate", "off")), ("auto", ("--threads", "1"))], tmp_path, SILENT) as urls:
        assert len({*urls}) == 2 and all(servers._answers(url + "/ready") for url in urls)
    assert not any(servers._answers(url + "/ready") for url in urls)
    for name, words in (("off", "'--speculate', 'off'"), ("auto", "'--threads', '1'")):
        log = (tmp_path / f"server-{name}.log").read_text()
        assert f"['-m', 'paceline', 'serve', '--port', '0', {words}]" in log
    broken = servers.started([("first", ()), ("second", ("--broken",))], tmp_path, SILENT)
    with pytest.raises(ConfigError, match="could not be started: out of luck"), broken:
        pass
    match = re.search(r"http://127.0.0.1:\d+", (tmp_path / "server-first.log").read_text())
    assert match and not servers._answers(match.group() + "/ready"), (
        "the others are ended with the one that could not be started"
    )


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a server could not be started: "):
        run("--model", str(tmp_path / "nothing"), *FAST, "--out", str(tmp_path / "run"))


def test_started_servers_understand_the_words() -> None:
    from inspect import signature

    from paceline.commands.serve import serve

    changed: dict[str, Any] = {
        "drafter": "ngram",
        "max_batch": 2,
        "max_len": 9,
        "kv_memory": 2**20,
        "dtype": "float32",
        "weights": "random",
    }
    words = words_of(EngineConfig(**changed))
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        f"--{k.replace('_', '-')}": str(v) for k, v in changed.items()
    }
    options = {
        "drafter",
        "max_batch",
        "max_len",
        "kv_memory",
        "dtype",
        "backend",
        "isa",
        "weight_format",
        "device",
        "threads",
        "weights",
    }
    assert options <= signature(serve).parameters.keys() & signature(bench_serving).parameters.keys()
    assert words_of(EngineConfig()) == ()
