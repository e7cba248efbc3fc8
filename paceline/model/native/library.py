"""ctypes interface of the native CPU library: matrices, models and passes of `native/api.h`, with Python errors.

Calls release the GIL. The library is next to this file or at PACELINE_NATIVE_LIBRARY; PACELINE_NATIVE=0 disables it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
import weakref
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.errors import NativeError
from paceline.model.native.build import HERE, library_name

ABI_VERSION = 8
FORMAT_NAMES = ["float32", "bfloat16", "Q8_0", "Q4_1", "float16", "Q4_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
FORMAT_NAMES += ["IQ4_NL", "IQ4_XS"]
"""In the order of the library's PnFormat."""
FORMATS = {getattr(torch, name): FORMAT_NAMES.index(name) for name in ("float32", "bfloat16")}
"""Dtypes of inputs, caches and taps (outputs of tapped layers) -> number of the format in the library."""
STAGES = ("embed", "norm", "qkv", "rope", "attend", "output", "gate_up", "down", "head")
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
ROPES = ("main", "local", "none")
GROUP = 16
"""A matrix in a stack (matrices packed one below the other) begins at a multiple of this many rows."""
KEYS = 16
"""The number of positions of each cache row is a multiple of this."""
MAX_HEAD_DIM, MAX_TAPS, MAX_THREADS = 1024, 64, 256


def _fields(*groups: tuple[str, Any]) -> list[tuple[str, Any]]:
    """Fields of a C struct, from groups ("name name ...", type)."""
    return [(name, kind) for names, kind in groups for name in names.split()]


class CExpert(Structure):
    _fields_ = _fields(("gate_up down gate_up_bias down_bias", c_void_p), ("inner_size", c_int32))


class CLayer(Structure):
    _fields_ = _fields(
        ("input_norm mlp_norm attention_out_norm mlp_out_norm q_norm k_norm", c_void_p),
        ("sinks qkv output gate_up down qkv_bias output_bias gate_up_bias down_bias", c_void_p),
        ("window rope is_causal", c_int32),
        ("attention_mix mlp_mix attention_base mlp_base", c_void_p),
        ("mix_taps", c_int32),
        ("experts", POINTER(CExpert)),
        ("router router_bias", c_void_p),
        ("num_experts has_shared", c_int32),
        ("delta_kernel delta_rate delta_step delta_norm", c_void_p),
    )


class CConfig(Structure):
    _fields_ = _fields(
        ("num_layers hidden_size inner_size num_heads num_kv_heads head_dim dtype", c_int32),
        ("eps", c_float),
        ("layers", POINTER(CLayer)),
        ("embedding", c_void_p),
        ("embedding_scale", c_float),
        ("head final_norm cos sin local_cos local_sin", c_void_p),
        ("rotary_dim is_norm_whole", c_int32),
        ("attention_scale attention_cap residual_scale logit_scale logit_cap", c_float),
        ("activation", c_int32),
        ("swiglu_alpha swiglu_limit", c_float),
        ("experts_per_token are_experts_normed has_output_gate", c_int32),
        ("delta_key_heads delta_value_heads delta_key_dim delta_value_dim delta_taps", c_int32),
        ("beside_norm", c_void_p),
        ("adds_to_normed", c_int32),
        ("fc hidden_norm context_kv context_bias", c_void_p),
    )


class CMemory(Structure):
    _fields_ = _fields(("states windows inputs keys changes decays", c_void_p))


class CCache(Structure):
    _fields_ = _fields(
        ("keys values", c_void_p),
        ("layer_stride row_stride head_stride", c_int64),
        ("max_len num_rows", c_int32),
        ("memories", POINTER(CMemory)),
        ("room", c_int32),
    )


class CPass(Structure):
    _fields_ = _fields(
        ("num_rows", c_int32),
        ("rows starts counts tokens hidden", c_void_p),
        ("num_taps", c_int32),
        ("tap_layers taps", c_void_p),
        ("num_logit_rows", c_int32),
        ("logit_rows logits", c_void_p),
        ("logits_stride", c_int64),
        ("argmax stage_s parents held", c_void_p),
        ("num_settles", c_int32),
        ("settle_rows settle_before settle_counts hidden_out experts_read", c_void_p),
    )


class CPick(Structure):
    _fields_ = _fields(
        ("rows size count slots dtype vocabulary rank book_dtype", c_int32),
        ("predecessors successors gate token_of logits anchors hidden", c_void_p),
        ("hidden_stride", c_int64),
        ("chosen tokens scores", c_void_p),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "pn_last_error": (c_char_p, ()),
    "pn_available": (c_char_p, ()),
    "pn_use": (c_int32, (c_char_p,)),
    "pn_in_use": (c_char_p, ()),
    "pn_set_threads": (c_int32, (c_int32,)),
    "pn_num_threads": (c_int32, ()),
    "pn_padded_head_dim": (c_int32, (c_int32,)),
    "pn_matrix_new": (c_void_p, (c_int32, c_void_p, c_void_p, c_int32)),
    "pn_matrix_free": (None, (c_void_p,)),
    "pn_matrix_bytes": (c_int64, (c_void_p,)),
    "pn_matrix_fill": (c_int32, (c_void_p, c_int32, c_int32, c_int32, c_void_p)),
    "pn_matrix_rows": (c_int32, (c_void_p, c_void_p, c_int32, c_int32, c_void_p)),
    "pn_matrix_select": (c_void_p, (c_void_p, c_void_p, c_int32)),
    "pn_matrix_multiply": (c_int32, (c_void_p, c_int32, c_void_p, c_int32, c_void_p)),
    "pn_likeliest": (c_int32, (c_void_p, c_int32, c_int32, c_int32, c_float, c_void_p, c_void_p)),
    "pn_pick": (c_int32, (POINTER(CPick),)),
    "pn_walk": (c_int32, (c_void_p, c_int32, c_int32, c_double, c_void_p, c_void_p)),
    "pn_model_new": (c_void_p, (POINTER(CConfig),)),
    "pn_model_free": (None, (c_void_p,)),
    "pn_forward": (c_int32, (c_void_p, POINTER(CCache), POINTER(CPass))),
    "pn_keep": (c_int32, (c_void_p, POINTER(CCache), c_int32, c_void_p, c_void_p, c_void_p, c_void_p)),
    "pn_inject": (c_int32, (c_void_p, POINTER(CCache), c_int32, c_void_p, c_void_p, c_void_p, c_void_p)),
}


def library_path() -> Path:
    given = os.environ.get("PACELINE_NATIVE_LIBRARY")
    return Path(given) if given else HERE / library_name()


@functools.cache
def load() -> ctypes.CDLL | None:
    """Load the native library. Returns None if PACELINE_NATIVE=0, or if the library's file is missing. Also returns
    None, with a warning, if the file cannot be used."""
    path = library_path()
    if os.environ.get("PACELINE_NATIVE") == "0" or not path.is_file():
        return None
    try:
        library = ctypes.CDLL(str(path))
        version = library.pn_abi_version()
        if version != ABI_VERSION:
            raise OSError(f"it is version {version}, this paceline needs {ABI_VERSION}")
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        warnings.warn(f"{path} cannot be used ({error}): running on PyTorch, slower; reinstall paceline", stacklevel=2)
        return None
    return library


def require() -> ctypes.CDLL:
    """Return the loaded library. Raises NativeError if it cannot be loaded."""
    library = load()
    if library is None:
        raise NativeError(
            "the native library is not there: install a C++ compiler and reinstall paceline, or use PyTorch"
        )
    return library


def multiplies_blocks(dtype: torch.dtype) -> bool:
    """Return True if products in `dtype` are faster with quantised than with dense weights on this processor."""
    return dtype == torch.bfloat16 and require().pn_in_use() != b"portable"


def check(status: int) -> None:
    """Raise NativeError with the library's error message unless `status`, a call's result, is 0."""
    if status != 0:
        raise NativeError(f"native pass: {require().pn_last_error().decode()}")


def pointer(tensor: Tensor | None) -> int | None:
    """Memory address of a contiguous CPU tensor; None for None."""
    if tensor is None:
        return None
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return tensor.data_ptr()


AnyStructure = TypeVar("AnyStructure", bound=Structure)


def filled(struct: AnyStructure, parts: dict[str, Any]) -> AnyStructure:
    """Set fields of a C struct; returns it. `parts`: field -> number, or Matrix or CPU tensor, stored as a pointer."""
    for name, part in parts.items():
        value = part.handle if isinstance(part, Matrix) else pointer(part) if isinstance(part, Tensor) else part
        setattr(struct, name, value)
    return struct


def int32s(values: list[int]) -> Any:
    return (c_int32 * len(values))(*values)


def padded_rows(num_rows: int) -> int:
    """Rows that a matrix occupies in a packed stack of matrices: the next multiple of GROUP (16)."""
    return -(-num_rows // GROUP) * GROUP


class Matrix:
    """A packed weight matrix [rows, cols] of one or more parts: groups of rows, each in one format, such as "Q4_K"."""

    def __init__(self, parts: list[tuple[int, str]], cols: int) -> None:
        """`parts`: (rows, format) of each; all but the last have a multiple of 16 rows."""
        rows, self.formats = [rows for rows, _ in parts], [name for _, name in parts]
        numbers = int32s([FORMAT_NAMES.index(name) for name in self.formats])
        self._adopt(require().pn_matrix_new(len(parts), int32s(rows), numbers, cols), sum(rows), cols)

    def _adopt(self, handle: int | None, rows: int, cols: int) -> None:
        library = require()
        if not handle:
            raise NativeError(f"matrix of {rows} x {cols}: {library.pn_last_error().decode()}")
        self.handle, self.rows, self.cols = handle, rows, cols
        self.num_bytes: int = library.pn_matrix_bytes(handle)
        weakref.finalize(self, library.pn_matrix_free, handle)

    def fill(self, first_row: int, source: Tensor, format: str | None = None) -> None:
        """Write n rows of the matrix, from `first_row` on; they must belong to one part. `source` [n, cols] has the
        part's dtype; float32 is also accepted for a bfloat16 part, and bfloat16 or float16 for a float32 part. For a
        quantised part, `source` has GGUF blocks of type `format`, uint8 [n, bytes]."""
        source = source.contiguous()
        given = FORMAT_NAMES.index(format or str(source.dtype).removeprefix("torch."))
        check(require().pn_matrix_fill(self.handle, first_row, source.shape[0], given, source.data_ptr()))

    def rows_of(self, ids: list[int], dtype: torch.dtype) -> Tensor:
        """Return the rows `ids` as a dense tensor [len(ids), cols] in `dtype`, such as the embeddings of tokens."""
        out = torch.empty(len(ids), self.cols)
        check(require().pn_matrix_rows(self.handle, int32s(ids), len(ids), FORMATS[dtype], out.data_ptr()))
        return out.to(dtype)

    def select(self, ids: list[int]) -> Matrix:
        """Return a matrix of the rows `ids`, in the same format. Raises NativeError if this one has several parts."""
        part = Matrix.__new__(Matrix)
        part.formats = self.formats
        part._adopt(require().pn_matrix_select(self.handle, int32s(ids), len(ids)), len(ids), self.cols)
        return part

    def multiply(self, x_TD: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply inputs x [T, cols], first rounded to `dtype`, by the matrix: x W^T as float32 [T, rows]."""
        x_TD = x_TD.float().contiguous()
        out = torch.empty(x_TD.shape[0], self.rows)
        arguments = (self.handle, FORMATS[dtype], x_TD.data_ptr(), x_TD.shape[0], out.data_ptr())
        check(require().pn_matrix_multiply(*arguments))
        return out


class Model:
    """A decoder model of the native library, built from a C struct CConfig. `keep`: objects to which pointers in the
    struct lead; the model holds references to them."""

    def __init__(self, config: CConfig, keep: list[object]) -> None:
        library = require()
        handle = library.pn_model_new(byref(config))
        if not handle:
            raise NativeError(f"native model: {library.pn_last_error().decode()}")
        self.handle, self._keep = handle, keep
        self._forward = library.pn_forward
        weakref.finalize(self, library.pn_model_free, handle)

    def forward(self, cache: CCache, work: CPass) -> None:
        check(self._forward(self.handle, byref(cache), byref(work)))

    def keep(self, cache: CCache, row: int, start: int, slots: list[int]) -> None:
        """Keep the accepted positions of a draft tree: moves the row's keys and values at positions start + slots[i] to
        start + i, in all layers. `slots`: ascending."""
        arrays = (int32s([row]), int32s([start]), int32s([len(slots)]), int32s(slots))
        check(require().pn_keep(self.handle, byref(cache), 1, *arrays))

    def inject(self, cache: CCache, rows: list[int], starts: list[int], counts: list[int], features: Tensor) -> None:
        """For DFlash drafters: compute all layers' keys and values from the target's tapped outputs `features` [T, F],
        and write them to the cache. Row rows[i] gets the next counts[i] tokens, from position starts[i] on."""
        arrays = (int32s(rows), int32s(starts), int32s(counts))
        check(require().pn_inject(self.handle, byref(cache), len(rows), *arrays, pointer(features)))


class Buffers:
    """Input struct of a pass (CPass) and its arrays, reused between passes, as allocating takes longer than filling."""

    def __init__(self) -> None:
        self.work = CPass()
        self._arrays: dict[str, Any] = {}

    def room(self, name: str, size: int) -> Any:
        """Return the int32 array of CPass's field `name`, replaced by a longer one if it is shorter than `size`."""
        array = self._arrays.get(name)
        if array is None or len(array) < size:
            array = self._arrays[name] = (c_int32 * max(size, 64))()
            setattr(self.work, name, ctypes.addressof(array))
        return array

    def fill(self, **values: list[int]) -> None:
        for name, numbers in values.items():
            self.room(name, len(numbers))[: len(numbers)] = numbers

    def fill_parents(self, parents: list[int] | None) -> None:
        """Set each token's parent in its tree: an index among the row's tokens, -1 for a root. None: only chains."""
        self.work.parents = None
        if parents is not None:
            self.fill(parents=parents)
            self.work.parents = ctypes.addressof(self._arrays["parents"])


def top_logprobs(
    logits_KV: Tensor, count: int, inverse_temperature: float
) -> tuple[list[list[int]], list[list[float]]]:
    """Return ids and log-probabilities of each row's `count` most probable tokens in softmax(logits *
    inverse_temperature). logits_KV: contiguous float32 on CPU."""
    rows, size = logits_KV.shape
    ids, logprobs = (c_int32 * (rows * count))(), (c_float * (rows * count))()
    check(require().pn_likeliest(pointer(logits_KV), rows, size, count, inverse_temperature, ids, logprobs))
    places = range(0, rows * count, count)
    return [ids[at : at + count] for at in places], [logprobs[at : at + count] for at in places]


class Picker:
    """Selects and scores DFlash 2's candidates, the most probable tokens at each draft position."""

    def __init__(
        self, count: int, books: tuple[Tensor, Tensor], gate: Matrix, dtype: torch.dtype, ids_V: Tensor | None
    ) -> None:
        """`count`: candidates per draft position. `books`: codebooks of preceding and following tokens [vocabulary,
        rank], float32 or bfloat16. `gate` [rank, D] in `dtype`. `ids_V`, int32: token id of each logits column; None:
        column i is token i."""
        self.count, self._keep = count, (books, gate, ids_V)
        (vocabulary, rank), predecessors, successors = books[0].shape, pointer(books[0]), pointer(books[1])
        self._call, self._pick = require().pn_pick, CPick(vocabulary=vocabulary, rank=rank, dtype=FORMATS[dtype])
        numbers = {"book_dtype": FORMATS[books[0].dtype], "predecessors": predecessors, "successors": successors}
        filled(self._pick, {"gate": gate, "token_of": ids_V, **numbers})

    def pick(self, anchors: list[int], logits_BKV: Tensor, hidden_BKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Select the M most probable candidates at each of K draft positions of B rows; returns (columns, tokens,
        scores).

        - columns, tokens: int32 [B, K, M], the candidates' logits columns and token ids.
        - scores: float32 [B, K, M, M]; [b, k, i, j] scores candidate j of position k after candidate i of position k -
          1 (k = 0: after anchors[b], the row's last token).
        - logits_BKV: float32, contiguous. hidden_BKD: final hidden states, contiguous within a row.
        """
        num_rows, slots, size = logits_BKV.shape
        assert hidden_BKD.stride()[1:] == (hidden_BKD.shape[2], 1)
        count, work = min(self.count, size), self._pick
        chosen, tokens = torch.empty(2, num_rows, slots, count, dtype=torch.int32)
        scores = torch.empty(num_rows, slots, count, count)
        before = int32s(anchors)
        work.rows, work.size, work.count, work.slots = num_rows * slots, size, count, slots
        work.logits, work.anchors = pointer(logits_BKV), ctypes.addressof(before)
        work.hidden, work.hidden_stride = hidden_BKD.data_ptr(), hidden_BKD.stride(0)
        work.chosen, work.tokens, work.scores = chosen.data_ptr(), tokens.data_ptr(), scores.data_ptr()
        check(self._call(byref(work)))
        return chosen, tokens, scores


def walk(scores_KMM: Tensor, inverse_temperature: float) -> tuple[list[int], list[float]]:
    """Choose, for each of K draft positions in turn, the candidate that scores best after the previously chosen one.

    Returns (chosen candidates' indices, log-probabilities in softmax(scores * inverse_temperature)). Both end before
    the first position with invalid scores. scores_KMM: one row's scores from `Picker.pick`.
    """
    slots, count, _ = scores_KMM.shape
    places, logprobs = (c_int32 * slots)(), (c_double * slots)()
    num_places = require().pn_walk(pointer(scores_KMM), slots, count, inverse_temperature, places, logprobs)
    return places[:num_places], logprobs[:num_places]


def use(isa: str) -> None:
    """Select the instruction set of later calls, one of `config.ISAS`. Raises NativeError if it is not available."""
    library = require()
    if library.pn_use(isa.encode()) != 0:
        known = ", ".join(each for each in library.pn_available().decode().split(",") if "emulated" not in each)
        raise NativeError(f"the native pass cannot run on {isa} here: choose --isa from {known}, or leave it out")


def set_threads(num_threads: int) -> None:
    """Set the size of the library's thread pool, including the calling thread."""
    check(require().pn_set_threads(num_threads))


def follow_torch() -> None:
    set_threads(min(torch.get_num_threads(), MAX_THREADS))
