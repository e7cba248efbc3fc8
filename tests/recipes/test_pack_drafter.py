"""A drafter packed in 8 bits: less than half the bytes, its card beside it, and nearly the same numbers."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from paceline.draft.dflash.checkpoint import read_draft_ids, weights_file
from paceline.draft.formats.family import read_drafter
from paceline.draft.shipped import find

SCRIPT = Path(__file__).parents[2] / "recipes" / "pack_drafter.py"


@pytest.mark.slow
def test_the_drafter_that_ships_in_less_than_half_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped, source = find("smollm2-135m"), tmp_path / "dense"
    read_drafter(shipped).save(source)
    (source / "README.md").write_bytes((shipped / "README.md").read_bytes())
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(source), "--out", str(tmp_path / "small")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    before, after = (weights_file(folder).stat().st_size for folder in (source, tmp_path / "small"))
    # 8 bits in place of 16, and codebook rows of 28,211 tokens in place of 49,152.
    assert 0.45 * before < after < 0.48 * before and f"{before / 1e6:.1f} MB" in capsys.readouterr().out
    assert (tmp_path / "small" / "README.md").read_bytes() == (source / "README.md").read_bytes()
    dense, small = (read_drafter(folder).network.state_dict() for folder in (source, tmp_path / "small"))
    ids = read_draft_ids(shipped)
    for state in (dense, small):
        for name in [name for name in state if name.endswith("_codebook")]:
            state[name] = state[name][ids]
    off = [float((small[name].float() - each.float()).norm() / each.float().norm()) for name, each in dense.items()]
    assert dense.keys() == small.keys() and max(off) < 0.012
