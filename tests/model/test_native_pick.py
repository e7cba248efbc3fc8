"""The likeliest of a row, DFlash 2's candidates and the walk through them by the native library, to the bit."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from native_models import ISAS, needs_library, use
from torch import Tensor

from paceline.draft.dflash2.selector import Picks, WalkedReading
from paceline.errors import NativeError
from paceline.model.native import library as native_lib
from paceline.model.native.decoder import pack

pytestmark = needs_library

INFINITE, NAN = float("inf"), float("nan")


def grid(rows: int, size: int, steps: int) -> Tensor:
    """Logits on a coarse grid: what differs has another weight, and much is equal."""
    return torch.randint(-steps, steps + 1, (rows, size), generator=torch.Generator().manual_seed(size)) / 8


def first(logits_V: Tensor, count: int) -> list[int]:
    """The likeliest by their weights, of equals the lowest ids; all that is e^-87 as likely as the first or less weighs
    0."""
    below_V = logits_V - logits_V.max()
    below_V[below_V < -87] = -INFINITE
    return sorted(range(len(below_V)), key=lambda each: (-float(below_V[each]), each))[:count]


def awkward(size: int) -> Tensor:
    """Rows with ties, sorted ones, far apart ones, and masked ones, of which few or none are left among the first."""
    ties, masked, apart = grid(2, size, 3), grid(4, size, 80), grid(3, size, 40)
    masked[0, 1::2] = -INFINITE
    masked[1, : size - 1 - size // 9] = -INFINITE
    masked[2, torch.arange(size) % 1000 > 0] = -INFINITE
    masked[3, : size // 2] = 300.0
    apart[1], apart[2] = apart[0].sort().values * 8, apart[0].sort(descending=True).values
    return torch.cat([ties, torch.zeros(1, size), masked, apart])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "inverse"), [(1, 1.0), (16, 0.25), (257, 1.0), (4095, 0.25), (4096, 1.0), (12288, 0.25)]
)
def test_the_likeliest_and_of_equals_the_lowest(size: int, inverse: float) -> None:
    """At temperature 1 and at 4."""
    logits_KV = awkward(size)
    expected = [first(logits_V * inverse, 40) for logits_V in logits_KV]
    exact_KV = (logits_KV * inverse).double().log_softmax(-1)
    for isa, count in product(ISAS, {1, min(16, size), min(40, size)}):
        use(isa)
        ids_KM, logs_KM = native_lib.top_logprobs(logits_KV, count, inverse)
        assert ids_KM == [ids[:count] for ids in expected], isa
        actual = torch.tensor(logs_KM, dtype=torch.float64)
        torch.testing.assert_close(actual, exact_KV.gather(1, torch.tensor(ids_KM)), atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [9, 70, 4500])
def test_rows_that_are_no_distribution(size: int, isa: str) -> None:
    """Each says so and leaves its neighbours alone, wherever it is that a number is wrong."""
    use(isa)
    for at in (0, 7, size // 2, size - 1):
        logits_KV = grid(4, size, 40)
        logits_KV[0, at], logits_KV[1, at], logits_KV[2] = NAN, INFINITE, -INFINITE
        ids_KM, logs_KM = native_lib.top_logprobs(logits_KV, 5, 1.0)
        assert ids_KM == [[0] * 5] * 3 + [first(logits_KV[3], 5)]
        assert [all(map(math.isnan, logs_M)) for logs_M in logs_KM] == [True, True, True, False]


def picked(dtype: torch.dtype, books: torch.dtype, rows: int, slots: int, size: int, count: int, rank: int) -> None:
    """Scores as they are defined, every product and every sum rounded, in the order of the rank."""
    generator = torch.Generator().manual_seed(rank)
    vocabulary = size + 9
    predecessors, successors = (torch.randn(vocabulary, rank, generator=generator).to(books) for _ in range(2))
    ids_V = torch.randperm(vocabulary, generator=generator)[:size].int()
    logits_BKV = grid(rows * slots, size, 60).view(rows, slots, size)
    logits_BKV[rows - 1, slots - 1, size // 2] = NAN
    # A gate that is one: what it makes of hidden states is known to the bit.
    gate = pack([torch.eye(rank, rank + 3).to(dtype)], dtype)
    hidden_BKD = torch.randn(rows, 1 + slots, rank + 3, generator=generator).to(dtype)[:, 1:]
    anchors = torch.randint(vocabulary, (rows,), generator=generator).tolist()
    picker = native_lib.Picker(count, (predecessors, successors), gate, dtype, ids_V)
    chosen_BKM, tokens_BKM, scores_BKMM = picker.pick(anchors, logits_BKV, hidden_BKD)

    ids_TM, logs_TM = native_lib.top_logprobs(logits_BKV.flatten(0, 1), count, 1.0)
    assert chosen_BKM.flatten(0, 1).tolist() == ids_TM
    assert torch.equal(tokens_BKM, ids_V[chosen_BKM.long()])
    logs_BKM, tokens_BKM = torch.tensor(logs_TM).view(rows, slots, count), tokens_BKM.long()
    before_BKM = torch.cat([torch.tensor(anchors)[:, None, None].expand(-1, 1, count), tokens_BKM[:, :-1]], dim=1)
    gated_BKMR = predecessors[before_BKM].float() * hidden_BKD[:, :, None, :rank].float()
    sums_BKMM = torch.zeros(rows, slots, count, count)
    for at in range(rank):
        sums_BKMM += gated_BKMR[..., at][..., None] * successors[tokens_BKM][..., at].float()[:, :, None]
    expected = logs_BKM[:, :, None] + sums_BKMM
    assert expected[-1, -1].isnan().all() and not expected[:, :-1].isnan().any()
    assert torch.equal(scores_BKMM.nan_to_num(1e9), expected.nan_to_num(1e9))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_candidates_and_scores_to_the_bit(isa: str, num_threads: int) -> None:
    use(isa, num_threads)
    picked(torch.bfloat16, torch.bfloat16, rows=1, slots=7, size=4200, count=16, rank=64)
    picked(torch.float32, torch.float32, rows=3, slots=7, size=500, count=6, rank=8)
    picked(torch.bfloat16, torch.float32, rows=2, slots=3, size=97, count=16, rank=33)
    picked(torch.float32, torch.bfloat16, rows=2, slots=2, size=40, count=19, rank=5)


def test_the_gate_multiplies_hidden_states() -> None:
    """One candidate whose codebook rows are ones: its score is the sum of the gates."""
    generator = torch.Generator().manual_seed(1)
    gate_RD, hidden_BKD = torch.randn(40, 70, generator=generator), torch.randn(2, 3, 70, generator=generator)
    ones = torch.ones(8, 40)
    picker = native_lib.Picker(1, (ones, ones), pack([gate_RD], torch.float32), torch.float32, None)
    logits_BKV = torch.full((2, 3, 8), -INFINITE)
    logits_BKV[..., 5] = 2.0
    chosen_BKM, tokens_BKM, scores_BKMM = picker.pick([0, 1], logits_BKV, hidden_BKD)
    assert chosen_BKM.unique().tolist() == tokens_BKM.unique().tolist() == [5]
    torch.testing.assert_close(scores_BKMM[..., 0, 0], (hidden_BKD @ gate_RD.T).sum(-1), atol=1e-4, rtol=1e-4)


def test_tokens_outside_the_codebooks_are_refused() -> None:
    book, gate, hidden_BKD = torch.zeros(8, 4), pack([torch.eye(4)], torch.float32), torch.zeros(1, 2, 4)
    for ids_V, anchor in ((torch.tensor([1, 7, 8], dtype=torch.int32), 0), (None, 8), (None, -1)):
        picker = native_lib.Picker(2, (book, book), gate, torch.float32, ids_V)
        with pytest.raises(NativeError, match="outside the codebooks"):
            picker.pick([anchor], torch.tensor([[[0.0, 1.0, 2.0]] * 2]), hidden_BKD)


def test_a_walk_is_that_of_tensor_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    for wrong in (None, NAN, INFINITE, -INFINITE):
        for count in (1, 5, 16):
            scores_KMM = torch.randint(-9, 9, (7, count, count), generator=generator) / 4
            scores_KMM[1, 0, count - 1] = 9.0
            if wrong is not None:
                scores_KMM[4] = wrong
            if goes_on := wrong is None or (wrong == -INFINITE and count > 1):
                scores_KMM[4, :, 3 % count] = 0.5
            tokens_KM = torch.arange(count).expand(1, 7, count)
            reading = WalkedReading(Picks(tokens_KM, tokens_KM, scores_KMM[None]), count)
            for inverse in (1.0, 1 / 0.7, 1e10):
                places, logprobs = native_lib.walk(scores_KMM, inverse)
                with monkeypatch.context() as patch:
                    patch.setattr(native_lib, "load", lambda: None)
                    expected = reading._walk(0, 7, inverse)
                assert places == expected[0] and len(places) == (7 if goes_on else 4)
                assert logprobs == pytest.approx(expected[1], rel=1e-12, abs=1e-15)
