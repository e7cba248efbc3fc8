"""Damaged GGUF files: each is read or refused in one sentence, never a crash, a hang or a large allocation.

    python experiments/fuzz_gguf.py --cases 10000        # some minutes; the seed of a case is its number

A small Qwen2 model in mixed formats is written once. Each case changes some bytes of its header or of its tensors, or cuts it,
and then does what a user would: config, tokenizer, weights as they are stored, packed for the native pass, one pass of three
tokens. The reading runs in a process with a limit of memory, which is started again behind a case that kills it.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Quant

from paceline.errors import PacelineError
from paceline.model.blocks import BLOCK_KINDS, Blocks, quantise
from paceline.model.checkpoint import check_tensors, load_config, load_tensors
from paceline.model.native_decoder import NativeDecoder
from paceline.model.target import ForwardBatch
from paceline.model.tokenizer import Tokenizer

HIDDEN, INNER, VOCAB, LAYERS = 256, 256, 300, 2
CASE_S, EXTRA_BYTES = 20, 3 << 30
"""Most seconds of a case, and memory beyond what the libraries take."""
VALUES = (b"\x00", b"\xff", b"\x7f", b"\xff" * 4, b"\xff" * 8, b"\x00\x00\x00\x80", b"\x00\x7e", b"\x00\xfc")


def write(path: Path) -> int:
    """A whole file; returns where its tensors begin."""
    writer = gguf.GGUFWriter(path, "qwen2")
    for key, value in (("block_count", LAYERS), ("embedding_length", HIDDEN), ("feed_forward_length", INNER)):
        writer.add_uint32(f"qwen2.{key}", value)
    for key, value in (("attention.head_count", 4), ("attention.head_count_kv", 2), ("context_length", 64)):
        writer.add_uint32(f"qwen2.{key}", value)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen2.rope.freq_base", 10000.0)
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    pair = letters[0] + letters[1]
    tokens = [*letters, pair, *(f"<{index}>" for index in range(VOCAB - len(letters) - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(letters) + 1) + [3] * (VOCAB - len(letters) - 1))
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_eos_token_id(VOCAB - 1)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    generator, kinds = torch.Generator().manual_seed(0), 0
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        for name, rows, cols in (("attn_q", HIDDEN, HIDDEN), ("attn_k", 128, HIDDEN), ("attn_v", 128, HIDDEN)):
            shapes[f"blk.{layer}.{name}.weight"], shapes[f"blk.{layer}.{name}.bias"] = (rows, cols), (rows,)
        shapes[f"blk.{layer}.attn_output.weight"] = (HIDDEN, HIDDEN)
        shapes |= {f"blk.{layer}.ffn_{name}.weight": (INNER, HIDDEN) for name in ("gate", "up", "down")}
        shapes |= {f"blk.{layer}.{name}_norm.weight": (HIDDEN,) for name in ("attn", "ffn")}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator) * 0.05
        kind = BLOCK_KINDS[kinds % len(BLOCK_KINDS)]
        kinds += len(shape) == 2
        blocks = values if kind.startswith("IQ4") else quantise(values, kind)
        if isinstance(blocks, Blocks):
            writer.add_tensor(name, blocks.data.numpy(), raw_dtype=Quant[kind])
        else:
            writer.add_tensor(name, values.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.stat().st_size - sum(-(-tensor.n_bytes // 32) * 32 for tensor in gguf.GGUFReader(path).tensors)


def damaged(whole: bytes, header: int, seed: int) -> bytes:
    rng, data = random.Random(seed), bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(header) if rng.random() < 0.5 else rng.randrange(header, len(data) - 8)
        change = rng.choice([*VALUES, bytes([rng.randrange(256)]), struct.pack("<Q", rng.randrange(2**63))])
        data[at : at + len(change)] = change
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.05 else data)


def read(path: Path) -> str:
    """What becomes of a file: read, or the kind of the error."""
    try:
        config = load_config(path)
        Tokenizer.from_path(path).encode("some text")
        tensors = check_tensors(config, load_tensors(path, keep_blocks=True), path)
        target = NativeDecoder(config, tensors, max_len=min(config.max_position, 64), dtype=torch.bfloat16)
        row = target.cache.allocate()
        assert row is not None
        with torch.inference_mode():
            target.forward(ForwardBatch([row], [0], [3], [1, 2, 3])).best_T()
    except PacelineError as error:
        return type(error).__name__
    return "read"


def read_cases(path: Path, header: int, first: int, end: int) -> None:
    """In the process with limits: a line for each case before it, so that one that kills is known."""
    warnings.simplefilter("ignore")
    read(path)  # what libraries allocate once does not count
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + EXTRA_BYTES, now + EXTRA_BYTES))
    whole, case_path = path.read_bytes(), path.with_name("case.gguf")
    for case in range(first, end):
        print(f"case {case}", flush=True)
        case_path.write_bytes(damaged(whole, header, case))
        signal.alarm(CASE_S)
        print(f"is {read(case_path)}", flush=True)
        signal.alarm(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--child", nargs=4, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        path, header, first, end = args.child
        read_cases(Path(path), int(header), int(first), int(end))
        return 0
    outcomes, faults, next_case, end = Counter[str](), [], args.first, args.first + args.cases
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "whole.gguf"
        header = write(path)
        assert read(path) == "read", "the whole file is not read"
        while next_case < end:
            command = [sys.executable, __file__, "--child", str(path), str(header), str(next_case), str(end)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = done.stdout.split("\n")
            outcomes.update(line[3:] for line in lines if line.startswith("is "))
            started = [int(line[5:]) for line in lines if line.startswith("case ")]
            if done.returncode == 0:
                break
            case = started[-1] if started else next_case
            last = done.stderr.strip().splitlines()[-1:] or [f"killed by signal {-done.returncode}"]
            faults.append({"case": case, "exit_status": done.returncode, "said": last[0][:200]})
            next_case = case + 1
    print(json.dumps({"cases": args.cases, "outcomes": dict(outcomes.most_common()), "faults": faults}, indent=1))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
