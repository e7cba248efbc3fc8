"""Rounds and acceptance from the logs and metrics of vLLM, SGLang and paceline, and the overhead fitted to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.simulate.answer import predict_all
from paceline.simulate.config import CostsConfig, PredictConfig
from paceline.simulate.server_logs import is_server_text, parse_server, read_server
from paceline.simulate.speedup import chance_for, constant, parse_acceptance, tokens_per_round

ENGINE = (
    "(APIServer pid=1) INFO 09-04 11:01:16 [loggers.py:311] Engine {engine:03d}: Avg prompt throughput: {prompt} "
    "tokens/s, "
    "Avg generation throughput: {rate} tokens/s, Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 19.8%, "
    "Prefix cache hit rate: 0.0%"
)
DRAFTS = (
    "(APIServer pid=1) INFO 09-04 11:01:16 [metrics.py:125] SpecDecoding metrics: Mean acceptance length: {length}, "
    "Current speculative depth: 2, Accepted throughput: 6.46 tokens/s, Drafted throughput: 7.77 tokens/s, Accepted: "
    "{accepted} "
    "tokens, Drafted: 2000 tokens, Per-position acceptance rate: {places}, Avg Draft acceptance rate: 70.0%"
)
SGLANG = (
    "[2026-08-23 09:06:21 TP0] Decode batch, #running-req: {running}, #token: {tokens}, token usage: 0.02, {accept}"
    "cuda graph: True, gen throughput (token/s): {rate}, #queue-req: 0"
)
PREFILL = "[2026-08-23 09:06:22 TP0] Prefill batch, #new-seq: 1, #new-token: 8192, #cached-token: 0, #running-req: 4"


def engine(rate: float, running: int, prompt: float = 0.0, number: int = 0) -> str:
    return ENGINE.format(engine=number, prompt=prompt, rate=rate, running=running)


def vllm_log() -> str:
    return "\n".join(
        [
            "INFO starting",
            engine(300.0, 8, prompt=5000.0),
            engine(640.0, 8),
            DRAFTS.format(length="2.40", accepted=1400, places="0.800, 0.600"),
            engine(700.0, 5),
            DRAFTS.format(length="2.20", accepted=1200, places="0.750, 0.450"),
            engine(500.0, 5, prompt=900.0),
            engine(50.0, 1, number=1),
            engine(60.0, 1, number=1),
        ]
    )


def test_vllm_counts_only_steady_intervals_without_prompts() -> None:
    seen = parse_server(vllm_log())
    assert [(each.running, each.tokens_per_s, each.num_drafted) for each in seen.samples] == [
        (8, 640.0, 2),
        (1, 60.0, 0),
    ]
    assert seen.samples[0].round_s == pytest.approx(8 * 2.4 / 640)
    assert seen.server == "vLLM"
    assert seen.survival == pytest.approx((0.775, 0.525)), "both lines have 1,000 rounds"
    assert seen.tokens_per_round == pytest.approx(2.3)


def test_sglang_leaves_out_what_follows_a_prompt() -> None:
    accept = "accept len: 3.05, accept rate: 0.68, "
    lines = [
        SGLANG.format(running=4, tokens=8192, accept=accept, rate=100.0),
        SGLANG.format(running=4, tokens=8352, accept=accept, rate=400.0),
        PREFILL,
        SGLANG.format(running=4, tokens=8000, accept=accept, rate=90.0),
    ]
    (sample,) = parse_server("\n".join(lines)).samples
    assert (sample.running, sample.tokens_per_s, sample.num_drafted) == (4, 400.0, 3)
    assert sample.context == pytest.approx(2088)
    assert sample.round_s == pytest.approx(4 * 3.05 / 400)
    plain = parse_server("\n".join(SGLANG.format(running=6, tokens=42414, accept="", rate=1374.0) for _ in range(3)))
    assert plain.tokens_per_round is None and plain.samples[0].round_s == pytest.approx(6 / 1374)


METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 8.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 1000.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 3000.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1900.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 900.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 600.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 400.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.025",model_name="m"} 900.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 1000.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 20.0
vllm:generation_tokens_total{engine="0",model_name="m"} 2900.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 30.0
vllm:broken NaN
"""


def test_metrics_of_vllm_and_paceline() -> None:
    seen = parse_server(METRICS)
    assert (seen.server, seen.survival, seen.tokens_per_round) == ("vLLM", (0.9, 0.6, 0.4), 2.9)
    assert seen.samples[0].round_s == pytest.approx(0.02), "vLLM observes the time between chunks, one a round"
    assert (seen.samples[0].num_drafted, seen.tokens, seen.answers) == (3, 2900, 30)
    assert parse_server(METRICS + "paceline:rounds_total 1000.0\n").server == "paceline"


RANKS = """sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 3.0
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="1"} 3.0
sglang:spec_accept_length{engine_type="draft",model_name="m",tp_rank="0"} 2.7
sglang:spec_accept_length{engine_type="unified",model_name="m",tp_rank="0"} 3.2
sglang:spec_accept_length{engine_type="unified",model_name="m",tp_rank="1"} 3.2
sglang:inter_token_latency_seconds_sum{engine_type="unified",model_name="m",tp_rank="0"} 5.0
sglang:inter_token_latency_seconds_count{engine_type="unified",model_name="m",tp_rank="0"} 1000.0
"""


def test_ranks_of_one_engine_count_once_and_a_draft_engine_not() -> None:
    seen = parse_server(RANKS)
    assert seen.tokens_per_round == 3.2 and seen.samples[0].running == 3
    two = RANKS.replace('model_name="m"', 'model_name="m",dp_rank="1"') + RANKS.replace(
        'model_name="m"', 'model_name="m",dp_rank="0"'
    )
    assert parse_server(two).samples[0].running == 6 and parse_server(two).tokens_per_round == 3.2
    engines = METRICS + METRICS.replace('engine="0"', 'engine="1"')
    assert (parse_server(engines).tokens, parse_server(engines).tokens_per_round) == (5800, 2.9), "engines are added up"


def test_of_several_models_one_must_be_named(tmp_path: Path) -> None:
    """An adapter's rounds without accepted drafts would make the model's drafter look bad."""
    adapter = METRICS.replace('model_name="m"', 'model_name="adapter"').replace(" 1900.0", " 0.0")
    page = tmp_path / "page.txt"
    page.write_text(METRICS + adapter)
    with pytest.raises(ConfigError, match=r"several models, adapter, m: name one of them \(FILE:MODEL"):
        read_server(page)
    assert read_server(tmp_path / "page.txt:m").tokens_per_round == 2.9
    assert parse_acceptance(f"{page}:m") == parse_acceptance("survival:.9,.6,.4")
    with pytest.raises(ConfigError, match="no model 'x', only adapter, m"):
        read_server(tmp_path / "page.txt:x")


def test_metrics_of_llama_cpp() -> None:
    text = """llamacpp:tokens_predicted_total 3500
llamacpp:spec_decode_num_drafts 1000
llamacpp:spec_decode_num_draft_tokens 4000
llamacpp:spec_decode_num_accepted_tokens 2500
"""
    assert is_server_text(text)
    seen = parse_server(text)
    assert (seen.server, seen.tokens_per_round, seen.tokens) == ("llama.cpp", 3.5, 3500)


def test_metrics_of_sglang_are_by_token() -> None:
    text = """sglang:num_running_reqs{model_name="m"} 4.0
sglang:spec_accept_length{model_name="m"} 3.0
sglang:inter_token_latency_seconds_sum{model_name="m"} 5.0
sglang:inter_token_latency_seconds_count{model_name="m"} 1000.0
"""
    seen = parse_server(text)
    assert seen.server == "SGLang"
    assert seen.samples[0].round_s == pytest.approx(0.015)


def test_sglang_s_counter_of_rounds_comes_before_its_gauge() -> None:
    """The gauge tells of the last seconds, and of nothing while the server is idle."""
    text = """sglang:generation_tokens_total{is_streaming="true",model_name="m"} 2010.0
sglang:generation_tokens_total{is_streaming="false",model_name="m"} 1020.0
sglang:num_requests_total{is_streaming="true",model_name="m"} 10.0
sglang:num_requests_total{is_streaming="false",model_name="m"} 20.0
sglang:spec_accept_length{model_name="m",tp_rank="0"} 9.1
"""
    assert parse_server(text).tokens_per_round == 9.1
    counted = text + 'sglang:spec_verify_calls_total{model_name="m"} 1000.0\n'
    seen = parse_server(counted)
    assert (seen.tokens_per_round, seen.tokens, seen.answers) == (3.0, 3030, 30), "each answer's first token needs none"
    assert parse_server(counted.replace(" 9.1", " 0.0")).tokens_per_round == 3.0


def test_an_overhead_is_fitted_to_the_rounds(tmp_path: Path) -> None:
    on = {"model": "Qwen3.5-27B", "hardware": "B200"}
    load = PredictConfig(acceptance="0.8,0.75", max_draft=2, batch=(8,))
    truth = predict_all(CostsConfig(**on, overhead_ms=5.0), load)
    plain = truth.predictions[0].plain_tokens_per_s
    assert plain
    file = tmp_path / "vllm.log"
    file.write_text("\n".join(engine(round(plain, 1), 8) for _ in range(4)))
    prediction = predict_all(CostsConfig(**on, server_log=file), load)
    assert prediction.as_json()["overhead"]["ms"] == pytest.approx(5.0, rel=0.01)
    assert "3 intervals of vllm.log" in prediction.as_json()["overhead"]["source"]
    assert prediction.predictions[0].speedup == pytest.approx(truth.predictions[0].speedup, rel=0.01)
    file.write_text("\n".join(engine(20 * plain, 8) for _ in range(4)))
    with pytest.raises(ConfigError, match="without any overhead"):
        predict_all(CostsConfig(**on, server_log=file), load)


def test_acceptance_from_a_log(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text(vllm_log())
    assert parse_acceptance(str(file)).survival(2) == pytest.approx([0.775, 0.525])
    accept = "accept len: 3.05, accept rate: 0.68, "
    file.write_text("\n".join(SGLANG.format(running=4, tokens=8192, accept=accept, rate=400.0) for _ in range(2)))
    assert tokens_per_round(parse_acceptance(str(file)), 3) == pytest.approx(3.05)
    file.write_text("\n".join(engine(60.0, 1) for _ in range(3)))
    with pytest.raises(ConfigError, match="drafted nothing"):
        parse_acceptance(str(file))


@pytest.mark.parametrize("text", ["", "nothing here", engine(60.0, 1), "vllm:num_requests_running 0\n", "Decode batch"])
def test_what_tells_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"give|take them"):
        parse_server(text)


@pytest.mark.parametrize("expected", [1.0, 1.8, 3.2, 7.9, 8.0])
def test_a_chance_for_tokens_a_round(expected: float) -> None:
    assert tokens_per_round(constant(chance_for(expected, 7)), 7) == pytest.approx(expected)
    with pytest.raises(ConfigError, match="between 1 and 8"):
        chance_for(8.1, 7)
