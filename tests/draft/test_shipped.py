"""The drafter that ships is the default, drafts as the authors' package does with the same weights, and is worth its
size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dflash import model as dflash

from paceline import LLM, SamplingParams
from paceline.bench.comparison import transformers_model
from paceline.draft.dflash.checkpoint import read_draft_ids, read_stored, weights_file
from paceline.draft.dflash2.drafter import DFlash2Drafter
from paceline.draft.formats.packed import PACKED
from paceline.draft.shipped import find
from paceline.hub import resolve
from paceline.types import Batch, DraftBlock

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m"
QUESTION = (
    "A farmer has 12 hens. Each lays 5 eggs a week. How many eggs does he collect in 4 weeks? Think step by step."
)
MAX_TOKENS = 30


@pytest.fixture(scope="module")
def shipped() -> Path:
    """Found when a test needs it: where the drafters are not checked out, that is a download."""
    return find(MODEL)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, max_batch=1, max_len=256, speculate="full")


def test_it_is_the_default_and_small(llm: LLM, shipped: Path) -> None:
    assert isinstance(llm.drafter, DFlash2Drafter)
    assert sum(file.stat().st_size for file in shipped.iterdir()) < 30e6 and weights_file(shipped).name == PACKED
    assert json.loads((shipped / "config.json").read_text())["architectures"] == ["DFlash2DraftModel"]


def test_the_coder_s_is_small_and_drafts_among_few() -> None:
    """In 8 bits, with codebook rows of the tokens that it drafts; the folder reads without its target."""
    folder = find("qwen2.5-coder-0.5b")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 40e6
    stored, ids = read_stored(folder), read_draft_ids(folder)
    assert weights_file(folder).name == PACKED and stored.config.shape.hidden_size == 896
    assert ids is not None and 16384 <= len(ids) < 20000 and bool((ids.diff() > 0).all()) and int(ids[-1]) < 151936
    assert all(bool(tensor.isfinite().all()) for tensor in stored.tensors.values())
    books = [tensor for name, tensor in stored.tensors.items() if name.endswith("_codebook")]
    assert [len(book_VR) for book_VR in books] == [151936, 151936]
    assert all(bool(book_VR[ids].any(dim=1).all()) and int(book_VR.any(dim=1).sum()) == len(ids) for book_VR in books)


def test_the_larger_coder_s_is_that_of_the_smaller_with_its_head() -> None:
    """Narrower than its target, among the same tokens, and the mask token has a row."""
    folder = find("qwen2.5-coder-1.5b")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 61e6 and weights_file(folder).name == PACKED
    stored, known = read_stored(folder), read_draft_ids(find("qwen2.5-coder-0.5b"))
    ids, head_VD = stored.vocabulary
    assert (stored.config.shape.hidden_size, stored.config.target_hidden_size) == (896, 1536)
    assert ids is not None and known is not None and head_VD is not None and head_VD.shape == (len(ids), 896)
    assert set(ids.tolist()) == {*known.tolist(), stored.config.mask_token_id}


def test_the_text_is_plain_decodings_in_fewer_passes(llm: LLM) -> None:
    prompt = llm.encode_chat([{"role": "user", "content": QUESTION}])
    (fast,) = llm.generate_ids([prompt], SamplingParams(max_tokens=MAX_TOKENS))
    llm.use_drafter("none")
    (plain,) = llm.generate_ids([prompt], SamplingParams(max_tokens=MAX_TOKENS))
    llm.use_drafter("default")
    assert fast.token_ids == plain.token_ids
    assert fast.stats.tokens_per_round > 1.5


@pytest.mark.nightly
def test_drafts_are_those_of_the_authors_package(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights in PyPI's dflash 0.1.0 over Transformers' Llama: the same rounds, hence the same drafts and
    text.

    Its authors' package drafts among all tokens: so does ours here. Rounds of other weights: test_dflash2_reference.py.
    """
    # dense: beside a target read in blocks the drafter is rounded to eight bits
    llm = LLM(MODEL, dtype="float32", max_batch=1, max_len=256, speculate="full", weight_format="dense")
    assert isinstance(llm.drafter, DFlash2Drafter)
    assert {tensor.dtype for tensor in llm.drafter.network.state_dict().values()} == {torch.bfloat16}
    llm.use_drafter(DFlash2Drafter(llm.drafter.network))
    assert isinstance(llm.drafter, DFlash2Drafter)
    prompt = llm.encode_chat([{"role": "user", "content": QUESTION}])
    own: list[list[int]] = []
    propose = llm.drafter.propose

    def record(batch: Batch) -> DraftBlock:
        block = propose(batch)
        own.append(block.tokens_B[0])
        return block

    with monkeypatch.context() as patched:
        patched.setattr(llm.drafter, "propose", record)
        (answer,) = llm.generate_ids([prompt], SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))

    raw = json.loads((shipped / "config.json").read_text())
    reference = dflash.DFlash2DraftModel(transformers.Qwen3Config(**raw)).eval()
    llm.drafter.network.codebook_suffix = ".weight"  # as the package's own state has it
    reference.load_state_dict({name: tensor.float() for name, tensor in llm.drafter.network.of_file().items()})
    target = transformers_model(resolve(MODEL), torch.float32)
    theirs: list[list[int]] = []
    select = reference.candidate_selector.select

    def keep(*arguments: Any) -> Any:
        chosen = select(*arguments)
        theirs.append(chosen[0][0].tolist())
        return chosen

    reference.candidate_selector.select = keep
    with torch.inference_mode():
        tokens = dflash.dflash_generate(reference, target, torch.tensor([prompt]), MAX_TOKENS, None)[0].tolist()
    assert tokens[: len(prompt) + MAX_TOKENS] == prompt + answer.token_ids
    num_compared = 0
    for mine, other in zip([drafts for drafts in own if drafts], theirs, strict=False):
        if len(other) < llm.drafter.num_drafted:
            break  # its last blocks have fewer slots, ours are read in part: other drafts
        assert mine == other[: len(mine)]
        num_compared += len(mine)
    assert num_compared > 7 * 4
