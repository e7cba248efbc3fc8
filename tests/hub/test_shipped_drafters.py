"""Where a drafter that ships comes from: distribution, checkout, hub; and what `default` says without any of them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doubles import FakeTarget

from paceline.draft import shipped
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.registry import folder_of, make_drafter
from paceline.errors import CacheError, DownloadError, ModelNotFoundError
from paceline.train.learn.initial_weights import init_folder

INSTALL = r"the drafter of tiny is not installed, and the hub does not give it .*: run `pip install \./drafters` in a"


class FakeHub:
    """Stands for huggingface_hub: gives the files of a folder, or none."""

    def __init__(self, source: Path | None) -> None:
        self.source, self.requests = source, list[str]()

    def metadata(self, url: str, timeout: float) -> SimpleNamespace:
        self.requests.append(url)
        if self.source is None:
            raise ConnectionResetError("no network")
        data = (self.source / url.rpartition("/")[2]).read_bytes()
        is_small = url.endswith(".json")  # of which the hub has git's hash
        return SimpleNamespace(etag="0" * 40 if is_small else hashlib.sha256(data).hexdigest())

    def download(self, repo: str, path: str, local_dir: Path) -> str:
        assert self.source is not None and repo == "paceline/drafters"
        out = local_dir / path
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes((self.source / out.name).read_bytes())
        return str(out)


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget(vocab_size=32, hidden_size=64)


@pytest.fixture
def tiny(target: FakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of a drafter that ships for a target `tiny`; no distribution is installed, and no checkout has it."""
    source = tmp_path / "source" / "tiny"
    DFlashDrafter.random(target).save(source, in_8_bits=True)
    monkeypatch.setattr(shipped, "SHIPPED", {"tiny": listed(source)})
    monkeypatch.setattr(shipped, "CHECKOUT", tmp_path / "checkout")
    monkeypatch.setattr(shipped, "DISTRIBUTION", "tiny_drafters")
    shipped.find_or_report.cache_clear()
    yield source
    shipped.find_or_report.cache_clear()


def listed(folder: Path) -> dict[str, dict[str, Any]]:
    """The entry of `shipped.json` for a folder: every file but its card."""
    files = sorted(each for each in folder.iterdir() if each.name != "README.md")
    data = {each.name: each.read_bytes() for each in files}
    return {name: {"num_bytes": len(each), "sha256": hashlib.sha256(each).hexdigest()} for name, each in data.items()}


def use(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", hub.metadata)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub.download)
    return hub


def put(source: Path, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def install(source: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An import package as the distribution has it."""
    folder = put(source, site / "tiny_drafters" / "tiny")
    (site / "tiny_drafters" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "tiny_drafters", raising=False)
    return folder


def test_the_distribution_comes_first_then_the_checkout_then_the_hub(
    tiny: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = use(FakeHub(tiny), monkeypatch)
    assert shipped.local("tiny") is None and shipped.local("another") is None
    assert shipped.find("tiny") == home / "drafters" / "tiny" == shipped.local("tiny")
    num_requests = len(hub.requests)
    assert shipped.find("tiny") == home / "drafters" / "tiny"
    assert len(hub.requests) == num_requests == len(shipped.SHIPPED["tiny"])
    assert not list((home / "tmp").iterdir())
    checkout = put(tiny, tmp_path / "checkout" / "tiny")
    assert shipped.find("tiny") == shipped.local("tiny") == checkout
    installed = install(tiny, tmp_path / "site", monkeypatch)
    assert shipped.find("tiny") == shipped.local("tiny") == installed
    (installed / "config.json").unlink()  # an older distribution without this drafter
    assert shipped.find("tiny") == checkout


def test_what_the_hub_gave_drafts(tiny: Path, target: FakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeHub(tiny), monkeypatch)
    assert type(make_drafter("default", target, target_name="tiny")) is DFlashDrafter


def test_other_bytes_are_not_taken(tiny: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in shipped.SHIPPED["tiny"]:
        wrong = put(tiny, tmp_path / f"wrong-{name}")
        data = bytearray((wrong / name).read_bytes())
        data[-1] ^= 1
        (wrong / name).write_bytes(data)
        use(FakeHub(wrong), monkeypatch)
        with pytest.raises(DownloadError, match=INSTALL):
            shipped.find("tiny")
        assert not (home / "drafters").exists() and not list((home / "tmp").iterdir())


def test_a_damaged_folder_is_fetched_again(tiny: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeHub(tiny), monkeypatch)
    shipped.find("tiny")
    (home / "drafters" / "tiny" / "config.json").unlink()
    assert shipped.local("tiny") is None
    assert listed(shipped.find("tiny")) == shipped.SHIPPED["tiny"]


def test_default_without_any_source_says_once_what_to_install_and_drafts_by_lookups(
    tiny: Path, target: FakeTarget, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = use(FakeHub(None), monkeypatch)
    for _ in range(3):
        assert type(make_drafter("default", target, target_name="tiny")) is NgramDrafter
    (line,) = capfd.readouterr().err.splitlines()
    assert line == (
        "paceline: the drafter of tiny is not installed, and the hub does not give it (no network): run `pip install "
        "./drafters` in a checkout of paceline; until then lookups (ngram) draft for tiny"
    )
    assert len(hub.requests) == 1
    assert type(make_drafter("default", target, target_name="another")) is NgramDrafter
    assert not capfd.readouterr().err, "none ships for it: lookups are the promise"


def test_what_needs_the_weights_is_refused_with_the_same_sentence(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeHub(None), monkeypatch)
    for call in (
        lambda: folder_of("default", "tiny"),
        lambda: folder_of("tiny"),
        lambda: init_folder("default", "tiny"),
    ):
        with pytest.raises(DownloadError, match=INSTALL):
            call()
    with pytest.raises(ModelNotFoundError):
        folder_of("another")


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_distribution(
    tiny: Path, target: FakeTarget, home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakeHub(tiny), monkeypatch)
    home.write_text("a file in its place")
    with pytest.raises(CacheError, match=INSTALL):
        shipped.find("tiny")
    assert type(make_drafter("default", target, target_name="tiny")) is NgramDrafter
    assert "until then lookups (ngram) draft for tiny" in capfd.readouterr().err


@pytest.mark.slow
def test_the_table_is_that_of_the_folders() -> None:
    """The hashes by which the hub's files are checked."""
    entries = {each.name: listed(each) for each in sorted(shipped.CHECKOUT.iterdir()) if each.is_dir()}
    entries.pop("__pycache__", None)
    assert entries == shipped.SHIPPED, f"paceline/draft/shipped.json should be {json.dumps(entries, indent=1)}"
