"""`paceline advise`: decisions from a name alone, from traces and from a server's metrics; no weights anywhere."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from loopback import Handler, answering
from pyarrow import parquet
from typer.testing import CliRunner

from paceline.cli import app
from paceline.data.answers import Answer, AnswerShards
from paceline.errors import ConfigError
from paceline.simulate.answer import Setup
from paceline.simulate.config import AdviceConfig, CostsConfig
from paceline.simulate.costs.rounds import ToyCosts
from paceline.simulate.server_logs import parse_server
from paceline.simulate.speedup import constant
from paceline.train.plan.advise import _device, advise
from paceline.train.plan.current_traffic import Seen, seen_in_server, seen_in_traces, with_server
from paceline.train.plan.customers import HORIZON_DAYS
from paceline.train.plan.expected_acceptance import EPOCHS, Learned, expected_of

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
    class Metrics(Handler):
        def do_GET(self) -> None:
            self.answer(status, text.encode())

    with answering(Metrics) as url:
        yield url


def traces(
    folder: Path, drafted: list[int] | None, accepted: list[int] | None, number: int = 500, tag: str | None = None
) -> Path:
    rows = [{"answer_ids": [1] * 40, "drafted": drafted, "accepted": accepted, "tag": tag}] * number
    ints = pa.list_(pa.int32())
    schema = pa.schema([("answer_ids", ints), ("drafted", ints), ("accepted", ints), ("tag", pa.string())])
    parquet.write_table(pa.Table.from_pylist(rows, schema), folder / f"traces-{tag}.parquet")
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
    first, *others = done.stdout.splitlines()
    assert re.match(r"Train one: \d\.\d\dx \[\d\.\d\d, \d+\.\d\d\] the speed of what is served now", first)
    assert "2 x H100" in done.stdout and any("published trainings" in line for line in others)


@pytest.mark.slow
def test_price_and_break_even_add_up() -> None:
    advice = line(*ON, "--streams", "16", "--price-per-hour", "8", "--busy-hours", "12")
    chosen = advice["chosen"]
    assert advice["verdict"] == "train"
    assert chosen["cost"] == pytest.approx(chosen["hours"] * 8)
    assert chosen["saved_per_hour"] == pytest.approx(8 * (1 - 1 / chosen["gain"]))
    assert chosen["pays_back_days"] == pytest.approx(chosen["cost"] / chosen["saved_per_hour"] / 12)
    twice = line(*ON, "--streams", "16", "--price-per-hour", "8", "--train-on", "8x H100")["chosen"]
    assert twice["cost"] == pytest.approx(twice["hours"] * 32), "four times as many GPUs at the same price each"
    assert all(each["gain"] <= later["gain"] for each, later in zip(advice["steps"], advice["steps"][1:], strict=False))


@pytest.mark.slow
def test_several_gpus_are_compared_with_as_many_replicas() -> None:
    eight = line("--model", "Qwen3-8B", "--hardware", "8x H100", "--streams", "16")
    (sentence,) = [
        each for each in eight["basis"] if each.startswith("Replicas: a copy of the model on each of 8 GPUs")
    ]
    one = line("--model", "Qwen3-8B", "--hardware", "H100", "--streams", "2")
    assert f"{8 * one['now']['plain_tokens_per_s']:,.0f} tokens/s" in sentence
    large = line("--model", "DeepSeek-V4-Pro", "--hardware", "8x B200", "--streams", "16")
    assert not [each for each in large["basis"] + one["basis"] if each.startswith("Replicas")]


@pytest.mark.slow
def test_people_read_a_currency_and_hours() -> None:
    done = CliRunner().invoke(app, ["advise", *ON, "--price-per-hour", "2.5"], catch_exceptions=False)
    assert "It costs $" in done.stdout and "break-even after" in done.stdout and "1 stream" in done.stdout


@pytest.mark.slow
def test_where_a_server_drafts_better_already_the_answer_is_no(tmp_path: Path) -> None:
    advice = line(str(traces(tmp_path, [7] * 5, [7] * 5)), *ON)
    assert advice["verdict"] == "no" and advice["sentences"][0].startswith("No:")
    assert all(step["gain"] < 1.1 for step in advice["steps"]), "less than 10% more is not worth a training"


@pytest.mark.slow
def test_traces_tell_what_is_served_and_how_many_answers_there_are(tmp_path: Path) -> None:
    folder = traces(tmp_path, [3, 3, 0], [3, 0, 0])
    seen = seen_in_traces(folder)
    assert (seen.answers, seen.answer_tokens, seen.tokens_per_round) == (500, 40.0, 2.0)
    assert seen.acceptance and seen.acceptance.survival(3) == pytest.approx([0.5, 0.5, 0.5])
    advice = line(str(folder), *ON)
    assert advice["verdict"] == "collect" and "there are 500 answers" in advice["sentences"][0]
    assert advice["now"]["speedup"] > 1.2
    written = next(each for each in line(*ON, "--answer-tokens", "40")["steps"] if each["answers"] == 1000)
    read = next(each for each in advice["steps"] if each["answers"] == 1000)
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
    ) and "no rounds" in seen.source
    (tmp_path / "answers-r0-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="is no trace .*give traces of paceline serve or record"):
        seen_in_traces(tmp_path)


@pytest.mark.slow
def test_a_running_server_tells_it_too() -> None:
    with serving(METRICS) as url:
        advice = line("--url", url, *ON)
    assert advice["now"]["streams"] == 4
    assert advice["now"]["tokens_per_round"] == pytest.approx(2.9)
    assert any("acceptance length 2.90 since the start" in sentence for sentence in advice["basis"])
    with serving("not found", 404) as url, pytest.raises(ConfigError, match="answered 404"):
        CliRunner().invoke(app, ["advise", "--url", url, *ON], catch_exceptions=False)
    with pytest.raises(ConfigError, match="is a server running there"):
        CliRunner().invoke(app, ["advise", "--url", "http://127.0.0.1:9", *ON], catch_exceptions=False)


@pytest.mark.slow
def test_traces_and_a_server_that_drafts_already_are_read_together(tmp_path: Path) -> None:
    """vLLM's traces have no rounds; its counters know that it drafts. The advice compares with that."""
    folder = traces(tmp_path, None, None, number=9000)
    with serving(METRICS) as url:
        advice = line(str(folder), "--url", url, *ON)
        alone = line("--url", url, *ON)
    plain = line(str(folder), *ON)
    assert advice["now"] == alone["now"] and advice["now"]["speedup"] > 1.2 and advice["now"]["streams"] == 4
    assert plain["now"]["speedup"] == 1.0 and any(step["answers"] == 9000 for step in advice["steps"])
    assert "which drafts already (acceptance length 2.90" in advice["sentences"][0]
    assert "9,000 answers" in advice["basis"][1] and "2.90 since the start" in advice["basis"][1]
    step, before = (next(each for each in one["steps"] if each["answers"] == 9000) for one in (advice, plain))
    assert step["gain"] < 0.8 * before["gain"]


def test_rounds_of_the_traces_come_before_the_counters_of_the_whole_server(tmp_path: Path) -> None:
    seen = with_server(seen_in_traces(traces(tmp_path, [3], [1])), seen_in_server(parse_server(METRICS), "here"))
    assert seen.tokens_per_round == 2.0 and seen.streams == 4


def test_a_server_that_reports_only_its_acceptance_length_is_as_fast_as_that() -> None:
    """SGLang: 3.2 tokens a round are not the speed of one draft."""
    page = "sglang:spec_accept_length 3.2\nsglang:num_running_reqs 1.0\nsglang:generation_tokens_total 900.0\n"
    seen = seen_in_server(parse_server(page), "here")
    advice = advise(CostsConfig(model="Qwen3-8B", hardware="H100"), AdviceConfig(run="none"), seen)
    assert advice.now["speedup"] > 1.7


def test_the_drafter_that_serves_now_is_priced_by_its_method(tmp_path: Path) -> None:
    """A block is one pass, as of the drafter that training makes, and prompt lookup none; options come first."""
    costs = CostsConfig(model="Qwen3-8B", hardware="H100")
    seen = Seen("t", constant(0.8), tokens_per_round=4.2, num_drafted=7)

    def now(drafter: str, costs: CostsConfig = costs) -> tuple[float, str]:
        advice = advise(costs, AdviceConfig(run="none"), replace(seen, drafter=drafter))
        return advice.now["speedup"], next(each for each in advice.basis if each.startswith("Now: t."))

    speedups = {name: now(name)[0] for name in ("ngram", "dflash", "dspark", "mtp", "mine", "")}
    assert speedups["ngram"] > speedups["dflash"] == speedups["dspark"] > 1.3 * speedups["mtp"]
    assert speedups["mtp"] == speedups["mine"] == speedups[""]
    assert "mtp, is priced as one pass of 10% of a target pass for each draft (--drafter-cost" in now("mtp")[1]
    assert "for each round" in now("dflash")[1] and now("ngram")[1].count(" 0% ") == 1
    given = now("dflash", replace(costs, drafter_cost=0.2, block=7))
    assert given[0] < speedups["dflash"] and "one pass of 20% of a target pass for each round" in given[1]
    assert "priced" not in " ".join(advise(costs, AdviceConfig(run="none"), Seen("t")).basis)
    for number, names in enumerate((["dflash2"] * 2, ["dflash2", None])):
        rows = [{"answer_ids": [1], "drafted": [7], "accepted": [3], "drafter": name} for name in names]
        rows.append({"answer_ids": [1], "drafted": [0], "accepted": [0], "drafter": "none"})
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / f"{number}.parquet")
    assert seen_in_traces(tmp_path / "0.parquet").drafter == "dflash2" and seen_in_traces(tmp_path).drafter == ""


def customers(folder: Path) -> Path:
    """Three customers: a large one that is served plainly, one as large whose drafts are accepted, a small one."""
    traces(folder, None, None, 2000, "large")
    traces(folder, [7] * 5, [7] * 5, 2000, "fitted")
    traces(folder, None, None, 40, "small")
    return folder


@pytest.mark.slow
def test_customers_are_ranked_by_gain_and_traffic(tmp_path: Path) -> None:
    advice = line(str(customers(tmp_path)), *ON)
    large, small, fitted = advice["customers"]
    assert (large["tag"], small["tag"], fitted["tag"]) == ("large", "small", "fitted")
    assert large["traffic"] == pytest.approx(2000 / 4040) and fitted["tokens_per_round"] == 8.0
    assert fitted["gain"] == 1 and fitted["saved"] == 0 < small["saved"] < large["saved"] < 1
    assert large["gain_interval"][0] < large["gain"] < large["gain_interval"][1]
    shown = CliRunner().invoke(app, ["advise", str(tmp_path), *ON], catch_exceptions=False).output
    assert shown.index("large") < shown.index("small") < shown.index("fitted")
    assert line(str(tmp_path), "--tag", "large", *ON)["customers"] == []


def many_customers(folder: Path) -> Path:
    """Two large ones and a medium one that are served plainly, one too small, one whose drafts are all accepted, and
    requests without a tag."""
    for number, name in ((3000, "a"), (1500, "b"), (400, "c"), (40, "small"), (2000, None)):
        traces(folder, None, None, number, name)
    return traces(folder, [7] * 5, [7] * 5, 2000, "fitted")


def test_customers_who_deserve_a_drafter_are_named_in_order(tmp_path: Path) -> None:
    seen, costs = seen_in_traces(many_customers(tmp_path)), CostsConfig(model="Qwen3-8B", hardware="H100")
    usual = AdviceConfig(run="none", price_per_hour=2.0)
    advice = advise(costs, usual, seen)
    assert [each.tag for each in advice.customers] == ["a", "(no tag)", "b", "c", "small", "fitted"]
    assert advice.deserving == "3 of 5 customers deserve a drafter of their own: a, b, c."
    objections = {each.tag: each.objection for each in advice.customers}
    assert objections["small"] == "40 answers are too few" and objections["fitted"].startswith("may be no faster (1.00")
    assert objections["(no tag)"] == "no customer"
    one = advice.customers[2]
    assert one.cost == pytest.approx(2.0 * one.hours)
    assert one.pays_back_days == pytest.approx(one.hours / (24 * one.saved))
    assert [row["deserves"] for row in advice.as_json()["customers"]] == [True, False, True, True, False, False]
    dear = advise(costs, replace(usual, train_price_per_hour=8.0), seen).customers[2]
    assert dear.pays_back_days == pytest.approx(4 * (one.pays_back_days or 0)), "a training at four times the price"
    unpriced = advise(costs, AdviceConfig(run="none", train_on="8x H100"), seen).customers[2]
    assert unpriced.cost is None and unpriced.pays_back_days == pytest.approx(
        8 * unpriced.hours / (24 * unpriced.saved)
    )


def test_a_drafter_must_pay_off_within_the_horizon(tmp_path: Path) -> None:
    seen, costs = seen_in_traces(many_customers(tmp_path)), CostsConfig(model="Qwen3-8B", hardware="H100")
    days = {
        each.tag: each.pays_back_days or math.inf for each in advise(costs, AdviceConfig(run="none"), seen).customers
    }
    busy_hours = 24 * math.sqrt(days["b"] * days["c"]) / HORIZON_DAYS  # b in time, c too late
    rare = advise(costs, AdviceConfig(run="none", busy_hours=busy_hours), seen)
    assert rare.deserving == "2 of 5 customers deserve a drafter of their own: a, b."
    none = advise(costs, AdviceConfig(run="none", busy_hours=24 * days["a"] / HORIZON_DAYS / 1.01), seen)
    assert none.deserving == (
        "None of 5 customers deserves a drafter of its own (a, which would save most: does not pay off in 30 days)."
    )


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("--train-price-per-hour", "3"), "--train-price-per-hour: only with --price-per-hour"),
        (("--served-name", "a"), "--served-name .*: give its --url, too"),
    ],
)
def test_options_that_have_no_effect_are_refused(words: tuple[str, ...], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        line("--model", "Qwen3-8B", "--hardware", "H100", *words)


def test_customers_alone_are_printed_by_tag(tmp_path: Path) -> None:
    words = [str(many_customers(tmp_path)), "--by", "tag", "--model", "Qwen3-8B", "--hardware", "H100"]
    shown = CliRunner().invoke(app, ["advise", *words], catch_exceptions=False).output
    assert shown.startswith("This rests on:")
    assert shown.endswith("3 of 5 customers deserve a drafter of their own: a, b, c.\n")
    assert line(*words)["deserving"] in shown
    with pytest.raises(ConfigError, match="--by tag compares all customers of a folder of traces"):
        line(*words, "--tag", "a")
    with pytest.raises(ConfigError, match="has not even two"):
        line(str(tmp_path / "traces-a.parquet"), *words[1:])


def test_a_tag_selects_one_customer(tmp_path: Path) -> None:
    seen = seen_in_traces(customers(tmp_path), "fitted")
    assert (seen.answers, seen.tokens_per_round, seen.by_tag) == (2000, 8.0, {})
    assert seen_in_traces(tmp_path).answers == 4040
    with pytest.raises(ConfigError, match="no request with --tag other: its tags are fitted, large, small"):
        seen_in_traces(tmp_path, "other")


@pytest.mark.slow
def test_a_run_of_ones_own_comes_before_published_trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("runs/mine")
    run.mkdir(parents=True)
    (run / "plan.json").write_text(json.dumps({"target": "Qwen3.5-27B"}))
    (run / "trained.json").write_text(json.dumps({"prompts": 1000}))
    (run / "heldout.json").write_text(json.dumps({"tokens_per_round": 3.0, "num_prompts": 16}))
    own, guess = line(*ON, "--answers", "1000"), line(*ON, "--answers", "1000", "--run", "none")
    chosen, other = (next(step for step in advice["steps"] if step["answers"] == 1000) for advice in (own, guess))
    assert chosen["tokens_per_round"] == 3.0 and "that of runs/mine, 1,000 answers, 3.00 [" in own["basis"][2]
    assert "published trainings" in guess["basis"][2]
    widths = [one["gain_interval"][1] / one["gain_interval"][0] for one in (chosen, other)]
    assert widths[0] < widths[1]


@pytest.mark.slow
def test_a_roofline_is_called_a_ceiling_until_one_rate_was_measured() -> None:
    costs = CostsConfig(model="Qwen3-8B", hardware="8x H100")
    guessed = advise(costs, AdviceConfig(run="none"), Seen())
    assert guessed.is_ceiling and guessed.sentences[0].endswith("plainly: give --plain-rate, one measured rate.)")
    assert any("a guess from" in sentence for sentence in guessed.basis)
    measured = advise(replace(costs, plain_rate=200.0), AdviceConfig(run="none"), Seen())
    assert not measured.is_ceiling and "eiling" not in " ".join([*measured.sentences, *measured.basis])


def test_the_number_of_gpus_may_be_given_twice_or_either_way() -> None:
    config, machines = AdviceConfig(run="none"), [("2x H100", 2), ("2 H100", 1), ("H100", 2)]
    advice = [
        advise(CostsConfig(model="Qwen3-8B", hardware=name, gpus=gpus), config, Seen()) for name, gpus in machines
    ]
    assert [each.machine for each in advice] == ["2 x H100"] * 3
    assert advice[0] == advice[1] == advice[2]


def test_advice_and_plan_expect_the_same_of_a_target_without_a_curve() -> None:
    advice = advise(CostsConfig(model="Qwen3-8B", hardware="H100"), AdviceConfig(run="none"), Seen())
    for step in advice.steps[::3]:
        expected = expected_of("Qwen3-8B", Learned(EPOCHS * 48 * step.answers, step.answers, 48.0))
        assert expected["tokens_per_round"] == round(step.tokens_per_round, 2)


def test_what_8000_answers_brought_elsewhere_lies_inside() -> None:
    """SGLang's pull request 19952: 2.00 times plain decoding, one stream on 4 H100, from 8,000 examples."""
    costs = CostsConfig(model="Qwen3.5-27B", hardware="4x H100")
    advice = advise(costs, AdviceConfig(streams=1, answers=8000, run="none"), Seen())
    low, high = next(each for each in advice.steps if each.answers == 8000).speedup_interval
    assert low <= 2.0 <= high


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--busy-hours", "25"], "--busy-hours must be at most 24"),
        (["--hardware", ""], "--hardware is empty"),
        (["--traffic", "other"], "--traffic"),
        (["--hardware", "0x H100"], "--hardware '0x H100': give at least one machine"),
        (["--hardware", "H100", "--train-on", "0 H100"], "--train-on '0 H100': give at least one machine"),
        (["--hardware", "H100", "--train-on", "8 abacus"], "--train-on 'abacus' is not known: choose from B200"),
        (["--hardware", "2x H100", "--gpus", "4"], "two numbers"),
        (["--answers", str(10**15)], "--answers must be between 1 and 1e9"),
        (["--tag", "acme"], "--tag selects among traces"),
        (["--run", "runs/none-here"], "--run runs/none-here has no acceptance length"),
    ],
)
def test_impossible_questions(words: list[str], remedy: str) -> None:
    result = CliRunner().invoke(app, ["advise", "--model", "Qwen3.5-27B", *words])
    assert remedy in str(result.exception) + result.output


@pytest.mark.parametrize("written", [None, "this", "This", "this machine", "CPU"])
def test_a_training_on_this_machine_by_every_name_of_it(written: str | None) -> None:
    costs = CostsConfig(hardware=written)
    assert _device(costs, Setup(ToyCosts(), "toy model", "toy")) is None
