"""A GGUF file as a Hugging Face folder: its config, its tokenizer, and float32 weights equal to the dequantised ones.

    .venv/bin/python experiments/gguf_to_folder.py smollm2-135m folder

For programs that read a folder and no GGUF file, vLLM among them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from paceline.hub import resolve
from paceline.model.gguf.to_folder import LAST_FILE, write_folder


def folder_of(model: str, home: Path = Path(sys.prefix) / "models") -> Path:
    """The folder of a built-in, made once, by default in this Python environment, beside the files of the other
    programs."""
    folder = home / model
    if not (folder / LAST_FILE).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        write_folder(resolve(model), folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file or a built-in name")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(write_folder(resolve(args.model), args.folder))
