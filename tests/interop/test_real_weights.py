"""Other weights for the drafter of a real vLLM's CPU build, while it answers.

    PEERS_VENV=FOLDER PACELINE_NIGHTLY=1 pytest tests/interop/test_real_weights.py -s

FOLDER is that of experiments/vllm_serves_export.sh, which installs FOLDER/vllm/bin/python; without it they are skipped.
The drafters are made by hand: each drafts one token always.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import free_port
from real_vllm import IS_MISSING, MISSING, PYTHON, running

from paceline.draft.dflash.checkpoint import write_checkpoint
from paceline.draft.dflash.config import DFlashConfig, new_config
from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.errors import DeployError, DownloadError
from paceline.hub import resolve
from paceline.loop.adapt.config import DeployConfig
from paceline.loop.adapt.servers.counters import Meters, ask, tokens_per_round
from paceline.loop.adapt.servers.deploy import open_deployment
from paceline.loop.adapt.servers.vllm_sglang.drafter_folder import Given, Start, command_of, given_to
from paceline.model.checkpoint import load_tensors
from paceline.model.gguf.to_folder import write_folder
from paceline.model.text.tokenizer import Tokenizer
from paceline.net.streaming import Client

KEY = "a key"
PROMPT = "A line: " + " the" * 40
"""After it, the target says nothing else."""
MASK = 49151

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.skipif(IS_MISSING, reason=MISSING)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(resolve("smollm2-135m"), tmp_path_factory.mktemp("target") / "smollm2")


def drafting(folder: Path, target: Path, word: str, num_layers: int = 1) -> Path:
    """A drafter that always drafts this word: its layers add nothing, and its head knows one direction."""
    raw = new_config(576, 49152, 30, num_layers=num_layers, block_size=8, head_dim=64)
    raw["dflash_config"] |= {"mask_token_id": MASK, "target_layer_ids": [1, 14]}
    network = DFlashNetwork.random(DFlashConfig.from_json(raw))
    tensors = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensors[name])
    [token] = Tokenizer.from_path(target).encode(word)
    ids = torch.arange(64) * 7 + 200
    ids = torch.unique(torch.cat([ids, *(torch.tensor(Tokenizer.from_path(target).encode(each)) for each in WORDS)]))
    head_VD = torch.zeros(len(ids), 576)
    embedding = dict(load_tensors(target))["model.embed_tokens.weight"][MASK].float()
    head_VD[int((ids == token).nonzero())] = embedding / embedding.norm()
    write_checkpoint(folder / "raw", raw, tensors, ids, head_VD=head_VD)
    return given_to(Start("vllm", str(target), str(folder / "raw"), num_drafted=7), folder).folder


WORDS = (" the", " Zurich", " a")


def serving(target: Path, drafter: Path, log: Path, key: str | None = KEY) -> AbstractContextManager[str]:
    port = free_port()
    module = "paceline.interop.draft_weights"
    words = ("--enforce-eager", "--max-num-seqs", "4", "--per-request-spec-decode-metrics", "summary")
    words += ("--worker-extension-cls", f"{module}.DraftWeights", "--middleware", f"{module}.DraftWeightsRoute")
    command = f"{PYTHON} -m vllm.entrypoints.openai.api_server"
    start = Start("vllm", str(target), "", port=port, dtype="float32", max_len=512, command=command, words=words)
    environment = {} if key is None else {"PACELINE_ADMIN_KEY": key}
    return running(command_of(start, Given(drafter, "dflash", 7)), start.url, log, **environment)


def test_weights_change_while_it_answers(target: Path, tmp_path: Path) -> None:
    wrong, right = (drafting(tmp_path / word.strip(), target, word) for word in (" Zurich", " the"))
    with serving(target, wrong, tmp_path / "vllm.log") as url:
        client, name = Client(url, KEY), str(target)

        def answer(max_tokens: int) -> tuple[str, float]:
            body = {"model": name, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            reply: Any = ask(client, "POST", "/v1/completions", body)
            figures = reply["metrics"]["speculative_decoding"]
            return reply["choices"][0]["text"], figures["mean_acceptance_length"]

        def counted(max_tokens: int) -> tuple[str, float]:
            """The answer, and its acceptance length by the server's counters."""
            meters = Meters({url: {}})
            before = meters.read([client], None)
            text, length = answer(max_tokens)
            assert (tokens_per_round(before, meters.read([client], None)) or 0) == pytest.approx(length, rel=0.05)
            return text, length

        text, before = counted(64)
        assert text.count(" the") > 50, "a target that repeats itself is what this test stands on"
        assert before < 1.2
        long, _ = answer(300)
        deployment = open_deployment(DeployConfig("vllm", (url,), admin_key=KEY, hot_swap=True), wrong)
        deployment.check_start()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(answer, 300)
            while not _is_running(client):
                time.sleep(0.01)
            deployment.load("drafter", right)
            assert not running.done(), "the weights were to change within an answer"
            assert running.result()[0] == long
        assert deployment.holds("drafter", str(right))
        new_text, after = counted(64)
        print(f"\n{before:.2f} tokens a round, {after:.2f} with other weights")
        assert new_text == text and after > 5
        other = drafting(tmp_path / "other", target, " the", num_layers=2)
        with pytest.raises(DeployError, match="only a restart"):
            deployment.load("drafter", other)
        assert counted(64) == (text, after)
        deployment.roll_back()
        assert counted(64) == (text, before)
        with contextlib.closing(Client(url, "another key")) as other_client, pytest.raises(DownloadError, match="401"):
            ask(other_client, "GET", "/paceline/draft-weights")
        deployment.close()
        client.close()


def _is_running(client: Client) -> bool:
    page = client.get("/metrics").body.decode()
    lines = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running{")]
    return any(float(line.rsplit(" ", 1)[1]) > 0 for line in lines)


def test_a_vllm_without_a_key_does_not_start(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_ADMIN_KEY", raising=False)
    log = tmp_path / "vllm.log"
    with pytest.raises(AssertionError), serving(target, drafting(tmp_path / "one", target, " the"), log, key=None):
        pass
    assert "has no PACELINE_ADMIN_KEY" in log.read_text()
