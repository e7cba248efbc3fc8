"""vLLM with ExampleHiddenStatesConnector, as far as training can tell: to be `Elsewhere.other` of elsewhere_server."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from paceline.config import EngineConfig
from paceline.model.backends import load_target, settle
from paceline.model.target import Target
from paceline.train.documents.dataset import Document
from paceline.train.features.hidden_states import OnlineFeatures


def loaded(engine: EngineConfig) -> Target:
    return load_target(replace(settle(engine), max_batch=1, max_len=128))


class VLLM:
    """Its server with ExampleHiddenStatesConnector: writes behind its answer, under a lock."""

    def __init__(self, engine: EngineConfig, folder: Path, layer_ids: tuple[int, ...]) -> None:
        self.target, self.folder, self.layer_ids = loaded(engine), folder, layer_ids
        self.has_locks, self.delay_s, self.number = True, 0.01, 0
        self.spoil: Any = lambda tensors: tensors
        self._lock = threading.Lock()

    def __call__(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, bytes] | None:
        if path == "/v1/features":
            return 404, b"nothing here"
        if path != "/v1/completions":
            return None
        assert body["max_tokens"] == 1 and body["model"] == "the-model"
        with self._lock:
            self.number += 1
            file = self.folder / f"cmpl-{self.number}.safetensors"
            document = Document("x", np.array(body["prompt"], dtype=np.int32), 0)
            taps = tuple(layer - 1 for layer in self.layer_ids)
            states_SF = OnlineFeatures(self.target, [document], taps, False).of(0).taps_SF
        tensors = {
            "hidden_states": states_SF.unflatten(1, (len(taps), -1)).contiguous(),
            "token_ids": torch.tensor(body["prompt"]),
        }
        lock = Path(f"{file}.lock").open("w") if self.has_locks else None  # noqa: SIM115
        if lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Thread(target=self._write, args=(file, lock, self.spoil(tensors))).start()
        reply = {
            "choices": [{"text": "a"}],
            "kv_transfer_params": {"hidden_states_path": f"/where/vllm/sees/{file.name}"},
        }
        return 200, json.dumps(reply).encode()

    def _write(self, file: Path, lock: Any, tensors: dict[str, torch.Tensor]) -> None:
        data = save(tensors)
        file.write_bytes(data[: len(data) // 2])
        time.sleep(self.delay_s)
        file.write_bytes(data)
        if lock:
            lock.close()
