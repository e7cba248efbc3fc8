"""A GGUF file with its quantised matrices as bfloat16, for programs that should read what we expand.

.venv/bin/python experiments/gguf_to_bf16.py smollm2-135m smollm2-135m-bf16.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType as Quant

from paceline.hub import resolve


def write_bf16(source: Path, target: Path) -> Path:
    """The file with every quantised matrix as bfloat16, made when it is not there; what is float32 in it (norms) stays so.

    The numbers are those of our converted folder, rounded once; the rows of q and k stay in llama.cpp's order, and the
    metadata and the tokenizer as they are.
    """
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source)
    draft = target.with_suffix(".part")
    writer = gguf.GGUFWriter(draft, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type", "general.quantization_version"):
            continue
        inner = entry.types[1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), entry.types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for stored in reader.tensors:
        values = gguf.dequantize(stored.data, stored.tensor_type).reshape([int(size) for size in reversed(stored.shape)])
        if stored.tensor_type == Quant.F32:
            writer.add_tensor(stored.name, values)
        else:
            writer.add_tensor(stored.name, gguf.quantize(values, Quant.BF16), raw_dtype=Quant.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    draft.replace(target)
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file or a built-in name")
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    print(write_bf16(resolve(args.model), args.target))
