"""llama.cpp for `decode_vs_peers.py`: the bf16 file made from our model, and greedy decoding through llama_decode.

llama.cpp comes as the sources in llama-cpp-python's sdist, built by `decode_vs_peers.sh` for this processor with its defaults
(OpenMP, llamafile's products, repacking). Of the bindings only the plain C calls are used, so that Python costs some 20 us a
step: one llama_decode, one argmax over the logits.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from decode_vs_peers_run import Prompts, Run, groups
from gguf import GGMLQuantizationType as Quant

COMMITS = {"0.3.36": "0c1e57098 (0.5.0-dev)"}
"""llama.cpp's commit and version in a release of llama-cpp-python, from its changelog."""
TRIAL_TOKENS = 24
UBATCH = 512
"""llama.cpp's default: prompt tokens that are multiplied together."""
BENCH_PROMPT = 128
"""Tokens before the timed ones in llama-batched-bench; llama-bench has none."""


def llama_version() -> str:
    release = version("llama-cpp-python")
    return f"{COMMITS.get(release, 'unknown commit')}, from llama-cpp-python {release}"


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


@llama_cpp.llama_log_callback
def _only_errors(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    if level == 4 and text:  # GGML_LOG_LEVEL_ERROR
        print(text.decode(errors="replace"), end="", file=sys.stderr)


class LlamaModel:
    """A GGUF file in llama.cpp."""

    def __init__(self, name: str, path: Path, threads: int) -> None:
        llama_cpp.llama_log_set(_only_errors, None)
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.name, self.threads = name, threads
        self.handle: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.handle))
        self.weight_bytes = llama_cpp.llama_model_size(self.handle)


class Llama:
    """A context of llama.cpp for so many sequences; a step is one llama_decode with one token of each."""

    reads_once_per_token = True

    def __init__(self, model: LlamaModel, streams: int, max_len: int, flash: bool, unified: bool) -> None:
        """`max_len`: tokens of the longest prompt with its answer; `unified`: one cache for all sequences, not one each."""
        self.name, self.streams, self.weight_bytes = model.name, streams, model.weight_bytes
        self._vocab_size = model.vocab_size
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = -(-max_len // 256) * 256 * streams
        params.n_ubatch, params.n_seq_max = UBATCH, streams
        params.n_threads = params.n_threads_batch = model.threads
        params.flash_attn_type, params.kv_unified, params.no_perf = int(flash), unified, True
        self._context: Any = llama_cpp.llama_init_from_model(model.handle, params)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        self._memory: Any = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        fields = ("token", "pos", "n_seq_id", "logits")
        arrays = (np.ctypeslib.as_array(getattr(self._batch, each), (params.n_batch,)) for each in fields)
        self._token, self._pos, num_sequences, self._wants_logits = arrays
        num_sequences[:] = 1
        self.about: dict[str, Any] = {"flash_attention": flash, "unified_cache": unified}
        self.about["system"] = llama_cpp.llama_print_system_info().decode()

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def run(self, prompts: Prompts, max_tokens: int) -> Run:
        token_ids: list[list[int]] = []
        prefill_s = 0.0
        began = time.perf_counter()
        for group in groups(prompts, self.streams):
            started = time.perf_counter()
            steps = [self._prefill(group)]
            prefill_s += time.perf_counter() - started
            steps += self._decode(steps[0], [len(ids) for ids in group], max_tokens - 1)
            token_ids += np.stack(steps, axis=1).tolist()
        return Run(token_ids, time.perf_counter() - began, prefill_s)

    def _prefill(self, group: Prompts) -> np.ndarray:
        """All prompts in one call; the first token of each answer."""
        llama_cpp.llama_memory_clear(self._memory, True)
        end = 0
        for sequence, ids in enumerate(group):
            begin, end = end, end + len(ids)
            self._token[begin:end] = ids
            self._pos[begin:end] = range(len(ids))
            self._wants_logits[begin:end] = 0
            self._wants_logits[end - 1] = 1
            for index in range(begin, end):
                self._batch.seq_id[index][0] = sequence
        return self._step(end, len(group))

    def _decode(self, tokens: np.ndarray, lengths: list[int], num_steps: int) -> list[np.ndarray]:
        """`num_steps` more tokens of each answer, from its first and the length of its prompt."""
        rows = len(lengths)
        self._pos[:rows] = lengths
        self._wants_logits[:rows] = 1
        for sequence in range(rows):
            self._batch.seq_id[sequence][0] = sequence
        steps = []
        for _ in range(num_steps):
            self._token[:rows] = tokens
            tokens = self._step(rows, rows)
            steps.append(tokens)
            self._pos[:rows] += 1
        return steps

    def _step(self, num_tokens: int, num_outputs: int) -> np.ndarray:
        self._batch.n_tokens = num_tokens
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status:
            raise SystemExit(f"llama_decode failed ({status})")
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (num_outputs, self._vocab_size)).argmax(axis=1)


def fastest(model: LlamaModel, streams: int, prompts: Prompts, max_len: int) -> Llama:
    """The best of flash attention on and off and, with several sequences, of one cache and one each, by three short runs."""
    ways = list(product((True, False), (False, True)[: min(streams, 2)]))
    contenders = [Llama(model, streams, max_len, flash, unified) for flash, unified in ways]
    rates: list[list[float]] = [[] for _ in ways]
    for _ in range(3):
        for contender, seen in zip(contenders, rates, strict=True):
            seen.append(contender.run(prompts[:streams], TRIAL_TOKENS).decode_tokens_per_s or 0.0)
    names = [("flash" if flash else "no flash") + (", one cache" if unified else "") for flash, unified in ways]
    tried = {name: round(max(seen), 1) for name, seen in zip(names, rates, strict=True)}
    best = contenders[max(range(len(ways)), key=lambda index: max(rates[index]))]
    for contender in contenders:
        if contender is not best:
            contender.close()
    best.about["tried_tokens_per_s"] = tried
    return best


def own_benches(path: Path, streams: list[int], threads: int, tokens: int, rounds: int) -> dict[str, Any]:
    """What llama-bench and llama-batched-bench print of decoding this file, flash attention off and on."""
    folder, common = Path(os.environ["LLAMA_CPP_LIB_PATH"]), ["-m", str(path), "-t", str(threads)]
    single = ["-p", "0", "-n", str(tokens), "-r", str(rounds), "-fa", "0,1", "-o", "json"]
    single_lines = json.loads(_output([str(folder / "llama-bench"), *common, *single]))
    found: dict[str, Any] = {"llama-bench": [each | {"model_filename": path.name} for each in single_lines]}
    window = (BENCH_PROMPT + tokens) * max(streams)
    lengths = ["-npp", str(BENCH_PROMPT), "-ntg", str(tokens), "-npl", ",".join(map(str, streams))]
    batched = [str(folder / "llama-batched-bench"), *common, *lengths, "-c", str(window), "--output-format", "jsonl"]
    printed = [_output([*batched, "-fa", flash]) for flash in ("off", "on")]
    lines = (line for text in printed for line in text.splitlines() if line.startswith("{"))
    found["llama-batched-bench"] = [json.loads(line) for line in lines]
    return found


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {done.stderr[-500:]}")
    return done.stdout
