"""KV connector that vLLM loads to write the hidden states of its requests to files, on GPUs and on its CPU build.

    --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config":
        {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 9, 15]}}}'
    --kv-transfer-config '{"kv_connector": "HiddenStatesConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "paceline.interop.hidden_states",
        "kv_connector_extra_config": {"shared_storage_path": "/mnt/states"}}'

Every request leaves a safetensors file in that folder: hidden_states [tokens, layers, hidden size] of its prompt, and
token_ids [tokens]. A file gets its name when it is complete, so readers need no lock. `paceline train --features-from`
reads the files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import ConfigError, reraised
from paceline.interop import LEAST_VERSION, is_too_old

log = logging.getLogger("paceline.interop")
NEEDED = ("_submit_async_write", "_write_tensors", "_on_write_done")
"""Methods of vLLM's example connector that this one replaces or calls."""
UNFINISHED = ".part"
"""Suffix of a file that is being written."""

with reraised(
    ConfigError,
    "vLLM has no connector for hidden states",
    "install vLLM 0.32 or later in this Python environment",
    ImportError,
):
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.distributed.kv_transfer.kv_connector.v1 import (  # pyright: ignore[reportMissingImports]
        example_hidden_states_connector as example,
    )


def check_version(version: str, numbers: tuple[Any, ...], connector: type) -> None:
    """Raises ConfigError if the installed vLLM does not fit: it is older than 0.32, or its example connector lacks a
    method in NEEDED. `version`: vLLM's version as text; `numbers`: its `__version_tuple__`; `connector`: class of the
    example connector. For a build from source without a known version (`is_too_old`), only the methods are checked."""
    missing = [name for name in NEEDED if not hasattr(connector, name)]
    if is_too_old(numbers) or missing:
        least = ".".join(map(str, LEAST_VERSION))
        lacks = f", whose {connector.__name__} has no {', '.join(missing)}" if missing else ""
        raise ConfigError(
            f"paceline.interop.hidden_states needs vLLM {least} and was tried with 0.32; this is {version}{lacks}: "
            f"install vLLM 0.32, or compute the hidden states with paceline serve --features"
        )


check_version(vllm.__version__, vllm.__version_tuple__, example.ExampleHiddenStatesConnector)


class Copied:
    """Replaces the CUDA event that marks the end of a copy from the GPU: reports at once that the copy is complete.
    Used where nothing is copied from a GPU: on a CPU, or for a file that is not written."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class HiddenStatesConnector(example.ExampleHiddenStatesConnector):
    """KV connector that writes each request's hidden states to a safetensors file in `shared_storage_path`:
    hidden_states [tokens, layers, hidden size] and token_ids [tokens]. Unlike vLLM's example connector, it gives a file
    its final name only when the file is complete, writes no file outside the folder, and also runs on a CPU."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ConfigError if `shared_storage_path` is missing or cannot be written."""
        super().__init__(vllm_config, role, kv_cache_config)
        folder = self._kv_transfer_config.get_from_extra_config("shared_storage_path", None)
        check_folder(folder)
        self.use_lock = self.allow_custom_save_path = False
        self._has_warned = False

    def _submit_async_write(self, pending: Any) -> None:
        """Copies a finished request's hidden states out of the KV cache, before its blocks are freed; a thread writes
        them. `pending`: the request's id, token_ids [tokens], block_ids and filename. vLLM names the file after the
        request's id, which clients choose (X-Request-Id). A file outside `shared_storage_path`, or in a folder below
        it, is not written; the first one is logged."""
        if not self._is_tp_rank_zero:
            return
        if os.path.dirname(os.path.realpath(pending.filename)) != os.path.realpath(self._storage_path):
            self._req_copy_events[pending.req_id] = Copied()  # vLLM then frees the request's blocks
            if not self._has_warned:
                log.warning("the request id %r is not a file name: its hidden states are not written", pending.req_id)
            self._has_warned = True
            return
        cache, num_tokens = self._kv_cache, len(pending.token_ids)  # cache: [blocks, layers, block size, hidden size]
        if cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        slots = slots_of(pending.block_ids, self._block_size)[:num_tokens]
        states = example.extract_from_kv_cache(cache, slots, num_tokens).contiguous()
        tensors, done = {"hidden_states": states, "token_ids": pending.token_ids.clone()}, Copied()
        written = self._executor.submit(self._write_tensors, tensors, done, pending.filename, None)
        self._req_copy_events[pending.req_id], self._req_futures[pending.req_id] = done, written
        written.add_done_callback(partial(self._on_write_done, pending.req_id))

    @staticmethod
    def _write_tensors(tensors: dict[str, Tensor], event: Any, filename: str, lock_fd: int | None) -> None:
        """Waits for the copy, and writes the file under another name until it is complete. vLLM logs an OSError."""
        unfinished = filename + UNFINISHED
        try:
            event.synchronize()
            os.makedirs(os.path.dirname(filename), exist_ok=True)
            save_file(tensors, unfinished)  # with mode 0600, but the trainer may be another user, who only reads
            os.chmod(unfinished, os.stat(os.path.dirname(filename)).st_mode & 0o644)
            os.replace(unfinished, filename)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)
            if lock_fd is not None:
                os.close(lock_fd)


def slots_of(block_ids: list[int], block_size: int) -> Tensor:
    """Returns the cache indices of a request's positions in the paged KV cache: [number of blocks * block size], int64.
    `block_size`: positions per block."""
    return (torch.tensor(block_ids, dtype=torch.long)[:, None] * block_size + torch.arange(block_size)).flatten()


def check_folder(folder: Any) -> None:
    """Raises ConfigError if `folder` is not a path or cannot be written. Creates a missing folder."""
    if not isinstance(folder, str) or not folder:
        raise ConfigError(
            'no folder for hidden states: give {"shared_storage_path": "/a/folder"} in kv_connector_extra_config, the '
            "folder that paceline train names with --features-folder"
        )
    with reraised(ConfigError, f"cannot write to {folder}", "choose another shared_storage_path", OSError):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
