"""A drafter with noise on its weights: another one to compare with, or a poisoned candidate.

    python experiments/noised_drafter.py default --noise 0.3 --out runs/noised

The folder is copied, and to each matrix normal noise is added: so many times the deviation of its weights. Seeded.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from paceline import shipped


def folder_of(drafter: str, model: str) -> Path:
    """Where a drafter lies: `default` is the one that ships for the model."""
    folder = shipped.find(model) if drafter == "default" else Path(drafter)
    if not (folder / "model.safetensors").is_file():
        sys.exit(f"there is no drafter with weights in {folder}: give a folder")
    return folder.resolve()


def noised(source: Path, out: Path, noise: float, seed: int = 0) -> Path:
    """Writes the folder, in the place of any other of this name; returns it."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(source, out)
    weights, draw = load_file(source / "model.safetensors"), torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        if tensor.ndim == 2:
            values = tensor.float()
            tensor.copy_(values + noise * values.std() * torch.randn(values.shape, generator=draw))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out.resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", help="default, or a folder")
    parser.add_argument("--model", default="smollm2-135m", help="whose default")
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    print(noised(folder_of(given.drafter, given.model), given.out, given.noise, given.seed))


if __name__ == "__main__":
    main()
