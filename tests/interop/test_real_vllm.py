"""Hidden states of a real vLLM's CPU build, extracted by our connector, against ours.

    PEERS_VENV=FOLDER PACELINE_NIGHTLY=1 pytest tests/interop/test_real_vllm.py -s

FOLDER is that of experiments/vllm_serves_export.sh, which installs FOLDER/vllm/bin/python; without it they are skipped.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from real_vllm import IS_MISSING, MISSING, ROOT, serving

from paceline.config import EngineConfig
from paceline.hub import resolve
from paceline.loop.adapt.servers.counters import is_up
from paceline.model.backends import load_target, settle
from paceline.model.gguf.to_folder import write_folder
from paceline.model.text.tokenizer import Tokenizer
from paceline.net.streaming import Client
from paceline.train.config import RemoteConfig
from paceline.train.documents.dataset import Document
from paceline.train.features.hidden_states import OnlineFeatures
from paceline.train.features.remote import RemoteFeatures, vllm_command

TAPS = (1, 8, 14, 21, 28)
LONGEST = 640
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.skipif(IS_MISSING, reason=MISSING),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(resolve("smollm2-135m"), tmp_path_factory.mktemp("target") / "smollm2")


@contextlib.contextmanager
def extracting(model: Path, states: Path, dtype: str, log: Path) -> Iterator[str]:
    """vLLM, started by the command that `paceline train` prints; its address."""
    printed = shlex.split(vllm_command(str(model), TAPS, LONGEST, states))
    assert printed[:3] == ["vllm", "serve", str(model)]
    with serving([*printed[2:], "--dtype", dtype], log) as url:
        yield url


def documents(model: Path) -> list[Document]:
    """Documents of 5 to 620 tokens: some share a beginning, for cached blocks, and the longest takes several passes."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ids = Tokenizer.from_path(model).encode(text)
    lengths = (5, 16, 130, 130, 300, 620)
    starts = (0, 700, 0, 90, 0, 400)
    rows = [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    rows.append(rows[2][:100] + rows[1])
    return [Document(f"d{number}", np.array(row, dtype=np.int32), 2) for number, row in enumerate(rows)]


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("bfloat16", 0.03)])
def test_hidden_states_are_ours(model: Path, tmp_path: Path, dtype: str, most: float) -> None:
    """In bfloat16 single positions differ by a tenth, since vLLM also rounds the sums of layers; the median counts."""
    settings = settle(EngineConfig(str(model), drafter="none", dtype="float32", device="cpu"))
    target, rows = load_target(replace(settings, max_batch=1, max_len=LONGEST + 16)), documents(model)
    states, differences = tmp_path / "states", {tap: list[torch.Tensor]() for tap in TAPS}
    here = OnlineFeatures(target, rows, TAPS, False)
    with extracting(model, states, dtype, tmp_path / "vllm.log") as url:
        there = RemoteFeatures(RemoteConfig(features_from=url, features_folder=states), target, rows, TAPS, False)
        with ThreadPoolExecutor(8) as threads:  # more than vLLM's rows
            numbers = [*range(len(rows)), *range(len(rows)), *range(len(rows))]
            received = [*zip(numbers, threads.map(there.of, numbers), strict=True)]
        for number, features in received:
            one, two = (each.taps_SF.unflatten(1, (len(TAPS), -1)) for each in (here.of(number), features))
            assert one.shape == two.shape == (len(rows[number]), len(TAPS), target.hidden_size)
            for place, tap in enumerate(TAPS):
                differences[tap].append(relative(two[:, place], one[:, place]))
        assert [*states.iterdir()] == [], "what was read is deleted, and nothing else is left"
        with contextlib.closing(Client(url)) as client:
            assert is_up(client)
    every = {tap: torch.cat(parts) for tap, parts in differences.items()}
    largest = {tap: float(values.max()) for tap, values in every.items()}
    median = {tap: float(values.median()) for tap, values in every.items()}
    print(json.dumps({"dtype": dtype, "relative difference by tap": {"largest": largest, "median": median}}))
    assert max((largest if dtype == "float32" else median).values()) < most


def relative(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """The difference of each position's vector, relative to the vector's length [tokens]."""
    return torch.linalg.vector_norm(one - two, dim=1) / torch.linalg.vector_norm(two, dim=1)
