"""`bench latency`: parts that add up, a delay that shows where it is, a drafter that shows where it helps."""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from command_lines import parse
from delaying_proxy import delaying
from doubles import ScriptedDrafter
from live_server import serving, talker
from loopback import Handler, answering
from server_words import LAST, event, stream, text_event
from small_llm import Talker, fake_llm

from paceline.bench.config import ArmsConfig, LatencyConfig
from paceline.bench.serving import latency_run
from paceline.bench.serving.latency import GROUPS, PARTS, SEGMENTS, TEXTS, LatencyBench, Measured, bar_of, measured
from paceline.bench.serving.load import Contender
from paceline.bench.serving.workloads import WORKLOADS, Workload, WorkloadRequest, named_workload, workload_of
from paceline.data.prompts import Prompt
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.model.target import ForwardBatch, ForwardOutput
from paceline.net.streaming import Client, Stream

OURS = {"return_timings": True, "return_metrics": True, "ignore_eos": True}
DELAY_S = 0.2
PASS_S = 0.015


def small_workload(number: int = 6, max_tokens: int = 24, rate: float | None = None) -> Workload:
    words = [f"question {at}" for at in range(number)]
    requests = [WorkloadRequest(Prompt(text, [{"role": "user", "content": text}], (text,), "words")) for text in words]
    return Workload("words", "a few words", requests, max_tokens, rate)


def arm(name: str, url: str, **fields: Any) -> Contender:
    return Contender(name, Client(url), {"model": "tiny"} | OURS | fields)


def run(arms: list[Contender], workload: Workload, **settings: Any) -> LatencyBench:
    with contextlib.ExitStack() as stack:
        for each in arms:
            stack.callback(each.client.close)
        bench = LatencyBench(
            [Contender(each.name, each.client, each.fields | {"model": model_of(each)}) for each in arms],
            [workload],
            LatencyConfig(**settings),
        )
        bench.run()
    return bench


def model_of(each: Contender) -> str:
    return json.loads(each.client.get("/v1/models").body)["data"][0]["id"]


@pytest.mark.slow
@pytest.mark.parametrize("rate", [None, 50.0])
def test_parts_add_up_to_what_the_client_saw(rate: float | None) -> None:
    """Also with requests that wait for one another, and of every single answer."""
    with serving(talker(PASS_S)) as live:
        bench = run([arm("it", live.url)], small_workload(rate=rate), repeat=1, turn=6)
    (result,) = bench.results()
    answers = bench.measured["words", "it"]
    assert (result.num_answers, result.num_failed, result.is_told) == (6, 0, True)
    for each in answers:
        assert each.error is None and set(each.parts) <= set(PARTS)
        assert sum(each.parts.values()) == pytest.approx(each.total_s)
    assert result.unattributed is not None and result.unattributed < 0.02
    assert statistics.median(abs(each.parts["unattributed"]) / each.total_s for each in answers) < 0.02
    high = result.bars["p90"]
    assert high["queue"] > 1.5 * high["verify"] if rate else high["queue"] < 0.1 * high["verify"]
    assert result.largest == "verify" or rate
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        near = sorted(each.total_s for each in answers)[round(share * 5)]
        assert sum(result.bars[name].values()) == pytest.approx(near, rel=0.25)


@pytest.mark.slow
def test_a_delay_on_the_way_shows_in_communication_alone() -> None:
    with serving(talker(PASS_S)) as live, delaying(live.port, DELAY_S) as url:
        bench = run([arm("near", live.url), arm("far", url)], small_workload(3, max_tokens=8), turn=2, repeat=1)
    near, far = bench.results()
    assert far.unattributed is not None and far.unattributed < 0.02
    assert far.largest in ("verify", "communication")
    pairs = {pair.part: pair for pair in bench.pairs()}
    assert set(pairs) == {"total", *GROUPS}
    assert pairs["communication"].difference_s == pytest.approx(2 * DELAY_S, abs=0.3 * DELAY_S)
    assert pairs["total"].difference_s == pytest.approx(2 * DELAY_S, abs=0.8 * DELAY_S)
    for part in ("host", "prefill", "decode"):
        assert abs(pairs[part].difference_s) < 0.5 * DELAY_S, part
    assert near.groups["communication"].p50 is not None and near.groups["communication"].p50 < 0.5 * DELAY_S


class Timed(Talker):
    """Its passes take PASS_S of a scripted clock, and nothing else takes any time."""

    def __init__(self) -> None:
        self.now_s = 1.0
        super().__init__(eos_bonus=-60.0, num_rows=2, max_len=256)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.now_s += PASS_S
        return super().forward(batch)


@pytest.mark.slow
def test_a_better_drafter_shows_in_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = Timed(), Timed()
    monkeypatch.setattr(time, "perf_counter", lambda: sum(target.now_s for target in targets))

    def drafting() -> Any:
        llm = fake_llm(targets[1])
        llm.engine = Engine(targets[1], llm.tokenizer, ScriptedDrafter(targets[1], 3, accuracy=1.0))
        return llm

    with serving(lambda: fake_llm(targets[0])) as plain, serving(drafting) as drafted:
        bench = run([arm("general", plain.url), arm("own", drafted.url)], small_workload(), repeat=1)
    pairs = {pair.part: pair for pair in bench.pairs()}
    interval = pairs["decode"].interval_s
    assert pairs["decode"].p50_s < 0.3 * pairs["decode"].against_p50_s, "a pass for four tokens, but for the last ones"
    assert interval[1] is not None and interval[1] < 0
    general, own = bench.results()
    assert own.tokens_per_round is not None and own.tokens_per_round > 3.5 and general.tokens_per_round == 1.0
    texts = [[each.text for each in bench.measured["words", name]] for name in ("general", "own")]
    assert texts[0] == texts[1]


def heard(timings: dict[str, float] | None, lossless: bool = True) -> Stream:
    """Sent at 10 s, first byte at 12 s, at an end at 14 s."""
    events = event({"choices": [], "timings": timings}) if timings else b""
    events += b"" if lossless else event({"choices": [], "lossless": False})
    whole = stream(text_event("a"), text_event("b"), LAST + events + event(b"[DONE]"))
    whole.connected_s, whole.written_s, whole.headers_s, whole.ended_s = 10.25, 10.5, 12.0, 14.0
    return whole


def test_clocks_are_joined_without_a_common_one() -> None:
    timings = {
        "queue_s": 0.5,
        "prefill_s": 0.25,
        "verify_s": 2.0,
        "send_s": 0.2,
        "other_s": 0.05,
        "first_byte_s": 1.0,
        "total_s": 3.0,
    }
    each = measured(heard(timings))
    assert each.total_s == 4.0 and each.is_told
    assert each.parts["connect"] == each.parts["send"] == 0.25 and each.parts["first_byte"] == 0.5
    assert (each.parts["queue"], each.parts["prefill"], each.parts["verify"], each.parts["sending"]) == (
        0.5,
        0.25,
        2.0,
        0.2,
    )
    assert each.parts["unattributed"] == pytest.approx(0.05)
    assert sum(each.parts.values()) == pytest.approx(4.0)
    early = measured(heard(timings | {"first_byte_s": 1.7, "total_s": 3.7, "queue_s": 1.2}))
    assert early.parts["first_byte"] == 0.0 and early.parts["send"] == pytest.approx(0.05)
    assert sum(early.parts.values()) == pytest.approx(4.0)


def test_servers_that_tell_less() -> None:
    other = measured(heard(None))
    assert not other.is_told and other.parts == {"connect": 0.25, "send": 0.25, "untold": 3.5}
    llama = measured(heard({"prompt_ms": 500.0, "predicted_ms": 2500.0, "predicted_n": 9}))
    assert llama.parts == {"connect": 0.25, "send": 0.25, "prefill": 0.5, "verify": 2.5, "untold": 0.5}
    assert measured(stream(b"oh no", status=500)).error


def test_mocked_answers_are_never_told_as_a_gain(tmp_path: Path) -> None:
    """`lossless: false` of any chunk goes into figures, table and verdict."""
    assert measured(heard(None)).lossless and not measured(heard(None, lossless=False)).lossless
    honest, mocked = (
        Measured(total_s=1.0, parts={"verify": x}, is_told=True, lossless=is_so)
        for x, is_so in ((1.0, True), (0.5, False))
    )
    bench = LatencyBench(
        [Contender(name, Client("http://127.0.0.1:1"), OURS) for name in ("none", "mock")],
        [small_workload()],
        LatencyConfig(),
    )
    for name, each in (("none", honest), ("mock", mocked)):
        bench.measured["words", name] += [each] * 4
    results, pairs = bench.results(), bench.pairs()
    assert [each.lossless for each in results] == [True, False] and not any(each.lossless for each in pairs)
    verdict = latency_run.verdict_on(results, pairs)
    assert "NOT LOSSLESS: words, mock" in verdict and "less time" not in verdict


class OtherServer(Handler):
    """Takes a schema as llama-cpp-python's server does, says nothing of its time, and closes connections."""

    refusal: ClassVar[int] = 422
    """The status of a schema that it cannot take; llama-cpp-python says 500."""
    forms: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self.answer(200, b'{"data": [{"id": "m", "owned_by": "me"}]}')

    def do_POST(self) -> None:
        body = self.body()
        self.forms.append(body["response_format"])
        if body["response_format"]["type"] == "json_schema":
            self.answer(self.refusal, b'{"error": {"message": "unknown type"}}')
        else:
            time.sleep(0.2)  # so that a busy machine's connecting does not take longer
            self.answer(200, text_event("yes") + LAST + event(b"[DONE]"))


@pytest.mark.slow
@pytest.mark.parametrize("refusal", [422, 500])
def test_another_server_is_asked_in_its_own_words_and_shown_as_one_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    monkeypatch.setattr(OtherServer, "refusal", refusal)
    monkeypatch.setattr(OtherServer, "forms", [])
    with answering(OtherServer) as url:
        arms = ArmsConfig(urls=(f"llama={url}",))
        line = latency_run.bench_latency(
            arms, LatencyConfig(repeat=1, rate=100.0), ("voice",), limit=3, out=tmp_path / "run"
        )
    assert [form["type"] for form in OtherServer.forms] == ["json_schema"] + 4 * ["json_object"]
    assert OtherServer.forms[-1]["schema"] == WORKLOADS["voice"]["schema"]
    (result,) = line["results"]
    assert result["num_failed"] == 0 and not result["is_told"] and result["largest"] == "server, not told apart"
    assert result["parts"].keys() == {"connect", "send", "untold"} and line["pairs"] == []
    report = (tmp_path / "run" / "report.md").read_text()
    assert "No server reported its timings" in report and "does not say where its time goes" in report


def test_a_bar_is_made_of_whole_answers() -> None:
    answers = [Measured(total_s=float(n), parts={"verify": 0.75 * n, "queue": 0.25 * n}) for n in range(1, 41)]
    for share, total in ((0.5, 20.5), (0.99, 39.0)):
        bar = bar_of(answers, share)
        assert list(bar) == list(SEGMENTS)
        assert bar["verify"] == 3 * bar["queue"] and sum(bar.values()) == pytest.approx(total, abs=0.6)
    assert set(bar_of([], 0.5).values()) == {0.0}


def test_every_part_and_segment_has_its_words() -> None:
    assert set(TEXTS["meanings"]) == set(PARTS) and set(TEXTS["remedies"]) == set(SEGMENTS)
    assert {segment for each in GROUPS.values() for segment in each} == set(SEGMENTS) - {
        "server, not told apart",
        "unattributed",
    }


def test_remedies_name_options_of_the_server() -> None:
    named = {option for each in TEXTS["remedies"].values() for option in re.findall(r"--([a-z-]+)", each)}
    assert "speculate" in named
    assert {option.replace("-", "_") for option in named} <= set(parse(["serve"]))


def test_tools_and_template_variables_of_a_row_are_sent(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    file = tmp_path / "rows.jsonl"
    row = {"prompt": "Call f.", "tools": [tool], "chat_template_kwargs": {"enable_thinking": False}}
    file.write_text(json.dumps(row) + "\n")
    workload = workload_of(file)
    bench = LatencyBench([], [workload], LatencyConfig())
    path, body = bench._request(arm("it", "http://127.0.0.1:9"), workload, 0, workload.requests[0])
    sent = json.loads(body)
    assert path == "/v1/chat/completions" and sent["tools"] == [tool]
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}


def test_turns_of_a_call_share_what_was_said_before() -> None:
    voice = named_workload("voice")
    assert voice.rate and voice.max_tokens == 60
    pairs = zip(voice.requests, voice.requests[1:], strict=False)
    shared = [pair for pair in pairs if len({each.prompt.id.split(".")[0] for each in pair}) == 1]
    assert len(shared) >= 6
    for one, next_one in shared:
        assert next_one.prompt.messages[: len(one.prompt.messages)] == one.prompt.messages
    for each in voice.requests:
        first, *_, last = each.prompt.messages
        assert each.schema and first == voice.requests[0].prompt.messages[0] and last["role"] == "user"
    for name in WORKLOADS:
        assert len(named_workload(name).requests) >= 8 and len(named_workload(name, 3).requests) == 3
    messages = [message for each in voice.requests for message in each.prompt.messages]
    said_before = [message["content"] for message in messages if message["role"] == "assistant"]
    for text in said_before:
        answer, form = json.loads(text), voice.requests[0].schema["properties"]  # pyright: ignore[reportOptionalSubscript]
        assert form["say"]["minLength"] <= len(answer["say"]) <= form["say"]["maxLength"]
        assert answer["wants"] in form["wants"]["enum"]


@pytest.mark.slow
def test_the_command_writes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters get servers of their own, which here run already; the schema is kept to; the page says what to do."""
    monkeypatch.delenv("PACELINE_API_KEY", raising=False)
    monkeypatch.setitem(WORKLOADS["voice"], "rate", 200.0)  # no caller is waited for
    seen: list[tuple[str, tuple[str, ...]]] = []
    prompts = tmp_path / "tickets.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"ticket {n}"}) for n in range(3)))
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["yes", "no"]}')
    with serving(talker(0.0, max_len=2048)) as live:

        @contextlib.contextmanager
        def started(named: Sequence[tuple[str, tuple[str, ...]]], *_: Any) -> Iterator[list[str]]:
            seen.extend(named)
            yield [live.url] * len(named)

        monkeypatch.setattr(latency_run, "started", started)
        arms = ArmsConfig(
            drafters=("default", "runs/own/drafter"), urls=(f"there={live.url}",), words=("--threads", "1")
        )
        line = latency_run.bench_latency(
            arms, LatencyConfig(repeat=1, max_tokens=9), ("voice",), (str(prompts),), schema, 2, tmp_path / "run"
        )
    assert seen == [
        ("default", ("--drafter", "default", "--threads", "1")),
        ("drafter", ("--drafter", "runs/own/drafter", "--threads", "1")),
    ]
    assert [(each["workload"], each["arm"]) for each in line["results"]] == [
        (workload, name) for workload in ("voice", "tickets") for name in ("default", "drafter", "there")
    ]
    assert {each["num_answers"] for each in line["results"]} == {2} and not any(
        each["num_failed"] for each in line["results"]
    )
    assert len(line["pairs"]) == 2 * 2 * (1 + len(GROUPS))
    report, page = ((tmp_path / "run" / name).read_text() for name in ("report.md", "report.html"))
    for text in (report, page):
        assert (
            "To make it less:" in text
            and "The parts add up to what the client saw" in text
            and "p50 / p90 / p99" in text
        )
    assert page.count("<svg") == 1 + 2
    logged = [json.loads(each) for each in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(logged) == 12 and all(statistics.fmean(each["parts"].values()) > 0 for each in logged)


@pytest.mark.slow
def test_what_cannot_be_measured_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no workload 'walk': choose from voice, coding, chat"):
        latency_run.bench_latency(ArmsConfig(urls=("http://127.0.0.1:1",)), LatencyConfig(), ("walk",))
    with pytest.raises(ConfigError, match="two workloads have one name"):
        latency_run.bench_latency(ArmsConfig(urls=("http://127.0.0.1:1",)), LatencyConfig(), ("voice", "voice"))
    with pytest.raises(ConfigError, match="schema goes with prompts"):
        latency_run.bench_latency(ArmsConfig(), LatencyConfig(), schema=tmp_path / "none.json")
    with pytest.raises(ConfigError, match="drafters and urls are named 'drafter': name each of them, as NAME=DRAFTER"):
        ArmsConfig(drafters=("a/drafter", "b/drafter"))
    with pytest.raises(ConfigError, match="either a rate or a concurrency"):
        LatencyConfig(rate=1.0, concurrency=2)
    assert ArmsConfig().named_drafters == [("none", "none"), ("default", "default")]
    with serving(talker()) as live, pytest.raises(ConfigError, match="cannot be asked for words: status 404"):
        LatencyBench(
            [Contender("it", Client(live.url), {"model": "another"} | OURS)], [small_workload()], LatencyConfig()
        ).run()
