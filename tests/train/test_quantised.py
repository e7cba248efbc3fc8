"""Features in 8 bits: near what they were, also beside loud dimensions, in half the space."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_training import HIDDEN, documents, tiny_decoder

from paceline.train.features.hidden_states import (
    CachedFeatures,
    Features,
    OnlineFeatures,
    cache_features,
    measure_scale,
)
from paceline.train.features.quantised import Int8

TAPS = (0, 2)


def loud(dtype: torch.dtype = torch.float32) -> Features:
    """Two layers of 64; one dimension is five hundred times louder, one position a hundred times."""
    taps_SF = torch.randn(200, 128, generator=torch.Generator().manual_seed(0))
    taps_SF[:, 64:] *= 0.01
    taps_SF[:, 5] *= 500.0
    taps_SF[17] *= 100.0
    return Features(taps_SF.to(dtype), taps_SF[:, :64].to(dtype))


class Once:
    def of(self, number: int) -> Features:
        return loud()


def errors(decoded: Features, exact: Features) -> torch.Tensor:
    """Share of each dimension's energy that is error, at positions that are not loud."""
    quiet = torch.arange(200) != 17
    return (decoded.taps_SF - exact.taps_SF)[quiet].square().mean(0) / exact.taps_SF[quiet].square().mean(0)


def test_loud_dimensions_and_positions_leave_the_others_their_levels() -> None:
    features = loud()
    scale_F, _ = measure_scale(Once(), documents()[:1])
    form = Int8(scale_F, 2, torch.float32)
    decoded = form.decode(form.encode(features))
    assert errors(decoded, features).max() < 1e-3, "every dimension alone"
    assert (
        decoded.final_SD is not None
        and features.final_SD is not None
        and torch.equal(decoded.final_SD, features.final_SD)
    )
    plain = Int8(torch.ones(128), 2, torch.float32)
    worse = (plain.decode(plain.encode(features)).taps_SF - features.taps_SF).square().mean(
        0
    ) / features.taps_SF.square().mean(0)
    assert worse.max() > 0.05, "without scales of their own they would not"


def test_zeros_and_the_dtype_stay() -> None:
    form = Int8(torch.ones(128), 2, torch.bfloat16)
    decoded = form.decode(form.encode(Features(torch.zeros(3, 128, dtype=torch.bfloat16), None)))
    assert decoded.taps_SF.dtype == torch.bfloat16 and not decoded.taps_SF.any()


@pytest.mark.slow
def test_files_in_8_bits(tmp_path: Path) -> None:
    docs, source = documents(), OnlineFeatures(tiny_decoder(), documents(), TAPS, needs_final=False)
    form = Int8(measure_scale(source, docs)[0], len(TAPS), torch.float32)
    kept = cache_features(CachedFeatures(tmp_path, docs, form), source)
    num_bytes = sum(map(len, docs)) * form.bytes_of(source.bytes_per_position)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert num_bytes == sum(map(len, docs)) * (2 * HIDDEN + 8) and num_bytes <= written < num_bytes + 10 * 1000
    for number in range(10):
        exact, near = source.of(number).taps_SF, kept.of(number).taps_SF
        assert torch.nn.functional.cosine_similarity(exact, near).min() > 0.999
    held = form.coder(source.of(3))
    assert torch.equal(held().taps_SF, kept.of(3).taps_SF), "in memory as on disk"
