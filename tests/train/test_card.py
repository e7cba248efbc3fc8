"""The model card says what the run's folder knows; the hub, here a fake, gets a private repository."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from small_llm import tiny_model
from small_training import tiny_decoder

from paceline import __version__
from paceline.config import EngineConfig
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.errors import ConfigError, DownloadError
from paceline.train.card import push, target_hash, write_card
from paceline.train.config import DrafterShape, PromptsConfig, TrainConfig
from paceline.train.documents.dataset import Corpus, Document
from paceline.train.learn.initial_weights import network_for

SERVED = {"tokens_per_round": 2.5, "num_prompts": 16, "teacher_forced": 2.49, "speedup": 1.7}
FIGURES = {"steps": 10, "blocks": 1920, "eal": 2.61, "loss": 3.2, "prompts": 1234}


def drafter(folder: Path, **shape: Any) -> Path:
    DFlashDrafter(network_for(tiny_decoder(), "none", DrafterShape(num_layers=1, **shape), None, 0)[1]).save(folder)
    return folder


def test_the_card_names_target_data_figures_and_flags(tmp_path: Path) -> None:
    target, out = tiny_model(tmp_path / "tiny"), drafter(tmp_path / "run" / "drafter", attention_bias=True)
    config = TrainConfig(tmp_path / "run", EngineConfig(str(target)), PromptsConfig(("some/mbpp.jsonl",)))
    noon = datetime(2026, 11, 5, 12, tzinfo=UTC).timestamp()
    os.utime(out / "model.safetensors", (noon, noon))
    text = write_card(config, out, FIGURES, SERVED).read_text()
    assert text.startswith("---\nlicense: other\nbase_model: tiny\n") and "tags: [dflash" in text
    assert hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest() in text
    assert "mbpp.jsonl" in text and str(tmp_path) not in text, "no path of this machine"
    assert "| tokens a round, served, greedy | 2.50 |" in text and "| of the same, teacher-forced | 2.49 |" in text
    assert (
        '--speculative-config \'{"method": "dflash", "model": "path/to/run/drafter", "num_speculative_tokens": 7}\''
        in text
    )
    assert "--speculative-algorithm DFLASH" in text and "--speculative-num-draft-tokens 8" in text
    assert "vLLM and SGLang were not tried" in text
    assert "num_speculative_tokens must be given" in text
    assert "paceline export path/to/run/drafter --format speculators --model path/to/tiny --out for-vllm" in text
    assert "vllm serve path/to/tiny " in text and "--model-path path/to/tiny " in text
    assert "to: mbpp.jsonl. Learned from 1,234 prompts." in text
    assert f" Finished on 2026-11-05 with paceline {__version__}." in text


def test_commands_of_a_card_name_what_other_programs_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A built-in target by its hub id; the drafter by its path from the working folder, or by its repository."""
    monkeypatch.chdir(tmp_path)
    config, out = TrainConfig(Path("runs/mine")), drafter(Path("runs/mine/drafter"))
    text = write_card(config, out, FIGURES, SERVED).read_text()
    assert "\nbase_model: HuggingFaceTB/SmolLM2-135M-Instruct\n" in text
    assert "vllm serve HuggingFaceTB/SmolLM2-135M-Instruct " in text and '"model": "runs/mine/drafter"' in text
    assert "paceline serve --model smollm2-135m --drafter runs/mine/drafter\n" in text
    text = write_card(replace(config, push_to_hub="me/mine"), out, FIGURES, SERVED).read_text()
    assert "--drafter me/mine\n" in text and "--speculative-draft-model-path me/mine " in text


def test_prompts_are_counted_once() -> None:
    keys = ("a@0/0", "a@0/1", "a@0.7/0", "b@0/0", "c/0", "c/1")
    documents = [Document(key, np.array([1, 2, 3], dtype=np.int32), 1) for key in keys]
    assert Corpus(documents, documents).num_prompts == 3


def test_a_card_keeps_no_speedup_above_the_acceptance_length(tmp_path: Path) -> None:
    config, out = TrainConfig(tmp_path), drafter(tmp_path / "drafter")
    assert (
        "| one stream, times plain decoding on the machine that trained | 1.70 |"
        in write_card(config, out, FIGURES, SERVED).read_text()
    )
    busy = {**SERVED, "tokens_per_round": 1.06, "speedup": 1.17}
    assert "times plain decoding" not in write_card(config, out, FIGURES, busy).read_text()


def test_without_held_out_prompts_it_claims_nothing(tmp_path: Path) -> None:
    text = write_card(TrainConfig(tmp_path), drafter(tmp_path / "drafter"), {"steps": 1, "blocks": 8}, {}).read_text()
    assert (
        "Nothing was held out" in text
        and "license: apache-2.0" in text
        and "1000 prompts that the target wrote itself" in text
    )


def test_a_built_in_targets_hash_is_known_without_its_file() -> None:
    assert target_hash("qwen2.5-coder-0.5b").startswith("sha256:1d9614638d18")


class Hub:
    """huggingface_hub's HfApi, as far as it is used."""

    called: list[tuple[str, dict[str, Any]]]

    def __init__(self) -> None:
        Hub.called = []

    def create_repo(self, repo: str, **options: Any) -> str:
        Hub.called.append(("create", {"repo": repo, **options}))
        if repo.startswith("offline/"):
            raise ConnectionError("no route")
        return f"https://huggingface.co/{repo}"

    def upload_folder(self, **options: Any) -> None:
        Hub.called.append(("upload", options))


def test_the_hub_gets_the_folder_privately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert push(tmp_path, "me/mine") == "https://huggingface.co/me/mine"
    (create, created), (upload, sent) = Hub.called
    assert (create, created["private"], upload, sent["folder_path"]) == ("create", True, "upload", str(tmp_path))
    push(tmp_path, "me/mine", is_public=True)
    assert Hub.called[0][1]["private"] is False
    with pytest.raises(DownloadError, match="was not sent to offline/mine .*the drafter stays where it is"):
        push(tmp_path, "offline/mine")
    with pytest.raises(ConfigError, match="'me/my/own' is no repository .*: give owner/name"):
        push(tmp_path, "me/my/own")
