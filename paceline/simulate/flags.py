"""Server flags that realise a prediction: paceline, vLLM, SGLang. Block sizes count the anchor: drafts + 1."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from paceline.errors import ConfigError

METHODS = ("dflash", "mtp", "eagle3", "draft-model", "ngram")
PLACEHOLDER = "YOUR-DRAFTER"


@dataclass(frozen=True, slots=True)
class Serving:
    """What is to be served."""

    model: str
    method: str = "dflash"
    """How drafts are made: one of METHODS."""
    drafter: str = PLACEHOLDER
    """Folder or hub id of the drafter."""
    num_drafted: int = 0
    batch: int = 1
    num_gpus: int = 1
    has_8bit_cache: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"--method {self.method!r} is not known: choose from {', '.join(METHODS)}")


def server_flags(serving: Serving) -> dict[str, str]:
    """A command line for each server. With 0 drafts they decode plainly."""
    return {"paceline": paceline(serving), "vllm": vllm(serving), "sglang": sglang(serving)}


def paceline(serving: Serving) -> str:
    """Methods that paceline does not serve become a remark in place of a command."""
    words = ["paceline", "serve", "--model", serving.model, "--max-batch", str(serving.batch)]
    if serving.num_drafted == 0:
        return shlex.join([*words, "--drafter", "none"])
    if serving.method in ("mtp", "eagle3"):
        return f"# paceline serves no {serving.method} drafter: train a DFlash one with paceline train"
    drafter = "ngram" if serving.method == "ngram" else serving.drafter
    return shlex.join([*words, "--drafter", drafter, "--num-drafted", str(serving.num_drafted), "--speculate", "full"])


def vllm(serving: Serving) -> str:
    words = ["vllm", "serve", serving.model, "--max-num-seqs", str(serving.batch)]
    words += ["--tensor-parallel-size", str(serving.num_gpus)] if serving.num_gpus > 1 else []
    words += ["--kv-cache-dtype", "fp8"] if serving.has_8bit_cache else []
    if serving.num_drafted == 0:
        return shlex.join(words)
    config: dict[str, str | int] = {"method": serving.method.replace("-", "_")}
    if serving.method in ("dflash", "eagle3", "draft-model"):
        config["model"] = serving.drafter
    config["num_speculative_tokens"] = serving.num_drafted
    if serving.method == "ngram":
        config["prompt_lookup_max"] = 4
    return shlex.join([*words, "--speculative-config", json.dumps(config)])


def sglang(serving: Serving) -> str:
    words = ["python", "-m", "sglang.launch_server", "--model-path", serving.model]
    words += ["--max-running-requests", str(serving.batch)]
    words += ["--tp-size", str(serving.num_gpus)] if serving.num_gpus > 1 else []
    words += ["--kv-cache-dtype", "fp8_e4m3"] if serving.has_8bit_cache else []
    if serving.num_drafted == 0:
        return shlex.join(words)
    names = {"dflash": "DFLASH", "mtp": "EAGLE", "eagle3": "EAGLE3", "draft-model": "STANDALONE", "ngram": "NGRAM"}
    words += ["--speculative-algorithm", names[serving.method]]
    if serving.method in ("dflash", "eagle3", "draft-model"):
        words += ["--speculative-draft-model-path", serving.drafter]
    if serving.method in ("mtp", "eagle3", "draft-model"):
        words += ["--speculative-num-steps", str(serving.num_drafted), "--speculative-eagle-topk", "1"]
    return shlex.join([*words, "--speculative-num-draft-tokens", str(serving.num_drafted + 1)])
