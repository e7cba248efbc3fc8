"""docs/explanation/landmarks.md is what its script makes, and what it promises holds."""

from __future__ import annotations

import runpy
from pathlib import Path

import landmarks
import pytest
from landmarks import PUBLISHED

ROOT = Path(__file__).parents[2]
BEST_LENGTHS = {
    ("DeepSeek-V4-Flash", "token by token"): {1: 2, 4: 1, 8: 0, 32: 6, 128: 4, 256: 4},
    ("DeepSeek-V4-Flash", "in blocks"): {1: 5, 4: 7, 8: 16, 32: 16, 128: 16, 256: 13},
    ("DeepSeek-V4-Pro", "token by token"): {8: 0, 32: 6},
    ("DeepSeek-V4-Pro", "in blocks"): {32: 16},
    ("Qwen3.5-27B-FP8", "in blocks"): {1: 16, 32: 8},
}
"""(model, way to draft) of the walk-through -> batch -> published best draft length."""


@pytest.mark.slow
def test_the_page_is_current() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_landmarks.py"))["render"]()
    assert page == (ROOT / "docs" / "explanation" / "landmarks.md").read_text(encoding="utf-8"), (
        "run python docs/make_landmarks.py"
    )


def test_speedups_of_the_mocked_model_are_within_ten_percent_from_its_plain_rate_alone() -> None:
    """140, 268 and 422 tokens/s over 75, at 2, 4 and 8 tokens a round, and the same by hand."""
    points = [each for each in landmarks.served() if each.system == PUBLISHED["systems"][0]["name"]]
    assert [each.tokens_per_round for each in points] == [2, 4, 8]
    assert [each.published for each in points] == pytest.approx([140 / 75, 268 / 75, 422 / 75])
    assert all(abs(each.error_with) < 0.10 for each in points)
    assert max(abs(each.error_without) for each in points) > 0.10, "without an overhead it is not"
    plain_s = 1 / 75
    bare_s = plain_s - points[0].overhead_ms / 1e3
    by_hand = [count * plain_s / (plain_s + (count - 1) * 0.10 * bare_s) for count in (2, 4, 8)]
    assert [each.within for each in points] == pytest.approx(by_hand, rel=1e-3)


@pytest.mark.slow
def test_misses_are_shown() -> None:
    errors = [abs(each.error_with) for each in landmarks.served()]
    assert max(errors) > 0.3
    text = (ROOT / "docs" / "explanation" / "landmarks.md").read_text(encoding="utf-8")
    assert all(f"{each.error_with:+.1%}" in text for each in landmarks.served())
    assert {140, 268, 422, 558, 875, 1000} <= {each.rate for each in landmarks.served()}


def test_needed_tokens_bring_the_published_speedup() -> None:
    for each in landmarks.served():
        assert each.within * each.needed / each.tokens_per_round == pytest.approx(each.published)


def test_the_walkthrough_is_reproduced() -> None:
    points = list(landmarks.walked())
    assert len(points) == 36
    assert max(abs(each.error) for each in points) < 0.01
    assert all(abs(each.predicted - each.published) < 0.0101 for each in points), "the tables have two places"
    by_statement = {each.quotation: each.predicted for each in points if each.quotation}
    assert by_statement == pytest.approx({"20%": 1.17, "3x": 2.98, "1.0x": 1.0, "1.6x": 1.64}, abs=0.005)
    lengths = {(each.model, each.way, each.batch): each.best_draft_length for each in points}
    for (model, way), published in BEST_LENGTHS.items():
        assert {batch: lengths[model, way, batch] for batch in published} == published, (model, way)


def test_best_lengths_and_experts() -> None:
    assert {each.drafter: each.num_equal for each in landmarks.best_lengths()} == {"DFlash": 7, "MTP": 10}
    assert all(abs(local / measured - 1) < 0.02 for _, measured, _, local in landmarks.experts())
