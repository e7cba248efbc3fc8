"""vLLM's connector for hidden states, in a vLLM that is only played: complete files, folders, versions."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.errors import ConfigError

ROOT = Path(__file__).parents[2]
NAME = "paceline.interop.hidden_states"
EXAMPLE = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
BLOCK, LAYERS, SIZE = 4, 3, 8


class ExampleHiddenStatesConnector:
    """The parts of vLLM 0.32's connector that ours uses, as they are there."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._kv_transfer_config = vllm_config
        self._storage_path = vllm_config.get_from_extra_config("shared_storage_path", "/tmp")
        self.allow_custom_save_path = vllm_config.get_from_extra_config("allow_custom_save_path", False)
        self._block_size, self._is_tp_rank_zero, self.use_lock = BLOCK, True, True
        self._kv_cache = torch.randn(16, LAYERS, BLOCK, SIZE)
        self._executor = ThreadPoolExecutor(2)
        self._req_futures: dict[str, Any] = {}
        self._req_copy_events: dict[str, Any] = {}
        self.failures: list[BaseException] = []
        self.on_gpu: list[Any] = []

    def _on_write_done(self, req_id: str, future: Any) -> None:
        self._req_futures.pop(req_id, None)
        self.failures += [future.exception()] if future.exception() else []

    def _submit_async_write(self, pending: Any) -> None:
        self.on_gpu.append(pending)

    @staticmethod
    def _write_tensors(tensors: Any, event: Any, filename: str, lock_fd: int | None) -> None:
        raise AssertionError("replaced")


def extract_from_kv_cache(kv_cache: torch.Tensor, slot_mapping: torch.Tensor, num_tokens: int) -> torch.Tensor:
    block_size = kv_cache.shape[2]
    return kv_cache[slot_mapping // block_size, :, slot_mapping % block_size][:num_tokens]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    parts = EXAMPLE.split(".")
    for number in range(1, len(parts) + 1):
        fake: Any = ModuleType(".".join(parts[:number]))
        fake.__path__ = []
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
        if number > 1:
            setattr(sys.modules[".".join(parts[: number - 1])], parts[number - 1], fake)
    sys.modules["vllm"].__version__, sys.modules["vllm"].__version_tuple__ = "0.32.0", (0, 32, 0)  # type: ignore[attr-defined]
    fake.ExampleHiddenStatesConnector, fake.extract_from_kv_cache = ExampleHiddenStatesConnector, extract_from_kv_cache
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    import paceline.interop.hidden_states as module

    yield module
    sys.modules.pop(NAME, None)


def connector(module: Any, folder: Any) -> Any:
    given = {} if folder is None else {"shared_storage_path": folder, "allow_custom_save_path": True}
    return module.HiddenStatesConnector(SimpleNamespace(get_from_extra_config=given.get), "worker", None)


def pending(folder: Path, name: str, num_tokens: int, *block_ids: int) -> Any:
    file = str(folder / f"{name}.safetensors")
    return SimpleNamespace(req_id=name, filename=file, token_ids=torch.arange(num_tokens), block_ids=list(block_ids))


def test_states_of_a_request_are_copied_before_its_blocks_are_freed(module: Any, tmp_path: Path) -> None:
    one, gate = connector(module, str(tmp_path / "states")), threading.Event()
    held = [one._executor.submit(gate.wait) for _ in range(2)]
    cache = one._kv_cache.clone()
    one._submit_async_write(pending(tmp_path / "states", "a", 10, 7, 2, 11))
    assert one._req_copy_events["a"].query() and "a" in one._req_futures
    one._kv_cache.zero_()  # its blocks are another request's
    assert [*(tmp_path / "states").iterdir()] == []
    gate.set()
    one._executor.shutdown()
    assert all(future.result() for future in held)
    tensors = load_file(tmp_path / "states" / "a.safetensors")
    expected = torch.stack([cache[block, :, place] for block in (7, 2, 11) for place in range(BLOCK)])[:10]
    assert torch.equal(tensors["hidden_states"], expected) and tensors["token_ids"].tolist() == [*range(10)]
    assert [file.name for file in (tmp_path / "states").iterdir()] == ["a.safetensors"], "and no lock"
    assert not one._req_futures and not one.failures and not one.use_lock


def test_a_file_appears_only_when_it_is_complete(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up half-way leaves nothing behind, and the request is over all the same."""

    def half(tensors: Any, filename: str) -> None:
        Path(filename).write_bytes(b"\0" * 100)
        assert not (tmp_path / "a.safetensors").exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", half)
    one = connector(module, str(tmp_path))
    one._submit_async_write(pending(tmp_path, "a", 3, 0))
    one._executor.shutdown()
    assert [*tmp_path.iterdir()] == [] and [error.errno for error in one.failures] == [28]
    assert one._req_copy_events["a"].query()


def test_only_the_first_rank_writes_and_a_gpu_copies_in_its_own_way(module: Any, tmp_path: Path) -> None:
    one = connector(module, str(tmp_path))
    one._kv_cache = one._kv_cache.to("meta")  # any device but the processor
    one._submit_async_write(given := pending(tmp_path, "a", 3, 0))
    assert one.on_gpu == [given]
    one._is_tp_rank_zero = False
    one._submit_async_write(given)
    assert one.on_gpu == [given] and not one._req_futures


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_request_id_that_leaves_the_folder_writes_nothing(
    module: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    """Clients choose it (X-Request-Id). The request is over all the same, so that its blocks are freed."""
    states = tmp_path / "states"
    one = connector(module, str(states))
    one._kv_cache = one._kv_cache.to(device)
    names = ("cmpl-x/../../elsewhere", "cmpl-x/below", str(tmp_path / "absolute"))
    for name in names:
        one._submit_async_write(pending(states, name, 3, 0))
        assert one._req_copy_events[name].query() and name not in one._req_futures
    one._executor.shutdown()
    assert [*tmp_path.iterdir()] == [states] and [*states.iterdir()] == [] and one.on_gpu == []
    assert [record.getMessage() for record in caplog.records] == [
        "the request id 'cmpl-x/../../elsewhere' is not a file name: its hidden states are not written"
    ]
    assert not one.allow_custom_save_path, "no request names a path"


def test_a_lock_of_the_engine_is_released(module: Any, tmp_path: Path) -> None:
    lock = os.open(tmp_path / "a.lock", os.O_CREAT | os.O_WRONLY)
    module.HiddenStatesConnector._write_tensors(
        {"token_ids": torch.arange(3)}, module.Copied(), str(tmp_path / "a"), lock
    )
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(lock)
    assert load_file(tmp_path / "a")["token_ids"].tolist() == [0, 1, 2]


def test_whoever_may_read_the_folder_may_read_its_files(module: Any, tmp_path: Path) -> None:
    """A trainer of another user could not: safetensors writes files of mode 0600."""
    for mode, expected in ((0o750, 0o640), (0o755, 0o644), (0o777, 0o644)):
        tmp_path.chmod(mode)
        module.HiddenStatesConnector._write_tensors(
            {"token_ids": torch.arange(3)}, module.Copied(), str(tmp_path / f"{mode}"), None
        )
        assert (tmp_path / f"{mode}").stat().st_mode & 0o777 == expected


def test_the_folder_is_checked_at_the_start(module: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder for hidden states: give .*shared_storage_path"):
        connector(module, None)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write to .*file/states .*: choose another shared_storage_path"):
        connector(module, str(tmp_path / "file" / "states"))


@pytest.mark.parametrize(
    ("version", "numbers", "lacks"),
    [
        ("0.1.7", (0, 1, 7), ""),
        ("0.23.1", (0, 23, 1), ""),
        ("0.32.0", (0, 32, 0), "_write_tensors"),
        ("dev", (0, 0, "dev"), "_submit_async_write"),
    ],
)
def test_another_vllm_is_refused(module: Any, version: str, numbers: tuple[Any, ...], lacks: str) -> None:
    names = [name for name in module.NEEDED if name != lacks]
    kind = type("ExampleHiddenStatesConnector", (), dict.fromkeys(names))
    match = rf"needs vLLM 0\.32 and was tried with 0\.32; this is {version}" + (
        f", whose .* has no {lacks}" if lacks else ""
    )
    with pytest.raises(ConfigError, match=match):
        module.check_version(version, numbers, kind)


def test_a_later_vllm_and_one_built_from_source_are_taken(module: Any) -> None:
    kind = type("ExampleHiddenStatesConnector", (), dict.fromkeys(module.NEEDED))
    from_source = (("dev", (0, 0, "dev")), ("0.1.dev7+gabc", (0, 1, "dev7", "gabc")))
    for version, numbers in (("0.33.0", (0, 33, 0)), ("1.0.0", (1, 0, 0)), *from_source):
        module.check_version(version, numbers, kind)


@pytest.mark.slow
def test_without_vllm_it_says_what_to_install() -> None:
    """Also what it imports: of ours, the errors alone."""
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        f"try:\n    import {NAME}\n"
        "except Exception as error:\n    print(error)\n"
        "print(sorted(name for name in sys.modules if name.startswith('paceline')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    message, ours = done.stdout.strip().splitlines()
    assert message.startswith("vLLM has no connector for hidden states") and "install vLLM 0.32 or later" in message
    assert ours == str(["paceline", "paceline.errors", "paceline.interop"])
