"""A drafter's folder with its matrices in 8 bits, as decoding multiplies them: half the bytes, for a package or a download.

    python recipes/pack_drafter.py runs/coder-drafter/run/drafter --out paceline/draft/shipped/qwen2.5-coder-0.5b

paceline alone reads such a folder; `read_drafter(FOLDER).save(OTHER)` writes one for other engines.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from paceline.draft.checkpoint import weights_file
from paceline.draft.dflash2 import read_drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path, help="folder of a DFlash or DFlash 2 checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    read_drafter(given.drafter).save(given.out, in_8_bits=True)
    if (given.drafter / "README.md").is_file():
        shutil.copy(given.drafter / "README.md", given.out / "README.md")
    before, after = (weights_file(folder).stat().st_size for folder in (given.drafter, given.out))
    print(f"{before / 1e6:.1f} MB -> {after / 1e6:.1f} MB: {weights_file(given.out)}")


if __name__ == "__main__":
    main()
