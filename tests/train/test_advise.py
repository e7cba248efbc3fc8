"""`paceline advise`: decisions from a name alone, from traces and from a server's metrics; no weights anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import EngineConfig
from paceline.data.answers import Answer, AnswerShards
from paceline.errors import ConfigError
from paceline.simulate.config import AdviceConfig, CostsConfig
from paceline.train.config import AnswerConfig, PromptsConfig, TrainConfig
from paceline.train.plan.advise import CAUTION, Seen, advise, learned, seen_in_traces
from paceline.train.plan.expected_acceptance import Learned, expected_of
from paceline.train.plan.training_plan import ANSWER_SHARE, make_plan

ON = ["--model", "Qwen3.5-27B", "--hardware", "2x H100"]
METRICS = """vllm:num_requests_running 4.0
vllm:spec_decode_num_drafts_total 1000.0
vllm:spec_decode_num_draft_tokens_total 3000.0
vllm:spec_decode_num_accepted_tokens_total 1900.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 900.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 600.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 400.0
vllm:inter_token_latency_seconds_count 1000.0
vllm:inter_token_latency_seconds_sum 20.0
vllm:generation_tokens_total 2900.0
vllm:request_success_total 29.0
"""


def line(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["advise", *words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


@contextmanager
def serving(text: str, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def traces(folder: Path, drafted: list[int] | None, accepted: list[int] | None, number: int = 500) -> Path:
    rows = [{"answer_ids": [1] * 40, "drafted": drafted, "accepted": accepted}] * number
    ints = pa.list_(pa.int32())
    schema = pa.schema([("answer_ids", ints), ("drafted", ints), ("accepted", ints)])
    parquet.write_table(pa.Table.from_pylist(rows, schema), folder / "traces-1.parquet")
    return folder


@pytest.mark.slow
def test_a_name_alone_is_enough_for_a_decision() -> None:
    """The five-minute test: Qwen3.5-27B on 2x H100, 16 streams; a new process, which must not import torch."""
    program = (
        "import sys; from paceline.cli import app; app(sys.argv[1:], standalone_mode=False);"
        " assert 'torch' not in sys.modules; assert 'transformers' not in sys.modules"
    )
    words = ["advise", *ON, "--streams", "16"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("Train one: a drafter of your own, after 30,000 answers")
    assert "times the answers" in done.stdout and "2 x H100" in done.stdout


@pytest.mark.slow
def test_price_and_break_even_add_up() -> None:
    told = line(*ON, "--streams", "16", "--price-per-hour", "8", "--busy-hours", "12")
    chosen = told["chosen"]
    assert told["verdict"] == "train" and chosen["answers"] == 30_000
    assert chosen["cost"] == pytest.approx(chosen["hours"] * 8)
    assert chosen["saved_per_hour"] == pytest.approx(8 * (1 - 1 / chosen["gain"]))
    assert chosen["pays_back_days"] == pytest.approx(chosen["cost"] / chosen["saved_per_hour"] / 12)
    twice = line(*ON, "--streams", "16", "--price-per-hour", "8", "--train-on", "8x H100")["chosen"]
    assert twice["cost"] == pytest.approx(twice["hours"] * 32), "four times as many GPUs at the same price each"
    assert all(each["gain"] <= later["gain"] for each, later in zip(told["steps"], told["steps"][1:], strict=False))


@pytest.mark.slow
def test_several_gpus_are_compared_with_as_many_replicas() -> None:
    eight = line("--model", "Qwen3-8B", "--hardware", "8x H100", "--streams", "16")
    (told,) = [each for each in eight["basis"] if each.startswith("Replicas: a copy of the model on each of 8 GPUs")]
    one = line("--model", "Qwen3-8B", "--hardware", "H100", "--streams", "2")
    assert f"{8 * one['now']['plain_tokens_per_s']:,.0f} tokens/s" in told
    large = line("--model", "DeepSeek-V4-Pro", "--hardware", "8x B200", "--streams", "16")
    assert not [each for each in large["basis"] + one["basis"] if each.startswith("Replicas")]


@pytest.mark.slow
def test_people_read_a_currency_and_whole_days() -> None:
    done = CliRunner().invoke(app, ["advise", *ON, "--price-per-hour", "2.5"], catch_exceptions=False)
    assert "saves $ an hour" in done.output and "under a day" in done.output and "1 stream of" in done.output
    assert "It costs $" in done.stdout


@pytest.mark.slow
def test_where_speculation_brings_nothing_the_answer_is_no() -> None:
    told = line("--model", "DeepSeek-V4-Pro", "--hardware", "8x B200", "--streams", "8")
    assert told["verdict"] == "no" and told["sentences"][0].startswith("No:")


@pytest.mark.slow
def test_traces_tell_what_is_served_and_how_many_answers_there_are(tmp_path: Path) -> None:
    folder = traces(tmp_path, [3, 3, 0], [3, 0, 0])
    seen = seen_in_traces(folder)
    assert (seen.answers, seen.answer_tokens, seen.tokens_per_round) == (500, 40.0, 2.0)
    assert seen.acceptance and seen.acceptance.survival(3) == pytest.approx([0.5, 0.5, 0.5])
    told = line(str(folder), *ON)
    assert told["verdict"] == "collect" and "there are 500 answers" in told["sentences"][0]
    assert told["now"]["speedup"] > 1.2
    written = next(each for each in line(*ON, "--answer-tokens", "40")["steps"] if each["answers"] == 1000)
    read = next(each for each in told["steps"] if each["answers"] == 1000)
    assert read["hours"] < written["hours"], "answers that exist need not be written"


def test_traces_of_another_server_tell_no_rounds(tmp_path: Path) -> None:
    seen = seen_in_traces(traces(tmp_path, None, None))
    assert (seen.acceptance, seen.tokens_per_round, seen.answers) == (None, 1.0, 500)
    with pytest.raises(ConfigError, match="holds no traces"):
        seen_in_traces(tmp_path / "nowhere")


def test_answers_that_the_target_wrote_beforehand_are_counted(tmp_path: Path) -> None:
    AnswerShards(tmp_path).write([Answer(f"p{n}@0", "here", 0, 0.0, [65], [66] * 20, "length", "") for n in range(9)])
    seen = seen_in_traces(tmp_path)
    assert (seen.acceptance, seen.answers, seen.answer_tokens) == (
        None,
        9,
        20.0,
    ) and "no rounds recorded" in seen.source
    (tmp_path / "answers-r0-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="is no trace .*give traces of paceline serve or record"):
        seen_in_traces(tmp_path)


@pytest.mark.slow
def test_a_running_server_tells_it_too() -> None:
    with serving(METRICS) as url:
        told = line("--url", url, *ON)
    assert told["now"]["streams"] == 4
    assert told["now"]["tokens_per_round"] == pytest.approx(2.9)
    assert any("2.90 tokens a round since the start" in sentence for sentence in told["basis"])
    with serving("not found", 404) as url, pytest.raises(ConfigError, match="answered 404"):
        CliRunner().invoke(app, ["advise", "--url", url, *ON], catch_exceptions=False)
    with pytest.raises(ConfigError, match="is a server running there"):
        CliRunner().invoke(app, ["advise", "--url", "http://127.0.0.1:9", *ON], catch_exceptions=False)


class _Plan:
    """As much of a plan as `learned` looks at."""

    def __init__(self, target: str, blocks: float) -> None:
        self.expected = expected_of(target, Learned(blocks, None, 64.0))


def test_a_stand_in_asks_for_more_answers() -> None:
    own, other = _Plan("smollm2-135m", 192_000), _Plan("another", CAUTION * 192_000)
    assert learned(1, own, "mixed", 1.0) == learned(1, other, "mixed", 1.0)  # pyright: ignore[reportArgumentType]
    assert learned(300, own, "application", 1.7)[0] == 6.09  # pyright: ignore[reportArgumentType]
    assert learned(300 * CAUTION, other, "application", 1.7)[0] == 6.09  # pyright: ignore[reportArgumentType]
    assert learned(150, own, "application", 1.7)[0] == pytest.approx((1.7 + 6.09) / 2)  # pyright: ignore[reportArgumentType]
    assert learned(10**6, own, "application", 1.7) == (6.16, True)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_a_roofline_is_called_a_ceiling_until_one_rate_was_measured() -> None:
    costs = CostsConfig(model="Qwen3-8B", hardware="8x H100")
    guessed = advise(costs, AdviceConfig(), Seen())
    assert guessed.is_ceiling and guessed.sentences[0].endswith("(A ceiling: give --plain-rate, one measured rate.)")
    assert any("All rates are a ceiling" in sentence for sentence in guessed.sentences)
    assert "a guess: how many tokens a round was measured on smollm2-135m, not on Qwen3-8B" in " ".join(
        guessed.sentences
    )
    measured = advise(replace(costs, plain_rate=200.0), AdviceConfig(), Seen())
    assert not measured.is_ceiling and "eiling" not in " ".join(measured.sentences)


@pytest.mark.slow
def test_advice_and_plan_expect_the_same() -> None:
    found = advise(CostsConfig(model="smollm2-135m", hardware="H100"), AdviceConfig(), Seen())
    for step in found.steps[::3]:
        asked = PromptsConfig(self_written=step.answers)
        longest = round(256 / ANSWER_SHARE)
        config = TrainConfig(target=EngineConfig(), asked=asked, answering=AnswerConfig(max_tokens=longest))
        plan = make_plan(config, "H100")
        assert plan.expected is not None and plan.expected["tokens_per_round"] == step.tokens_per_round


def test_8000_answers_are_put_where_a_published_run_was() -> None:
    """SGLang's pull request 19952: 2.00 times plain decoding, one stream on 4 H100, from 8,000 examples."""
    costs = CostsConfig(model="Qwen3.5-27B", hardware="4x H100")
    found = advise(costs, AdviceConfig(streams=1, answers=8000), Seen())
    step = next(each for each in found.steps if each.answers == 8000)
    assert step.speedup == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--busy-hours", "25"], "--busy-hours must be at most 24"),
        (["--traffic", "other"], "--traffic"),
        (["--hardware", "0x H100"], "at least one machine"),
        (["--hardware", "2x H100", "--gpus", "4"], "two numbers"),
        (["traces", "--url", "http://x"], "leave one out"),
    ],
)
def test_impossible_questions(words: list[str], remedy: str) -> None:
    result = CliRunner().invoke(app, ["advise", "--model", "Qwen3.5-27B", *words])
    assert remedy in str(result.exception) + result.output
