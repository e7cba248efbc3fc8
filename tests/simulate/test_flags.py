"""The flags of three servers."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.simulate.answer import predict_all
from paceline.simulate.config import CostsConfig, PredictConfig
from paceline.simulate.flags import METHODS, Serving, server_flags


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_a_block_drafter() -> None:
    flags = server_flags(Serving("Qwen/Qwen3-8B", "dflash", "z-lab/Qwen3-8B-DFlash-b16", 15, batch=4, num_gpus=2))
    vllm, sglang = (shlex.split(flags[server]) for server in ("vllm", "sglang"))
    expected = {"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16", "num_speculative_tokens": 15}
    assert json.loads(after(vllm, "--speculative-config")) == expected
    assert (after(vllm, "--tensor-parallel-size"), after(vllm, "--max-num-seqs")) == ("2", "4")
    assert after(sglang, "--speculative-algorithm") == "DFLASH"
    assert after(sglang, "--speculative-num-draft-tokens") == "16", "the block counts the anchor"
    assert "--speculative-num-steps" not in sglang
    assert flags["paceline"] == "# paceline's own decoder runs on one GPU: vLLM and SGLang share a model out to 2"
    paceline = shlex.split(server_flags(Serving("m", "dflash", "d", 15, batch=4))["paceline"])
    assert (after(paceline, "--num-drafted"), after(paceline, "--max-batch")) == ("15", "4")


def test_token_by_token() -> None:
    flags = server_flags(Serving("m", "mtp", num_drafted=3, has_8bit_cache=True))
    vllm, sglang = shlex.split(flags["vllm"]), shlex.split(flags["sglang"])
    assert json.loads(after(vllm, "--speculative-config")) == {"method": "mtp", "num_speculative_tokens": 3}
    assert (after(sglang, "--speculative-num-steps"), after(sglang, "--speculative-num-draft-tokens")) == ("3", "4")
    assert after(vllm, "--kv-cache-dtype") == "fp8"
    assert after(shlex.split(flags["paceline"]), "--drafter") == "mtp"


@pytest.mark.parametrize("method", METHODS)
def test_no_drafts_is_plain_decoding(method: str) -> None:
    flags = server_flags(Serving("m", method, num_drafted=0))
    assert "speculative" not in flags["vllm"] + flags["sglang"]
    assert "--drafter none" in flags["paceline"]


@pytest.mark.parametrize("method", METHODS)
def test_paceline_takes_every_method(method: str) -> None:
    words = shlex.split(server_flags(Serving("m", method, "a/drafter", num_drafted=6))["paceline"])
    assert words[:2] == ["paceline", "serve"]
    given = {name: after(words, "--" + name.replace("_", "-")) for name in ("model", "drafter", "speculate")}
    config = EngineConfig(**given, num_drafted=int(after(words, "--num-drafted")))
    assert config.most_drafted == 6 and config.drafter == {"mtp": "mtp", "ngram": "ngram"}.get(method, "a/drafter")


def test_ngram_needs_no_drafter() -> None:
    flags = server_flags(Serving("m", "ngram", num_drafted=4))
    assert "--drafter ngram" in flags["paceline"]
    assert "YOUR-DRAFTER" not in "".join(flags.values())


def test_unknown_methods() -> None:
    with pytest.raises(ConfigError, match="choose from"):
        Serving("m", "magic")


def test_a_method_s_default_cost_is_its_own_or_said_to_be_assumed() -> None:
    """A look-up runs no model; what a drafter's pass costs is not known from the method's name."""
    on = CostsConfig(model="Qwen3-8B", hardware="H100")
    answers = {name: predict_all(on, PredictConfig(method=name)) for name in METHODS}
    speedups = {name: answer.predictions[0].speedup for name, answer in answers.items()}
    assert speedups["ngram"] > speedups["mtp"] == speedups["eagle3"]
    assert any("look-up costs no pass" in limit for limit in answers["ngram"].setup.limits)
    assert any("10% of a target pass, an assumption" in limit for limit in answers["eagle3"].setup.limits)
    stated = predict_all(replace(on, drafter_cost=0.2), PredictConfig(method="ngram"))
    assert stated.predictions[0].speedup < speedups["mtp"] and not any(
        "look-up" in limit for limit in stated.setup.limits
    )
