"""Gets hidden states from a remote target: from vLLM through files, or from `paceline serve --features` by HTTP.

vLLM is started with the speculative method `extract_hidden_states` and a connector: `paceline.interop.hidden_states`
(`vllm_command`; see docs/how-to/many-machines.md), or vLLM's ExampleHiddenStatesConnector, which needs CUDA. Each
request generates one token and leaves a safetensors file in a folder that both machines see: hidden_states [T, L, D]
and token_ids [T]. Our connector's file appears when it is complete; the other's is locked until then. The file is read,
checked and deleted. The layers are those given when the server was started; vLLM's layer ids are paceline's plus one.

A server's data is not trusted: tokens must be those that were sent, shapes those requested, values finite, sizes
bounded, and files in the configured folder.
"""

from __future__ import annotations

import fcntl
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from paceline.errors import CacheError, ConfigError, DownloadError, NumericsError, UnsupportedModelError, reraised
from paceline.model.target import Target
from paceline.net.retrying import Client, Refused
from paceline.train.answers.remote_target import first_model
from paceline.train.config import RemoteConfig
from paceline.train.documents.dataset import Document
from paceline.train.features.hidden_states import Features

PATH = "/v1/features"
POLL_S = 0.01
CONNECTOR = {
    "kv_connector": "HiddenStatesConnector",
    "kv_connector_module_path": "paceline.interop.hidden_states",
    "kv_role": "kv_producer",
}
"""Names our connector in vLLM's --kv-transfer-config."""


def vllm_command(model: str, taps: Sequence[int], longest: int, folder: Path) -> str:
    """Returns the shell command that starts vLLM for documents of at most `longest` tokens, with the hidden states of
    the target layers `taps` written to `folder`."""
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in taps]}}
    extraction = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": layers}
    connector = {**CONNECTOR, "kv_connector_extra_config": {"shared_storage_path": str(folder)}}
    words = ["vllm", "serve", model, "--max-model-len", str(longest + 1)]
    words += ["--speculative-config", json.dumps(extraction), "--kv-transfer-config", json.dumps(connector)]
    return shlex.join(words)


class RemoteFeatures:
    """A thread-safe feature source that requests hidden states from a server (vLLM, or `paceline serve --features`)."""

    def __init__(
        self,
        config: RemoteConfig,
        target: Target,
        documents: Sequence[Document],
        taps: tuple[int, ...],
        needs_final: bool,
    ) -> None:
        """Raises ConfigError if the server runs another target, DownloadError if it is down."""
        assert config.features_from
        self.documents, self._target, self._taps, self._needs_final = documents, target, taps, needs_final
        self.num_at_once = config.at_once
        self._folder, self._patience_s = config.features_folder, 60 * config.patience_minutes
        self._client = Client(config.features_from, "features_from", self._patience_s)
        self._name = config.served_name
        try:
            model = self._client.json("GET", PATH)
        except Refused as error:
            if error.status in (401, 403):
                raise ConfigError(f"{self._client.url} wants another key ({error})") from error
            self._is_paceline = False
            self._check_vllm()
        else:
            self._is_paceline = True
            self._check_paceline(model)

    @property
    def bytes_per_position(self) -> int:
        return (len(self._taps) + self._needs_final) * self._target.hidden_size * self._target.dtype.itemsize

    @property
    def introduction(self) -> str:
        """Text for the user that names the server. For vLLM it also names the layers that vLLM must be started with:
        vLLM does not report its layers, so they cannot be checked."""
        if self._is_paceline:
            return f"hidden states of {self._client.url}"
        ids = [layer + 1 for layer in self._taps]
        return (
            f"hidden states of {self._client.url}, vLLM: it does not report its layers, which must be "
            f"eagle_aux_hidden_state_layer_ids {ids}"
        )

    def of(self, number: int) -> Features:
        """Returns the hidden states of document `number`. Raises:
        - DownloadError if the server cannot be reached or rejects the request;
        - CacheError if vLLM's file is missing or unreadable;
        - ConfigError if the tokens or shapes are not the requested ones;
        - NumericsError for values that are not finite."""
        tokens = self.documents[number].tokens.tolist()
        try:
            tensors = self._requested(tokens) if self._is_paceline else self._extracted(tokens)
        except Refused as error:
            raise DownloadError(f"{self._client.url} refuses document {self.documents[number].key}: {error}") from error
        return self._checked(tensors, tokens)

    def _check_paceline(self, model: Any) -> None:
        target = self._target
        sizes = (model.get("num_layers"), model.get("hidden_size")) if isinstance(model, dict) else (None, None)
        if sizes != (target.num_layers, target.hidden_size):
            raise ConfigError(
                f"{self._client.url} has a model of {sizes[0]} layers of {sizes[1]}, the target has "
                f"{target.num_layers} of {target.hidden_size}: start it with the target"
            )

    def _check_vllm(self) -> None:
        last = self._target.num_layers - 1
        if self._folder is None:
            raise ConfigError("features_folder must be given: the folder in which vLLM's connector writes")
        if self._needs_final or last in self._taps:
            raise UnsupportedModelError(
                "vLLM gives the last layer's output before the final norm: use --loss ce or d-pace and other layers, "
                "or paceline serve --features"
            )
        if self._name is None:
            self._name = first_model(self._client)

    def _most_bytes(self, num_tokens: int) -> int:
        return num_tokens * (self.bytes_per_position * 4 + 8) + (1 << 20)

    def _requested(self, tokens: list[int]) -> dict[str, Tensor]:
        body = {"token_ids": tokens, "layers": list(self._taps), "final": self._needs_final}
        data = self._client.bytes("POST", PATH, body, self._most_bytes(len(tokens)))
        with reraised(DownloadError, f"{self._client.url} sends no safetensors", "start it anew", SafetensorError):
            return load(data)

    def _extracted(self, tokens: list[int]) -> dict[str, Tensor]:
        body = {"model": self._name, "prompt": tokens, "max_tokens": 1, "temperature": 0}
        response = self._client.json("POST", "/v1/completions", body)
        what = f"{self._client.url} tells no path of hidden states"
        remedy = "start vLLM with the connector of paceline.interop.hidden_states, see docs/how-to/many-machines.md"
        with reraised(ConfigError, what, remedy, KeyError, TypeError):
            name = Path(response["kv_transfer_params"]["hidden_states_path"]).name
        assert self._folder is not None
        return self._read(self._folder / name, len(tokens))

    def _read(self, path: Path, num_tokens: int) -> dict[str, Tensor]:
        """Waits until the file is complete, reads it, and deletes it and its lock."""
        lock, deadline = path.with_name(path.name + ".lock"), time.monotonic() + self._patience_s
        while True:
            with reraised(CacheError, f"{path} cannot be read", "check features_folder", OSError):
                if _is_free(lock) and path.is_file():
                    if path.stat().st_size > self._most_bytes(num_tokens):
                        raise ConfigError(f"{path} is larger than these layers of these tokens: check vLLM's layer ids")
                    try:
                        tensors = load(path.read_bytes())  # mapped, a file that is cut would end the process
                    except SafetensorError:
                        pass  # written without a lock, and incomplete
                    else:
                        path.unlink()
                        lock.unlink(missing_ok=True)
                        return tensors
            if time.monotonic() > deadline:
                raise CacheError(
                    f"{path} does not come: check that features_folder is the server's shared_storage_path, and the "
                    "server's log for errors of its disk"
                )
            time.sleep(POLL_S)

    def _checked(self, tensors: dict[str, Tensor], tokens: list[int]) -> Features:
        """Returns the features. Raises ConfigError or NumericsError if they are not the requested ones."""
        states, ids = tensors.get("hidden_states"), tensors.get("token_ids")
        if ids is None or ids.flatten().tolist()[: len(tokens)] != tokens:
            raise ConfigError(
                f"{self._client.url} gives hidden states of other tokens: it must run the target, and add nothing"
            )
        shape, size = (len(tokens), len(self._taps), self._target.hidden_size), self._target.hidden_size
        if states is None or states.ndim != 3 or len(states) < len(tokens) or states.shape[1:] != shape[1:]:
            received = None if states is None else tuple(states.shape)
            layers = ", ".join(str(layer + 1) for layer in self._taps)
            raise ConfigError(
                f"{self._client.url} gives hidden states of shape {received}, not {shape}: start vLLM with layer ids "
                f"{layers}"
            )
        final = tensors.get("final")
        if self._needs_final and (final is None or final.shape != (len(tokens), size)):
            raise ConfigError(f"{self._client.url} gives no final hidden states: use --loss ce or d-pace")
        taps_SF = self._here(states[: len(tokens)].flatten(1))
        return Features(taps_SF, self._here(final) if self._needs_final and final is not None else None)

    def _here(self, states: Tensor) -> Tensor:
        if not states.isfinite().all():
            raise NumericsError(f"{self._client.url} gives hidden states that are no numbers: look at its precision")
        return states.to(self._target.device, self._target.dtype)


def _is_free(lock: Path) -> bool:
    """Returns True if no process holds the lock. A missing lock is free: the server does not lock."""
    if not lock.is_file():
        return True
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
