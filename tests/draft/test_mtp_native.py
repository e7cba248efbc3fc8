"""Native steps of an MTP layer against the PyTorch path: the same logits and drafts, for chains, trees and batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_models import target_of, text
from mtp_models import Folder, mtp_folders, shaken
from round_loop import admit, generate, ready

from paceline.draft.base import NoDrafter
from paceline.draft.level import Level
from paceline.draft.mtp.drafter import MtpDrafter
from paceline.draft.mtp.paths import MtpNativePath, MtpPath
from paceline.model.native.decoder import NativeDecoder
from paceline.model.native.library import load
from paceline.train.methods.mtp import new_layer
from paceline.types import Batch, SamplingParams, Take

pytestmark = pytest.mark.skipif(load() is None, reason="the native library is not there")
PROMPTS = [text(9), text(21, 1), text(13, 2)]
TREE = (
    (Level([2, 0], [4, 7], [0, 0], [[[0]], [[0], [1]]]), [7, 8, 9], [0, 1, 1]),
    (Level([2, 0], [4, 7], [1, 2], [[[0, 1]], [[0, 2], [1, 3], [1, 4]]]), [1, 2, 3, 4], [0, 1, 2, 2]),
)
"""Levels of a round in which row 2 drafts a chain and row 0 a tree; tokens; parents among the states before."""
OTHERS = ("qwen3.5", "qwen3.5-moe", "mixtral", "gemma2", "olmo2", "granite", "phi4-mini")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return mtp_folders(tmp_path_factory)


def drafter_of(folder: Any, target: Any) -> MtpDrafter:
    """A drafter bound to this target: a copy of the target's last layer, its weights shaken."""
    drafter = MtpDrafter(shaken(new_layer(folder)), num_drafted=4)
    ready(target, drafter)
    return drafter


def extended(path: Any, taps_TD: torch.Tensor) -> torch.Tensor:
    """States after two rows of 7 and 4 positions, read in two passes."""
    path.extend([0, 2], [0, 0], [4, 2], [3, 1, 4, 1, 5, 9], taps_TD[:6])
    return path.extend([2, 0], [2, 4], [2, 3], [2, 6, 5, 3, 5], taps_TD[6:])


@pytest.mark.parametrize(
    "name", [*("llama", "qwen2", "qwen3"), *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_logits_are_the_pytorch_path_s(name: str, folder_of: Folder) -> None:
    """Biases, norms, experts, gates and scales; after accepted positions, and at a tree's nodes next to a chain."""
    target, layer = target_of(folder_of(name), num_rows=3), shaken(new_layer(folder_of(name)))
    assert isinstance(target, NativeDecoder)
    paths = (MtpNativePath(layer, target, 16), MtpPath(layer, target, 16))
    taps_TD = torch.randn(11, target.hidden_size, generator=torch.Generator().manual_seed(1))
    states = [extended(path, taps_TD) for path in paths]
    for level, tokens, parents in (None, [], []), *TREE:
        if level:
            states = [path.step(level, tokens, state_TD[parents]) for path, state_TD in zip(paths, states, strict=True)]
        torch.testing.assert_close(*states, atol=2e-4, rtol=1e-4)
        logits = [path.logits(state_TD) for path, state_TD in zip(paths, states, strict=True)]
        torch.testing.assert_close(*logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", pytest.param("qwen3.5", marks=pytest.mark.slow)])
def test_drafts_are_the_pytorch_path_s_and_the_text_is_plain_decoding_s(name: str, folder_of: Folder) -> None:
    folder, outcomes = folder_of(name), list[Any]()
    for backend, kind in (("native", MtpNativePath), ("torch", MtpPath)):
        target = target_of(folder, num_rows=3, backend=backend)
        drafter = drafter_of(folder, target)
        assert isinstance(drafter._path, kind) and drafter.has_own_threads == (backend == "native")
        answers, rounds = generate(target, drafter, PROMPTS, 16, chunk=8)
        assert answers == generate(target, NoDrafter(), PROMPTS, 16)[0]
        ready(target, drafter)
        rows = [admit(target, drafter, prompt, SamplingParams(max_tokens=40)) for prompt in PROMPTS]
        block = drafter.propose(Batch(rows, [Take("mtp", count) for count in (4, 2, 3)], num_candidates=3))
        branches = [list((each and each.branches) or ()) for each in block.candidates_B or ()]
        outcomes.append((answers, [stats.num_accepted_B for stats in rounds], block.tokens_B, branches))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("weight_format", ["q8_0", "q4_1"])
def test_beside_a_quantised_target_the_layer_is_in_8_bits(weight_format: str, folder_of: Folder) -> None:
    folder = folder_of("qwen2")
    target = target_of(folder, num_rows=3, weight_format=weight_format)
    drafter = drafter_of(folder, target)
    assert isinstance(drafter._path, MtpNativePath) and drafter._path._fc.formats == ["Q8_0"]
    answers, rounds = generate(target, drafter, PROMPTS, 16)
    assert answers == generate(target, NoDrafter(), PROMPTS, 16)[0]
    assert sum(sum(stats.num_drafted_B) for stats in rounds) > 60
