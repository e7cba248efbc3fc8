"""`serve --mock`: what acceptance is mocked, which model gets random weights, and that nothing it says is taken for
real."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import Live, chat_body, idle_collector, quick_end, serving, wait_until
from prometheus_client.parser import text_string_to_metric_families
from small_llm import tiny_model
from typer.testing import CliRunner

from paceline.bench.config import ServersConfig, ServingConfig
from paceline.bench.serving.servers import bench_serving
from paceline.cli import app
from paceline.config import EngineConfig
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, ModelNotFoundError, PacelineError, UnsupportedModelError
from paceline.model.text.tokenizer import Tokenizer
from paceline.plan.marginals import Marginals
from paceline.report.statistics import add_histograms, survival
from paceline.serve.admin.metrics import Metrics
from paceline.serve.run import Server
from paceline.serve.worker.mock import check_yield, mocked_drafter, mocked_engine, read_mock
from paceline.serve.worker.worker import EngineWorker
from paceline.simulate.marginals import read_marginals
from paceline.types import SamplingParams

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SHAPE |= {
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
}


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds a config.json and nothing else."""
    folder = tmp_path_factory.mktemp("shape") / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


@pytest.fixture(autouse=True)
def switch_interval() -> Iterator[None]:
    """The command leaves its own."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def live(config_only: Path) -> Iterator[Live]:
    def load() -> LLM:
        settings = {
            "device": "cpu",
            "dtype": "float32",
            "max_batch": 2,
            "weights": "random",
            "mocked_tokens_per_round": 4,
        }
        return LLM(str(config_only), drafter="random-dflash", **settings)

    with serving(load) as live:
        live.seen.lossless = False  # as the command makes it
        yield live


def test_a_number_and_a_curve(tmp_path: Path) -> None:
    assert read_mock("4") == 4.0 and read_mock("1") == 1.0 and read_mock("2.5") == 2.5
    assert read_mock(".8,.6, .4") == read_mock("survival:.8,.6,.4") == (0.8, 0.6, 0.4)
    assert read_mock("survival:.8") == (0.8,)
    file = tmp_path / "curve.json"
    file.write_text("[0.9, 0.5]")
    assert read_mock(str(file)) == (0.9, 0.5)
    file.write_text('{"survival": [0.7, 0.2], "drafter": "mine"}')
    assert read_mock(str(file)) == (0.7, 0.2)
    file.write_text(
        json.dumps({"results": [{"drafter": "x", "tokens_per_round": 1.7, "accepted_histogram": [4, 5, 1]}]})
    )
    assert read_mock(str(file)) == pytest.approx((0.6, 0.1)), "of a bench decode run"


@pytest.mark.parametrize("wrong", ["0.5", "nan", "inf", "four", ".4,.6", "1.2,.5", ".5,-.1", "", "survival:", ".5,nan"])
def test_what_is_neither_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"--mock.*give the mean tokens kept a round, such as 4"):
        read_mock(wrong)


@pytest.mark.parametrize("name", ["~no_such_user/x", "x" * 5000])
def test_a_path_that_cannot_be_opened_is_refused_as_any_other(name: str, tmp_path: Path) -> None:
    """pathlib's expanduser ended in "Could not determine home directory", its exists in "File name too long"."""
    with pytest.raises(ConfigError, match="is no number, no curve and no file"):
        read_mock(name)
    with pytest.raises(ConfigError, match="--marginals .* is not known"):
        read_marginals(name)
    with pytest.raises(ModelNotFoundError, match="in the catalogue"):
        mocked_engine(EngineConfig(name), "3", tmp_path)


def test_a_file_without_a_curve_is_refused(tmp_path: Path) -> None:
    for text in ('["a"]', "[0.5, 0.9]", "[]"):
        (tmp_path / "curve.json").write_text(text)
        with pytest.raises(ConfigError, match="--mock"):
            read_mock(str(tmp_path / "curve.json"))


def test_a_config_alone_gets_random_weights(config_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mocked_engine(EngineConfig(model=str(config_only)), "3", tmp_path)
    assert (folder.model, folder.weights, folder.mocked, folder.mocked_as) == (
        str(config_only),
        "random",
        3.0,
        "3 tokens a round",
    )
    (config_only / "x").mkdir()
    monkeypatch.chdir(config_only / "x")
    file = mocked_engine(EngineConfig(model="../config.json"), ".5,.25", tmp_path)
    assert Path(file.model) == tmp_path / "small" and file.weights == "random", "called as its folder"
    assert (file.mocked, file.mocked_as) == ((0.5, 0.25), "survival 0.5, 0.25")
    assert json.loads((tmp_path / "small" / "config.json").read_text()) == SHAPE
    engine_config = mocked_engine(EngineConfig(model="Qwen3-0.6B"), "3", tmp_path)
    config = json.loads((Path(engine_config.model) / "config.json").read_text())
    assert Path(engine_config.model).name == "Qwen3-0.6B" and engine_config.weights == "random"
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["hidden_size"] == 1024, (
        "or only Transformers knew it"
    )
    real = mocked_engine(EngineConfig(model=str(tiny_model(tmp_path / "real"))), "3", tmp_path)
    assert real.weights == "checkpoint", "there are weights"
    assert mocked_engine(EngineConfig(), "3", tmp_path).weights == "checkpoint"


def test_models_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    for model, error in (("no-such-model", ModelNotFoundError), (str(tmp_path / "list.json"), UnsupportedModelError)):
        with pytest.raises(error):
            mocked_engine(EngineConfig(model=model), "3", tmp_path)


def test_a_drafter_that_drafts_in_every_round(config_only: Path) -> None:
    assert mocked_drafter("default", "smollm2-135m", 2.0) == "default", "one ships for it"
    for model in ("some/config.json", str(config_only), str(config_only / "config.json")):
        assert mocked_drafter("default", model, 2.0) == "random-dflash"
    assert mocked_drafter("runs/mine", "some/config.json", 2.0) == "runs/mine"
    assert mocked_drafter("none", "some/config.json", 1.0) == "none", "plain decoding is mocked without one"
    for name in ("ngram", "none"):
        with pytest.raises(ConfigError, match="does not draft in every round"):
            mocked_drafter(name, "some/config.json", 2.0)
    check_yield(8.0, 7)
    check_yield((0.5,) * 7, 7)
    for kept in (8.5, (0.5,) * 8):
        with pytest.raises(ConfigError, match="the drafter drafts 7"):
            check_yield(kept, 7)


@pytest.mark.slow
def test_answers_of_other_apis_say_it_too(live: Live) -> None:
    messages, responses = (
        {"messages": chat_body()["messages"], "max_tokens": 24},
        {"input": "hello", "max_output_tokens": 24},
    )
    for path, body in (("/v1/messages", messages), ("/v1/responses", responses)):
        status, answer, _ = live.post(path, body)
        assert status == 200 and answer["lossless"] is False
        _, text, _ = live.post(path, body | {"stream": True})
        events = [json.loads(line[6:]) for line in text.decode().splitlines() if line.startswith("data: ")]
        assert len(events) >= 3 and all(event["lossless"] is False for event in events)


def test_every_answer_says_that_it_is_not_lossless(live: Live) -> None:
    limits = {"max_tokens": 25, "temperature": 0, "ignore_eos": True, "return_metrics": True, "paceline_timings": True}
    status, answer, _ = live.post("/v1/chat/completions", chat_body(**limits))
    figures = answer["metrics"]["speculative_decoding"]
    assert status == 200 and answer["lossless"] is False and answer["paceline"]["lossless"] is False
    assert figures["acceptance_histogram"] == [0, 0, 0, 6], "24 tokens after the first, 4 a round"
    assert answer["usage"]["completion_tokens"] == 25 and answer["choices"][0]["message"]["content"]
    answer = live.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 9, "n": 2})[1]
    assert answer["lossless"] is False and len(answer["choices"]) == 2
    body = chat_body(stream=True, max_tokens=9, stream_options={"include_usage": True})
    text = live.post("/v1/chat/completions", body)[1].decode()
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert len(chunks) >= 3 and all(chunk["lossless"] is False for chunk in chunks)
    (model,) = live.request("GET", "/v1/models")[1]["data"]
    assert model["lossless"] is False and model["mocked"] == "4 tokens a round"
    assert live.request("GET", "/steps")[1]["lossless"] is False


def test_a_grammar_is_refused_and_nothing_is_harmed(live: Live) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for more in (
        {"response_format": {"type": "json_object"}},
        {"guided_regex": "a+"},
        {"guided_json": {"type": "object"}},
        {"tools": [tool], "tool_choice": "required"},
    ):
        status, answer, _ = live.post("/v1/chat/completions", chat_body(**more))
        assert (status, answer["error"]["code"]) == (400, "mocked_acceptance"), more
        assert "4 tokens a round" in answer["error"]["message"]
    assert live.post("/v1/chat/completions", chat_body(tools=[tool], max_tokens=3))[0] == 200, "the model need not call"
    wait_until(live.is_idle)


def labels(metrics: Metrics) -> list[tuple[str, dict[str, str]]]:
    families = text_string_to_metric_families(metrics.render()[0].decode())
    return [
        (each.name, each.labels)
        for family in families
        for each in family.samples
        if not each.name.startswith("process_")
    ]


def test_every_series_says_so() -> None:
    mocked, real = labels(Metrics("tiny", lossless=False)), labels(Metrics("tiny"))
    assert len(mocked) == len(real) > 100
    assert all(series_labels["lossless"] == "false" for _, series_labels in mocked)
    assert not any("lossless" in series_labels for _, series_labels in real)
    values = [
        {
            each.name: each.value
            for family in text_string_to_metric_families(metrics.render()[0].decode())
            for each in family.samples
        }
        for metrics in (Metrics("tiny", lossless=False), Metrics("tiny"))
    ]
    assert [each["paceline:lossless"] for each in values] == [0, 1]


@pytest.mark.slow
def test_its_benchmark_says_so_too(live: Live, tmp_path: Path) -> None:
    config = ServingConfig(concurrencies=(1, 2), num_requests=3, max_tokens=12, ignore_eos=True)
    line = bench_serving(ServersConfig(url=live.url, speculate=("full",)), config, limit=2, out=tmp_path / "run")
    assert [(each.lossless, each.num_failed) for each in line["results"]] == [(False, 0)] * 2
    for name in ("report.md", "report.html"):
        assert "NOT LOSSLESS" in (tmp_path / "run" / name).read_text()


def test_the_stand_in_has_a_text_for_every_token() -> None:
    tokenizer = Tokenizer.stand_in(1000)
    assert tokenizer.vocab_size == 1000 and not tokenizer.eos_token_ids
    text = "Größe: 1\n  x"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert all(tokenizer.decode([token]) for token in range(1000))
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert Tokenizer.stand_in(50).vocab_size == 50 and max(Tokenizer.stand_in(50).encode(text)) < 50


def refused(*words: str) -> str:
    """The error that the command ends with."""
    done = CliRunner().invoke(app, ["serve", "--port", "0", *words])
    assert isinstance(done.exception, PacelineError)
    return str(done.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--mock", "4", "--traces", "traces"),
            "--mock does not go with --traces: a drafter would be trained on meaningless text",
        ),
        (("--mock", "4", "--features"), "--mock does not go with --features"),
        (("--mock", "4", "--drafter", "ngram"), "--drafter ngram does not draft in every round"),
        (
            ("--mock", "4", "--drafter", "a=default", "--drafter", "b=random-dflash"),
            "it needs --speculate auto, and no --mock",
        ),
        (("--mock", "0.5"), "--mock 0.5 counts the target's own token of every round"),
    ],
)
def test_what_does_not_go_together(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "key")
    assert message in refused(*[str(tmp_path / word) if word == "traces" else word for word in words])
    assert not (tmp_path / "traces").exists()


@pytest.mark.slow
def test_the_command_from_a_config_alone(config_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def ended(server: Server, worker: EngineWorker) -> None:
        await worker.loaded()
        seen.append(worker.metrics.render()[0].decode())
        server.drain()

    monkeypatch.setattr("paceline.serve.run._supervise", ended)
    words = ["--mock", ".9,.5", "--model", str(config_only / "config.json"), "--max-batch", "1", "--device", "cpu"]
    with idle_collector(), quick_end():
        done = CliRunner().invoke(app, ["serve", "--port", "0", *words])
    assert done.stderr.startswith("acceptance is MOCKED: survival 0.9, 0.5, random weights; answers mean nothing")
    assert 'paceline:lossless{lossless="false",model_name="small"} 0.0' in seen[0]


@pytest.mark.slow
def test_more_than_the_drafter_drafts_is_refused_when_it_is_loaded(config_only: Path) -> None:
    message = refused("--mock", "4", "--speculate", "2", "--model", str(config_only), "--device", "cpu")
    assert message.startswith("--mock asks for 4 tokens a round, and the drafter drafts 2")


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_keeps_a_curve(config_only: Path, temperature: float) -> None:
    settings = {"device": "cpu", "dtype": "float32", "weights": "random", "max_batch": 4}
    llm = LLM(str(config_only), drafter="random-dflash", mocked_survival=(0.8, 0.5, 0.2), **settings)
    params = [SamplingParams(temperature=temperature, max_tokens=400, ignore_eos=True, seed=seed) for seed in range(4)]
    answers = llm.generate_ids([[number + 1] * 4 for number in range(4)], params)
    rounds = add_histograms([one.stats.accepted_histogram for one in answers])
    assert survival(rounds) == pytest.approx([0.8, 0.5, 0.2], abs=0.06) and sum(rounds) > 500
    assert not any(one.stats.lossless for one in answers)


@pytest.mark.slow
def test_the_engine_keeps_what_trees_of_marginals_keep(config_only: Path) -> None:
    """Random weights: what the drafter itself holds likely would grow no tree at all."""
    marginals = Marginals(((0.7, 0.12, 0.05), (0.6, 0.2, 0.05), (0.65, 0.1, 0.05)))
    settings = {"device": "cpu", "dtype": "float32", "weights": "random", "max_batch": 4, "speculate": "tree:8"}
    llm = LLM(str(config_only), drafter="random-dflash", mocked_marginals=marginals.chances_KM, **settings)
    params = [SamplingParams(max_tokens=400, ignore_eos=True, seed=seed) for seed in range(4)]
    answers = llm.generate_ids([[number + 1] * 4 for number in range(4)], params)
    rounds = add_histograms([one.stats.accepted_histogram for one in answers])
    kept = 1 + sum(count * number for number, count in enumerate(rounds)) / sum(rounds)
    assert kept == pytest.approx(marginals.expected(8)[8].tokens, rel=0.06) and sum(rounds) > 400
    assert not any(one.stats.lossless for one in answers)


@pytest.mark.slow
def test_marginals_for_trees(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text("[[0.7, 0.1], [0.5, 0.2]]")
    expected = Marginals(((0.7, 0.1), (0.5, 0.2)))
    assert read_mock(str(file)) == expected and read_mock("greedy") == read_marginals("greedy")
    engine = mocked_engine(EngineConfig(speculate="tree:4"), str(file), tmp_path)
    assert engine.mocked == expected and engine.mocked_as.startswith("marginals of 2 draft positions")
    check_yield(expected, 2)
    with pytest.raises(ConfigError, match="the drafter drafts 1"):
        check_yield(expected, 1)
    file.write_text("[[0.7, 0.4]]")
    with pytest.raises(ConfigError, match="sum up to 1"):
        read_mock(str(file))
