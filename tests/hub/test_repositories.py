"""Models from the Hugging Face hub, as far as can be tested without one: its errors, what is asked for, the offline
switch."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_builtin import raising

from paceline import hub
from paceline.config import short_name
from paceline.data.prompts import read_prompts
from paceline.errors import CacheError, DownloadError, ModelNotFoundError, PromptError
from paceline.hub import resolve
from paceline.model.checkpoint import load_config
from paceline.model.remote_embedding import light_folder


def hub_errors() -> list[tuple[Exception, type[Exception]]]:
    import importlib

    from huggingface_hub import errors

    httpx = importlib.import_module(
        errors.HTTPError.__module__.partition(".")[0]
    )  # its name changes with the hub's version
    response = httpx.Response(404, request=httpx.Request("GET", "https://example.org"))
    return [
        (errors.RepositoryNotFoundError("no", response=response), ModelNotFoundError),
        (errors.GatedRepoError("gated", response=response), DownloadError),
        (errors.LocalEntryNotFoundError("offline"), DownloadError),
        (errors.HfHubHTTPError("500", response=response), DownloadError),
        (httpx.ConnectError("no route"), DownloadError),
        (OSError(errno.ENOSPC, "No space left on device"), CacheError),
    ]


@pytest.mark.parametrize("case", range(6))
def test_hub_errors(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    error, expected = hub_errors()[case]
    monkeypatch.setattr("huggingface_hub.snapshot_download", raising(error))
    for fetch in (resolve, light_folder):
        with pytest.raises(expected) as caught:
            fetch("org/name")
        assert caught.value.__cause__ is error


def test_hub_never_asks_for_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects

    options: dict[str, Any] = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda repo_id, **kwargs: options.update(kwargs) or str(tmp_path)
    )
    assert resolve("org/name") == tmp_path
    files = [
        "config.json",
        "model.safetensors",
        "pytorch_model.bin",
        "modeling.py",
        "model.pt",
        "chat_template.jinja",
        "a.gguf",
    ]
    assert list(filter_repo_objects(files, **options)) == ["config.json", "model.safetensors", "chat_template.jinja"]


@pytest.mark.slow
def test_hub_offline(tmp_path: Path) -> None:
    """HF_HUB_OFFLINE is read when huggingface_hub is imported, so this needs a process of its own."""
    script = "from paceline.hub import resolve; resolve('org/name')"
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": str(Path(hub.__file__).parents[1]),
    }
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert "DownloadError: org/name is not in the Hugging Face cache" in run.stderr


@pytest.mark.parametrize("name", ["a" * 300, "~no-such-user/model", f"/{'a' * 300}"])
def test_names_that_pathlib_refuses(name: str) -> None:
    """Longer than a file's name may be, or in the home of nobody."""
    assert short_name(name) == name.rpartition("/")[2]
    for look_up in (resolve, hub.check_name, light_folder):
        with pytest.raises(ModelNotFoundError, match=f"no model '{name}': give a folder"):
            look_up(name)
    with pytest.raises(ModelNotFoundError, match="no folder or file"):
        load_config(name)
    with pytest.raises(PromptError, match="there is no prompt file"):
        read_prompts(f"{name}.jsonl")
