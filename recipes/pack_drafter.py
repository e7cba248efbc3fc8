"""Stores a drafter's matrices in 8 bits, as decoding multiplies them: half the bytes, for a package or a download.

    python recipes/pack_drafter.py runs/coder-drafter/run/drafter --out drafters/paceline_drafters/qwen2.5-coder-0.5b

A DFlash 2 drafter with a draft vocabulary loses the codebook rows of all other tokens
(`paceline/draft/formats/packed.py`). A folder that is in 8 bits already is not rounded again: its blocks are copied,
without those rows. paceline alone reads such a folder; `read_drafter(FOLDER).save(OTHER)` writes one for other engines.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from safetensors.torch import save_file

from paceline.draft.dflash.checkpoint import read_draft_ids, weights_file
from paceline.draft.formats.family import read_drafter
from paceline.draft.formats.packed import PACKED, without_rows
from paceline.model.checkpoint import read_tensors


def pack(source: Path, out: Path) -> None:
    """Writes the folder `out`. Raises what reading the source raises, and CacheError."""
    if weights_file(source).name != PACKED:
        read_drafter(source).save(out, in_8_bits=True)
        if (source / "README.md").is_file():
            shutil.copy(source / "README.md", out / "README.md")
        return
    shutil.copytree(source, out, ignore=shutil.ignore_patterns(PACKED))
    if (ids := read_draft_ids(source)) is None:
        shutil.copy(source / PACKED, out / PACKED)
    else:
        save_file(without_rows(read_tensors(source / PACKED), ids), out / PACKED, {"format": "pt"})
        shutil.copymode(source / PACKED, out / PACKED)  # save_file creates files with mode 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path, help="folder of a DFlash or DFlash 2 checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    pack(given.drafter, given.out)
    before, after = (weights_file(folder).stat().st_size for folder in (given.drafter, given.out))
    print(f"{before / 1e6:.1f} MB -> {after / 1e6:.1f} MB: {weights_file(given.out)}")


if __name__ == "__main__":
    main()
