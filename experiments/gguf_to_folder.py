"""A GGUF file as a Hugging Face folder: its config, its tokenizer, and float32 weights equal to the dequantised ones.

    .venv/bin/python experiments/gguf_to_folder.py smollm2-135m folder

For programs that read a folder and no GGUF file, vLLM among them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import save_file

from paceline.hub import resolve
from paceline.model import checkpoint
from paceline.model.tokenizer import Tokenizer


def write_folder(gguf_file: Path, folder: Path) -> Path:
    """Write a new folder; returns it. Raises ModelFileError, or OSError when it is there or cannot be written."""
    config, tokenizer = checkpoint.load_config(gguf_file), Tokenizer.from_path(gguf_file)
    folder.mkdir(parents=True)
    weights = dict(checkpoint.check_tensors(config, checkpoint.load_tensors(gguf_file), gguf_file))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    names, ends = tokenizer.special_tokens, list(tokenizer.eos_token_ids)
    # Not the model's own class of tokenizer: Transformers 5 rebuilds such classes with their default word splitting.
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    words |= {"chat_template": tokenizer.chat_template} if tokenizer.chat_template else {}
    ids = {f"{name}_id": tokenizer.backend.token_to_id(names.get(name, "")) for name in ("bos_token", "pad_token")}
    special = ids | {"eos_token_id": ends[0] if len(ends) == 1 else ends}
    shape = checkpoint.config_json(gguf_file) | {"torch_dtype": "float32"} | special
    for name, values in (("tokenizer_config", words), ("config", shape), ("generation_config", special)):
        (folder / f"{name}.json").write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return folder


def folder_of(model: str, home: Path = Path(sys.prefix) / "models") -> Path:
    """The folder of a built-in, made once, by default in this Python environment, beside the files of the other programs."""
    folder = home / model
    if not (folder / "generation_config.json").is_file():  # the last file written
        shutil.rmtree(folder, ignore_errors=True)
        write_folder(resolve(model), folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file or a built-in name")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(write_folder(resolve(args.model), args.folder))
