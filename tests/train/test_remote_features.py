"""Hidden states of a target elsewhere: through vLLM's files or our server, the drafter is the one trained here, to the
bit."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elsewhere_server import Elsewhere, served
from hidden_states_server import VLLM, loaded
from live_server import Live, serving, wait_until
from model_folders import SHAPE
from safetensors.torch import load, load_file, save_file
from shown import Shown
from small_llm import tiny_model

from paceline.config import EngineConfig
from paceline.data.answers import Answer, AnswerShards
from paceline.engine.llm import LLM
from paceline.errors import (
    CacheError,
    ConfigError,
    DownloadError,
    ModelFileError,
    NumericsError,
    UnsupportedModelError,
)
from paceline.hardware import Machine
from paceline.model.backends import settle
from paceline.model.remote_embedding import Ends, load_ends
from paceline.model.target import head_weight
from paceline.net.retrying import KEY
from paceline.train import train
from paceline.train.config import (
    AnswerConfig,
    DrafterShape,
    LoopConfig,
    LossConfig,
    PromptsConfig,
    RemoteConfig,
    TrainConfig,
)
from paceline.train.documents.dataset import Document
from paceline.train.features.remote import RemoteFeatures, vllm_command
from paceline.train.plan import target_facts as facts

LOOP = LoopConfig(max_steps=4, blocks_per_step=24, anchors=6, autocast=False, heldout_every=2)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(
        str(tiny_model(tmp_path_factory.mktemp("target") / "tiny")), device="cpu", dtype="float32", threads=1
    )


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    rows = [np.random.default_rng(n).integers(0, 250, 14 + n % 5).tolist() for n in range(12)]
    AnswerShards(folder).write(
        [Answer(f"q{n}@0", "here", 0, 0.0, row[:5], row[5:], "length", "") for n, row in enumerate(rows)]
    )
    return folder


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", KEY):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def vllm(engine: EngineConfig, tmp_path: Path) -> Iterator[tuple[VLLM, Elsewhere]]:
    (tmp_path / "shared").mkdir()
    fake = Elsewhere(LLM.__new__(LLM))
    fake.other = one = VLLM(engine, tmp_path / "shared", (1,))
    with served(fake):
        yield one, fake


@pytest.fixture(scope="module")
def live(engine: EngineConfig) -> Iterator[Live]:
    config = replace(engine, drafter="none", max_batch=2, max_len=128)
    with serving(lambda: LLM.of(config), api_keys=("sesame",), features=True) as one:
        yield one


def trained(
    out: Path, engine: EngineConfig, answers: Path, elsewhere: RemoteConfig | None = None, **changes: Any
) -> dict[str, Any]:
    """The finished drafter's weights. A plan would copy layers of a target that is here."""
    shape = DrafterShape(num_layers=1, block_size=4, tap_layers=(0,))
    values: dict[str, Any] = {
        "answers": () if "prompting" in changes else (answers,),
        "loop": LOOP,
        "shape": shape,
        "max_len": 64,
        "plan": "off",
    } | changes
    progress = values.pop("progress", None)
    result = train(TrainConfig(out, engine, remote=elsewhere or RemoteConfig(), **values), progress=progress)
    return load_file(result.drafter / "model.safetensors")


@pytest.fixture(scope="module")
def here(engine: EngineConfig, answers: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights of a drafter trained with hidden states of this process."""
    return trained(tmp_path_factory.mktemp("here"), engine, answers)


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(tensor, two[name]) for name, tensor in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("features", ["cached", "streamed"])
def test_vllm_s_files_give_the_same_drafter(
    tmp_path: Path, engine: EngineConfig, answers: Path, here: Any, vllm: tuple[VLLM, Elsewhere], features: str
) -> None:
    one, fake = vllm
    one.has_locks = features == "cached"
    elsewhere = RemoteConfig(features_from=fake.url, features_folder=one.folder, at_once=4)
    progress = Shown()
    there = trained(tmp_path / "there", engine, answers, elsewhere, features=features, progress=progress)
    assert same(there, here)
    [(number, command)] = [(number, line) for number, line in enumerate(progress.lines) if "vllm serve" in line]
    assert command.startswith(f"vLLM at {fake.url} is started like this:\n  vllm serve {engine.model} ")
    assert "it does not report its layers" in progress.lines[number + 1], "said before the server is needed"
    assert list(one.folder.iterdir()) == [], "what was read is deleted"
    assert one.number >= 12


def test_the_command_names_our_connector_and_has_room_for_one_token_more(tmp_path: Path) -> None:
    words = shlex.split(vllm_command("org/some model", (1, 8, 14), 2048, tmp_path / "the states"))
    assert words[:5] == ["vllm", "serve", "org/some model", "--max-model-len", "2049"]
    extraction, connector = json.loads(words[6]), json.loads(words[8])
    assert words[5::2] == ["--speculative-config", "--kv-transfer-config"]
    assert extraction["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 9, 15]}
    assert connector["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path / "the states")}
    file = Path(__file__).parents[2].joinpath(*connector["kv_connector_module_path"].split(".")).with_suffix(".py")
    assert f"class {connector['kv_connector']}(" in file.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_whole_run_elsewhere_gives_the_same_drafter(
    tmp_path: Path, engine: EngineConfig, vllm: tuple[VLLM, Elsewhere], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in, drafter out, with answers and hidden states of a server; of the target here only the ends are
    loaded."""
    machine = Machine("some processor", 3e10, {"bfloat16": 5e11, "float32": 2e11}, 1, 16 * 2**30)
    monkeypatch.setattr(facts, "_measured_once", lambda device: facts.MachineFacts(machine))
    one, fake = vllm
    fake.llm = LLM.of(replace(engine, drafter="none", max_batch=2, max_len=128))
    fake.other = lambda method, path, body: one(method, path, body) if body.get("max_tokens", 1) == 1 else None
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Tell me {n}."}) + "\n" for n in range(12)))
    options: dict[str, Any] = {"prompting": PromptsConfig((str(file),)), "max_len": 96}
    options["answering"] = AnswerConfig(max_tokens=12, max_prompt_tokens=80, temperatures=(0.0, 0.8))
    elsewhere = RemoteConfig(answers_from=fake.url, features_from=fake.url, features_folder=one.folder, at_once=3)
    there = trained(tmp_path / "there", engine, tmp_path, elsewhere, **options)
    assert same(there, trained(tmp_path / "here", engine, tmp_path, **options))
    assert len(fake.bodies) == 24 and one.number >= 24
    trained(tmp_path / "planned", engine, tmp_path, elsewhere, **options, plan="auto")
    plan = json.loads((tmp_path / "planned" / "plan.json").read_text())
    assert "loop.keep" in plan["values"] and "shape.start" not in plan["values"], "no layers of the target are here"
    assert "it ran elsewhere" in (tmp_path / "planned" / "drafter" / "README.md").read_text()


@pytest.mark.slow
def test_our_server_gives_the_same_drafter(
    tmp_path: Path, engine: EngineConfig, answers: Path, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = RemoteConfig(features_from=live.url, at_once=3)
    with pytest.raises(ConfigError, match="wants another key"):
        trained(tmp_path / "without", engine, answers, elsewhere)
    monkeypatch.setenv(KEY, "sesame")
    loop = replace(LOOP, loss=LossConfig("kl"))
    there = trained(tmp_path / "there", engine, answers, elsewhere, loop=loop)
    assert same(there, trained(tmp_path / "here", engine, answers, loop=loop)), "the final states too"
    wait_until(live.is_idle)
    assert live.llm.target.tap_layers == ()


def test_the_contract_of_our_server(engine: EngineConfig, live: Live) -> None:
    import urllib.error
    import urllib.request

    def ask(body: Any = None, key: str = "sesame") -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(live.url + "/v1/features", body and json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    status, reply = ask()
    shape = {"num_layers": 2, "hidden_size": 32, "dtype": "float32", "max_tokens": 128}
    assert status == 200 and shape.items() <= json.loads(reply).items()
    status, data = ask({"token_ids": [1, 2, 3], "layers": [1, 0], "final": True})
    tensors = load(data)
    assert tensors["hidden_states"].shape == (3, 2, 32) and tensors["token_ids"].tolist() == [1, 2, 3]
    assert torch.equal(tensors["final"], tensors["hidden_states"][:, 0]), "the last layer's, after the norm"
    for ids in ([1], [1, 2, 3]):  # the last layer alone is what `final` is, and safetensors saves no memory twice
        status, data = ask({"token_ids": ids, "layers": [1], "final": True})
        assert status == 200 and torch.equal(load(data)["final"], load(data)["hidden_states"][:, 0])
    refused = [
        ({"token_ids": [1] * 129, "layers": [0]}, 400, b"more than the 128"),
        ({"token_ids": [258], "layers": [0]}, 400, b"from 0 to 257"),
        ({"token_ids": [1], "layers": [2]}, 400, b"from 0 to 1"),
        ({"token_ids": [1], "layers": [0, 0]}, 400, b"each once"),
        ({"token_ids": [], "layers": [0]}, 400, b"token_ids"),
    ]
    for body, expected, message in refused:
        status, reply = ask(body)
        assert status == expected and message in reply, reply
    assert ask({"token_ids": [1], "layers": [0]}, key="wrong")[0] == 401
    wait_until(live.is_idle)


@pytest.mark.slow
def test_without_the_option_there_is_nothing(engine: EngineConfig) -> None:
    config = replace(engine, drafter="none", max_batch=1, max_len=64)
    with serving(lambda: LLM.of(config)) as one:
        source = RemoteConfig(features_from=one.url)
        with pytest.raises(ConfigError, match="features_folder must be given"):
            RemoteFeatures(source, loaded(engine), [], (0,), False)


def features(
    engine: EngineConfig, fake: Elsewhere, one: VLLM, *, needs_final: bool = False, **changes: Any
) -> RemoteFeatures:
    values: dict[str, Any] = {
        "features_from": fake.url,
        "features_folder": one.folder,
        "patience_minutes": 0.005,
    } | changes
    documents = [Document("d", np.array([4, 5, 6, 7], dtype=np.int32), 2)]
    return RemoteFeatures(RemoteConfig(**values), load_ends(settle(engine)), documents, (0,), needs_final)


@pytest.mark.slow
def test_what_a_server_gives_is_checked(engine: EngineConfig, vllm: tuple[VLLM, Elsewhere], tmp_path: Path) -> None:
    one, fake = vllm
    source = features(engine, fake, one)
    assert source.of(0).taps_SF.shape == (4, 32) and "layer_ids [1]" in source.introduction
    spoilt: list[tuple[Any, type[Exception], str]] = [
        (lambda t: t | {"token_ids": t["token_ids"] + 1}, ConfigError, "hidden states of other tokens"),
        (
            lambda t: t | {"hidden_states": t["hidden_states"].repeat(1, 2, 1)},
            ConfigError,
            "start vLLM with layer ids 1",
        ),
        (lambda t: {"token_ids": t["token_ids"]}, ConfigError, "of shape None"),
        (lambda t: t | {"hidden_states": t["hidden_states"] * float("nan")}, NumericsError, "no numbers"),
        (lambda t: t | {"more": torch.zeros(1 << 20)}, ConfigError, "larger than these layers"),
    ]
    for spoil, kind, message in spoilt:
        one.spoil = spoil
        with pytest.raises(kind, match=message):
            source.of(0)
    one.spoil = lambda tensors: tensors
    with pytest.raises(CacheError, match="does not come: check that features_folder"):
        features(engine, fake, one, features_folder=tmp_path / "elsewhere").of(0)
    with pytest.raises(UnsupportedModelError, match="use --loss ce or d-pace"):
        features(engine, fake, one, needs_final=True)
    fake.other = lambda method, path, body: (400, b"too long") if path == "/v1/completions" else one(method, path, body)
    with pytest.raises(DownloadError, match="refuses document d: status 400: too long"):
        source.of(0)


@pytest.mark.slow
def test_the_ends_are_the_target_s(engine: EngineConfig, tmp_path: Path) -> None:
    whole, ends = loaded(engine), load_ends(settle(engine))
    assert isinstance(ends, Ends) and torch.equal(head_weight(ends), head_weight(whole))
    ids = torch.arange(whole.vocab_size)
    assert torch.equal(ends.embed(ids), whole.embed(ids)) and ends.num_layers == whole.num_layers
    folder = tmp_path / "alien"
    folder.mkdir()
    config = {
        "model_type": "alien",
        "num_hidden_layers": 48,
        "tie_word_embeddings": True,
        "max_position_embeddings": 99,
    }
    (folder / "config.json").write_text(json.dumps({"architectures": ["Alien"], "text_config": config}))
    save_file({"language_model.model.embed_tokens.weight": torch.ones(7, 4)}, folder / "model-3.safetensors")
    alien = load_ends(settle(replace(engine, model=str(folder))))
    assert (alien.vocab_size, alien.hidden_size, alien.num_layers) == (7, 4, 48), "one that we do not run"
    for untied in (config, {"architectures": ["LlamaForCausalLM"], **SHAPE}):
        (folder / "config.json").write_text(json.dumps(untied | {"tie_word_embeddings": False}))
        with pytest.raises(ModelFileError, match=r"holds no tensor that ends in lm_head.weight"):
            load_ends(settle(replace(engine, model=str(folder))))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gemma3"}))
    with pytest.raises(UnsupportedModelError, match="gemma3 is not implemented"):
        load_ends(settle(replace(engine, model=str(folder))))
