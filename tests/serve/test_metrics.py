"""Metrics: after a scripted run they say what was counted by hand; a scrape parses; a step costs microseconds."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from call_counts import num_calls
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter
from prometheus_client.parser import text_string_to_metric_families
from small_llm import Parrot

from paceline.engine.engine import Engine
from paceline.model.target import ForwardBatch, ForwardOutput
from paceline.plan.planner import FixedPlanner, Plan
from paceline.plan.routes import Router
from paceline.serve.admin.metrics import Metrics
from paceline.types import RoundStats, Route, SamplingParams, Sequence

DASHBOARD = Path(__file__).parent.parent.parent / "docs" / "grafana.json"


class Timed:
    """The worker's part: steps an engine, reports to the metrics in the order a worker does."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self.engine, self.metrics = engine, metrics
        self.spent_s = 0.0
        self.done: list[Sequence] = []

    def step(self) -> None:
        started = time.perf_counter()
        chunks = self.engine.step()
        now = time.perf_counter()
        self.spent_s += now - started
        self.metrics.step(self.engine, now - started)
        for chunk in chunks:
            self.metrics.chunk(chunk.sequence, len(chunk.token_ids), now)
            if chunk.finish_reason:
                self.done.append(chunk.sequence)
                self.metrics.finished(chunk.sequence, chunk.finish_reason, "tag")

    def run(self) -> None:
        while self.engine.has_work:
            self.step()


def scripted(accuracy: float = 1.0, **options: Any) -> Timed:
    target = FakeTarget(vocab_size=258, **options)
    drafter = ScriptedDrafter(target, 3, accuracy=accuracy)
    return Timed(Engine(target, ByteTokenizer(), drafter, prefill_chunk=8), Metrics("tiny"))


def scrape(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name, values of labels but the model) -> value."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            if not sample.name.startswith("process_"):
                assert sample.labels.pop("model_name") == "tiny", sample
            values[sample.name, tuple(sample.labels.values())] = sample.value
    return values


def test_right_drafts_by_hand() -> None:
    """13 tokens: one of the prefill, then three rounds of three drafts and a token of the target's own."""
    timed = scripted()
    timed.engine.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=13))
    timed.run()
    seen = scrape(timed.metrics)
    expected = {
        "vllm:prompt_tokens_total": 5, "vllm:generation_tokens_total": 13, "vllm:prefix_cache_queries_total": 5,
        "vllm:prefix_cache_hits_total": 0, "vllm:spec_decode_num_drafts_total": 3,
        "vllm:spec_decode_num_draft_tokens_total": 9, "vllm:spec_decode_num_accepted_tokens_total": 9,
        "vllm:time_to_first_token_seconds_count": 1, "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 3, "vllm:request_time_per_output_token_seconds_count": 1,
        "vllm:num_requests_running": 0, "vllm:num_requests_waiting": 0, "vllm:kv_cache_usage_perc": 0,
        "paceline:rounds_total": 3, "paceline:steps_total": 4, "paceline:tokens_per_round_sum": 12,
        "paceline:tokens_per_round_count": 3, "paceline:draft_width_sum": 9, "paceline:worker_restarts_total": 0,
    }  # fmt: skip
    assert {name: seen[name, ()] for name in expected} == expected
    assert [seen["vllm:spec_decode_num_accepted_tokens_per_pos_total", (str(place),)] for place in range(4)] == [
        3,
        3,
        3,
        0,
    ]
    assert seen["paceline:draft_width_bucket", ("2.0",)] == 0 and seen["paceline:draft_width_bucket", ("3.0",)] == 3
    assert (
        seen["paceline:tokens_per_round_bucket", ("3.0",)] == 0
        and seen["paceline:tokens_per_round_bucket", ("4.0",)] == 3
    )
    counts = {key: count for key, (count, _) in timed.metrics.step_times.items()}
    assert counts == {("step", 1): 4, ("prefill", 5): 1, ("verify", 4): 3, ("draft", 3): 3}
    reasons = {key[1][0]: value for key, value in seen.items() if key[0] == "vllm:request_success_total"}
    assert reasons == {"stop": 0, "length": 1, "abort": 0, "error": 0}


@pytest.mark.slow
@pytest.mark.parametrize("accuracy", [0.0, 0.6])
def test_a_batch_agrees_with_its_sequences(accuracy: float) -> None:
    timed = scripted(accuracy, num_rows=3)
    for number in range(8):
        timed.engine.add([number + 1] * (3 + 5 * number), SamplingParams(max_tokens=1 + 4 * number))
    timed.run()
    seen, done = scrape(timed.metrics), timed.done
    pairs = [pair[:2] for seq in done for pair in seq.rounds]
    assert seen["vllm:prompt_tokens_total", ()] == sum(3 + 5 * number for number in range(8))
    assert seen["vllm:generation_tokens_total", ()] == sum(1 + 4 * number for number in range(8))
    assert seen["vllm:spec_decode_num_drafts_total", ()] == sum(drafted > 0 for drafted, _ in pairs)
    assert seen["vllm:spec_decode_num_draft_tokens_total", ()] == sum(drafted for drafted, _ in pairs)
    assert seen["vllm:spec_decode_num_accepted_tokens_total", ()] == sum(accepted for _, accepted in pairs)
    for place in range(3):
        count = sum(accepted > place for _, accepted in pairs)
        assert seen["vllm:spec_decode_num_accepted_tokens_per_pos_total", (str(place),)] == count
    assert seen["paceline:draft_width_count", ()] == seen["paceline:tokens_per_round_count", ()] == len(pairs)
    assert seen["paceline:draft_width_bucket", ("0.0",)] == sum(drafted == 0 for drafted, _ in pairs)
    assert seen["vllm:request_time_per_output_token_seconds_count", ()] == 7, "an answer of one token has none"


def test_every_second_of_a_step_is_somewhere() -> None:
    timed = scripted(0.5)
    for number in range(6):
        timed.engine.add([number + 1] * (20 if number % 2 else 3), SamplingParams(max_tokens=1 + 6 * (number % 3)))
    timed.run()
    seen = scrape(timed.metrics)
    parts = {name: seen[f"paceline:{name}_seconds_total", ()] for name in ("prefill", "draft", "verify", "host")}
    assert all(value > 0 for value in parts.values()), parts
    assert sum(parts.values()) == pytest.approx(timed.spent_s)
    assert parts["prefill"] == pytest.approx(sum(seq.timings.prefill_s for seq in timed.done))
    by_kind = dict.fromkeys(("prefill", "draft", "verify", "step"), 0.0)
    for (kind, _), (_, seconds) in timed.metrics.step_times.items():
        by_kind[kind] += seconds
    assert by_kind.pop("step") == pytest.approx(timed.spent_s)
    assert by_kind["prefill"] == pytest.approx(parts["prefill"]) and by_kind["verify"] == pytest.approx(parts["verify"])
    assert 0.9 * parts["draft"] < by_kind["draft"] <= parts["draft"], "rounds that drafted nothing are not counted"


def test_drafts_that_were_looked_up_take_the_hosts_time() -> None:
    """A drafter with confidences: all drafted tokens count, also where none was verified."""
    metrics = Metrics("tiny")
    engine: Any = SimpleNamespace(rounds=[], read=(0, 0.0))
    stats = RoundStats([2, 0, 3], [1, 0, 0], True, 0.002, 0.01, 0.001, ["ngram", "none", "ngram"], [2, 0, 3])
    engine.rounds = [stats]
    metrics.step(engine, 0.02)
    assert metrics.step_times == {("step", 1): (1, 0.02), ("verify", 8): (1, 0.01)}
    engine.rounds = [replace(stats, source_B=["dflash", "none", "ngram"], confidence_B=[[-0.1] * 4, [-3.0] * 3, None])]
    metrics.step(engine, 0.02)
    assert metrics.step_times["draft", 8] == (1, 0.002) and metrics.step_times["verify", 8] == (2, 0.02)


def test_prefill_of_a_prompt_under_way_and_of_one_broken_off() -> None:
    timed = scripted()
    request = timed.engine.add([1] * 40, SamplingParams(max_tokens=2))
    timed.step()
    timed.step()
    seq = timed.engine.scheduler.prefilling[0]
    first = scrape(timed.metrics)
    assert first["paceline:prefill_seconds_total", ()] == pytest.approx(seq.timings.prefill_s)
    assert first["vllm:num_requests_running", ()] == 1 and first["vllm:time_to_first_token_seconds_count", ()] == 0
    assert first["vllm:kv_cache_usage_perc", ()] == pytest.approx(16 / (4 * 512))
    assert timed.engine.abort(request) is seq
    timed.metrics.finished(seq, "abort")
    second = scrape(timed.metrics)
    assert second["paceline:prefill_seconds_total", ()] == first["paceline:prefill_seconds_total", ()]
    assert second["vllm:num_requests_running", ()] == 0 and second["vllm:kv_cache_usage_perc", ()] == 0
    assert second["vllm:request_success_total", ("abort",)] == 1
    assert second["vllm:e2e_request_latency_seconds_count", ()] == 0, "an answer broken off says nothing of latency"


def test_waiting_requests_and_reused_prompts() -> None:
    timed = scripted(num_rows=1, is_width_invariant=True)
    for _ in range(3):
        timed.engine.add([7] * 30, SamplingParams(max_tokens=2))
    timed.step()
    seen = scrape(timed.metrics)
    assert (seen["vllm:num_requests_running", ()], seen["vllm:num_requests_waiting", ()]) == (1, 2)
    timed.run()
    seen = scrape(timed.metrics)
    assert seen["vllm:prefix_cache_queries_total", ()] == 90
    assert seen["vllm:prefix_cache_hits_total", ()] == sum(seq.num_reused for seq in timed.done) == 58


def test_times_between_chunks() -> None:
    """The first token and the round behind it are one chunk to a client; after that one gap a chunk, as vLLM counts."""
    metrics, seq = Metrics("tiny"), Sequence(0, [1, 2, 3], 2, SamplingParams())
    seq.timings.arrival_s = 100.0
    metrics.chunk(seq, 1, 100.3)
    metrics.chunk(seq, 4, 100.3)
    metrics.chunk(seq, 2, 100.33)
    metrics.chunk(seq, 1, 100.35)
    seen = scrape(metrics)
    assert seen["vllm:time_to_first_token_seconds_sum", ()] == pytest.approx(0.3)
    assert seen["vllm:time_to_first_token_seconds_bucket", ("0.25",)] == 0
    assert seen["vllm:time_to_first_token_seconds_bucket", ("0.5",)] == 1
    assert seen["vllm:inter_token_latency_seconds_count", ()] == 2
    assert seen["vllm:inter_token_latency_seconds_sum", ()] == pytest.approx(0.05)
    assert seen["vllm:generation_tokens_total", ()] == 8


def test_refusals_crashes_and_traces() -> None:
    offered: list[Any] = []
    metrics = Metrics(
        "tiny",
        cast(
            Any, SimpleNamespace(written=5, dropped={"queue": 2, "disk": 0}, offer=lambda *ended: offered.append(ended))
        ),
    )
    metrics.refused("queue_full")
    metrics.refused("queue_full")
    metrics.refused("body_size")
    timed = Timed(scripted().engine, metrics)
    timed.engine.add([1, 2], SamplingParams(max_tokens=9))
    timed.step()
    seq = timed.engine.scheduler.running[0]
    metrics.finished(seq, "error", "tag")
    metrics.crashed()
    assert offered == [(seq, "error", "tag")]
    seen = scrape(metrics)
    assert seen["paceline:refused_total", ("queue_full",)] == 2 and seen["paceline:refused_total", ("body_size",)] == 1
    assert seen["paceline:worker_restarts_total", ()] == 1 and seen["vllm:request_success_total", ("error",)] == 1
    assert seen["vllm:num_requests_running", ()] == 0, "the engine that failed is forgotten"
    assert seen["paceline:traces_written_total", ()] == 5
    assert (
        seen["paceline:traces_dropped_total", ("queue",)] == 2 and seen["paceline:traces_dropped_total", ("disk",)] == 0
    )


def test_names_with_quotes_and_wide_drafts_are_exported() -> None:
    metrics = Metrics('a "model"\\\n')
    metrics.rounds[40, 30] = 2
    families = {family.name: family for family in text_string_to_metric_families(metrics.render()[0].decode())}
    places = {
        sample.labels["position"]: sample.value
        for sample in families["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
        if sample.labels["model_name"] == 'a "model"\\\n'
    }
    assert len(places) == 40 and places["29"] == 2 and places["30"] == 0
    widths = [sample for sample in families["paceline:draft_width"].samples if sample.name.endswith("_bucket")]
    assert [sample.value for sample in widths] == [0] * 17 + [2]


def test_nothing_is_kept_of_requests_that_ended() -> None:
    timed = scripted(0.5, num_rows=2)
    for number in range(6):
        timed.engine.add([number + 1] * 12, SamplingParams(max_tokens=5))
    timed.run()
    assert not timed.metrics._open


def test_a_step_of_sixteen_requests_costs_a_few_calls_for_each() -> None:
    """Python's and C's functions, whose number is the same on every machine; on one of 2026 a step took 60 us."""
    metrics = Metrics("tiny")
    sequences = [Sequence(number, [1, 2], 1, SamplingParams()) for number in range(16)]
    stats = RoundStats([7] * 16, [number % 8 for number in range(16)], True, 1e-4, 1e-3, 1e-5)
    engine: Any = SimpleNamespace(rounds=[stats], read=(0, 0.0))

    def step(now: float) -> None:
        metrics.step(engine, 2e-3)
        for seq in sequences:
            metrics.chunk(seq, 2, now)

    step(1.0)
    assert num_calls(lambda: step(2.0)) < 200


class _Priced(FixedPlanner):
    """Charges each round the same, so that the router counts its tokens."""

    def price(self, plan: Plan, index: int, num_checked: int, num_alike: int) -> float:
        return 1.0


def test_drafts_behind_a_stop_string_are_counted_nowhere() -> None:
    """Two rounds of four drafts: bcde and f, then ghij and k, of which the answer ends with the h."""
    target, router = Parrot("?", list(b"abcdefghijklmnopqrstuvwxyz")), Router()
    drafters = {name: ScriptedDrafter(target, 4) for name in ("this", "that")}
    timed = Timed(Engine(target, ByteTokenizer(), drafters, router=router, planner=_Priced(16)), Metrics("tiny"))
    timed.engine.add([ord("?")], SamplingParams(max_tokens=20, stop="h"), route=Route())
    timed.run()
    seen, (seq,) = scrape(timed.metrics), timed.done
    assert bytes(seq.output_ids) == b"abcdefgh" and [each.num_accepted for each in seq.rounds] == [4, 1]
    assert seen["vllm:generation_tokens_total", ()] == 8
    assert seen["vllm:spec_decode_num_draft_tokens_total", ()] == 8
    assert seen["vllm:spec_decode_num_accepted_tokens_total", ()] == 5
    assert seen["paceline:drafter_tokens_total", (seq.drafter,)] == 7  # all but the prefill's
    assert router.clusters[seq.cluster].arms[seq.drafter].reward.over == 7


def exported() -> set[str]:
    """Metrics of a server with two drafters that has answered a request."""
    target = FakeTarget(vocab_size=258)
    drafters = {name: ScriptedDrafter(target, 3) for name in "ab"}
    metrics = Metrics("tiny", cast(Any, SimpleNamespace(written=0, dropped={"queue": 0}, offer=lambda *_: None)))
    timed = Timed(Engine(target, ByteTokenizer(), drafters, router=Router()), metrics)
    timed.engine.add([1, 2, 3], SamplingParams(max_tokens=9), route=Route())
    timed.run()
    metrics.refused("queue_full")
    return {name for name, _ in scrape(metrics)}


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads(DASHBOARD.read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_the_dashboard_shows_what_is_exported_and_all_of_it() -> None:
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]]
    shown = {name for expr in expressions for name in re.findall(r"\b(?:vllm:|paceline:|process_)\w+", expr)}
    assert shown <= exported()
    stem = re.compile(r"_(bucket|sum|count)$")
    ours = {stem.sub("", name) for name in exported() if name.startswith(("vllm:", "paceline:"))}
    assert ours - {stem.sub("", name) for name in shown} == set()


def test_the_dashboard_can_be_imported() -> None:
    """Grafana 10's requirements of a dashboard: a schema, unique panel ids, places in its grid that do not overlap."""
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["schemaVersion"] >= 38 and dashboard["id"] is None and dashboard["uid"] and dashboard["title"]
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "model"}
    every = dashboard["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in every:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["title"] and panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all(target["expr"].count("(") == target["expr"].count(")") for target in panel["targets"])


@pytest.mark.slow
def test_a_scrape_while_the_engine_steps() -> None:
    """Scrapes come from another thread."""
    import threading

    timed, failures = scripted(0.5), []

    def scraping() -> None:
        try:
            while not done.is_set():
                scrape(timed.metrics)
        except Exception as error:  # noqa: BLE001  (whatever it is, the test shows it)
            failures.append(error)

    done = threading.Event()
    thread = threading.Thread(target=scraping)
    thread.start()
    for number in range(30):
        timed.engine.add([number + 1] * 5, SamplingParams(max_tokens=20))
    timed.run()
    done.set()
    thread.join()
    assert not failures


class Failing(FakeTarget):
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        raise RuntimeError


def test_a_failed_step_leaves_the_metrics_whole() -> None:
    metrics = Metrics("tiny")
    engine = Engine(Failing(vocab_size=258), ByteTokenizer())
    engine.add([1], SamplingParams())
    with pytest.raises(RuntimeError):
        engine.step()
    for seq in (*engine.scheduler.waiting, *engine.scheduler.prefilling):
        metrics.finished(seq, "error")
    metrics.crashed()
    assert scrape(metrics)["vllm:request_success_total", ("error",)] == 1
