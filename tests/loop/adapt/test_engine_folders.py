"""Rollouts to vLLM and SGLang: the folder that the engine reads, kept for a rollback, and checked there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_servers import FakeServer, recorded_environments, restart_command, serving
from safetensors.torch import save_file
from small_drafter import write_drafter

from paceline.config import EngineConfig
from paceline.draft.dflash.checkpoint import read_stored
from paceline.errors import CacheError, ConfigError, DeployError, UnreachableError
from paceline.loop.adapt.config import DeployConfig
from paceline.loop.adapt.servers.deploy import open_deployment
from paceline.loop.adapt.servers.vllm_sglang import engine_folders
from paceline.loop.adapt.servers.vllm_sglang.drafter_folder import Given, Start, given_to
from paceline.loop.adapt.servers.vllm_sglang.engine_folders import EngineFolders, Expected, check_length
from paceline.model.checkpoint import load_tensors
from paceline.net.streaming import Client

pytest_plugins = ("small_drafter",)


def folders_of(target: Path, state: Path, engine: str = "vllm", **changes: Any) -> EngineFolders:
    config = DeployConfig(engine, num_drafted=3, restart="true", **changes)
    return EngineFolders(config, EngineConfig(model=str(target), dtype="float32"), state / "engine")


class TestFolders:
    def test_it_is_the_one_that_serve_would_give(self, target: Path, drafter: Path, tmp_path: Path) -> None:
        given = folders_of(target, tmp_path).given(drafter)
        expected = given_to(Start("vllm", str(target), str(drafter), num_drafted=3), tmp_path / "scratch")
        assert given.folder.is_relative_to(tmp_path / "engine") and (given.method, given.num_drafted) == ("dflash", 3)
        assert read_stored(given.folder).form == "speculators" and read_stored(given.folder).vocabulary.ids is not None
        one, other = (dict(load_tensors(folder)) for folder in (given.folder, expected.folder))
        assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)

    def test_another_user_may_read_it(self, target: Path, drafter: Path, tmp_path: Path) -> None:
        """An engine of another user could not, since the folder had the permissions of temporary ones."""
        (tmp_path / "plain").mkdir()
        folder = folders_of(target, tmp_path).given(drafter).folder
        for each in (folder, folder.parent):
            assert each.stat().st_mode == (tmp_path / "plain").stat().st_mode, each

    def test_it_is_written_once(self, target: Path, drafter: Path, tmp_path: Path) -> None:
        """A server may be reading it."""
        given = folders_of(target, tmp_path).given(drafter)
        before = (given.folder / "model.safetensors").stat()
        again = folders_of(target, tmp_path).given(drafter)
        after = (again.folder / "model.safetensors").stat()
        assert again == given and (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)

    def test_other_weights_get_another_folder(self, target: Path, drafter: Path, tmp_path: Path) -> None:
        """Also where a drafter is trained anew into a folder of the same name."""
        copy = tmp_path / "drafter"
        shutil.copytree(drafter, copy)
        folders = folders_of(target, tmp_path)
        first = folders.given(copy).folder
        tensors = dict(load_tensors(copy))
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, copy / "model.safetensors")
        assert folders.given(copy).folder != first and first.is_dir()

    def test_one_that_the_engine_reads_is_given_as_it_is(self, target: Path, drafter: Path, tmp_path: Path) -> None:
        shutil.copytree(drafter, tmp_path / "plain")
        (tmp_path / "plain" / "draft_ids.safetensors").unlink()
        for _ in range(2):
            assert folders_of(target, tmp_path).given(tmp_path / "plain").folder == tmp_path / "plain"

    def test_half_a_conversion_is_no_folder(
        self, target: Path, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Killed(BaseException):
            pass

        def killed(start: Start, scratch: Path) -> None:
            (scratch / "drafter").mkdir()
            raise Killed

        folders = folders_of(target, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(engine_folders, "given_to", killed)
            with pytest.raises(Killed):
                folders.given(drafter)
        assert not any((tmp_path / "engine").iterdir())
        for name in (".vllm-0.part", ".vllm-0.before", "unfinished-0"):  # as SIGKILL leaves them, now and before
            (tmp_path / "engine" / name).mkdir()
        given = folders_of(target, tmp_path).given(drafter)
        assert [*(tmp_path / "engine").iterdir()] == [given.folder.parent]
        assert read_stored(given.folder).form == "speculators"

    def test_other_settings_get_another_folder(self, target: Path, drafter: Path, tmp_path: Path) -> None:
        first = folders_of(target, tmp_path).given(drafter)
        fewer = folders_of(target, tmp_path)
        fewer.config = DeployConfig("vllm", num_drafted=2, restart="true")
        assert fewer.given(drafter).num_drafted == 2 and first.num_drafted == 3
        other = folders_of(target, tmp_path)
        other.engine = EngineConfig(model=str(shutil.copytree(target, tmp_path / "target")), dtype="float32")
        assert other.given(drafter).folder not in (first.folder, fewer.given(drafter).folder)

    def test_a_damaged_folder_is_written_again(self, target: Path, drafter: Path, tmp_path: Path) -> None:
        folders = folders_of(target, tmp_path)
        given = folders.given(drafter)
        record = given.folder.parent / engine_folders.RECORD
        for damaged in ("", "3", "{}", json.dumps(json.loads(record.read_text()) | {"extra": 1})):
            record.write_text(damaged)
            assert folders.given(drafter) == given and json.loads(record.read_text())["method"] == "dflash"
        shutil.rmtree(given.folder)
        assert folders.given(drafter) == given and given.folder.is_dir()
        assert [*(tmp_path / "engine").iterdir()] == [record.parent]

    def test_a_drafter_that_was_moved_is_found_again(self, target: Path, drafter: Path, tmp_path: Path) -> None:
        plain = Path(shutil.copytree(drafter, tmp_path / "plain"))
        (plain / "draft_ids.safetensors").unlink()
        folders = folders_of(target, tmp_path)
        assert folders.given(plain).folder == plain
        moved = plain.rename(tmp_path / "moved")
        assert folders.given(moved).folder == moved

    def test_a_full_disk_leaves_nothing_behind(
        self, target: Path, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(start: Start, scratch: Path) -> None:
            (scratch / "drafter").mkdir()
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(engine_folders, "given_to", full)
        with pytest.raises(CacheError, match="free space"):
            folders_of(target, tmp_path).given(drafter)
        assert [*(tmp_path / "engine").iterdir()] == []

    def test_another_targets_drafter_reaches_no_server(self, target: Path, drafter: Path, tmp_path: Path) -> None:
        other = write_drafter(tmp_path / "other", hidden=64)
        with serving(FakeServer()) as fake:
            folders = folders_of(target, tmp_path, servers=(fake.url,), check_length=False)
            deployment = open_deployment(folders.config, drafter, folders)
            with pytest.raises(DeployError, match="cannot be given to vllm"):
                deployment.load("drafter", other)
            assert deployment.undo == [] and fake.calls == []

    def test_a_target_that_the_engine_cannot_read(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="does not read the built-in smollm2-135m"):
            EngineFolders(DeployConfig("vllm"), EngineConfig(model="smollm2-135m"), tmp_path)


@pytest.mark.slow
def test_servers_get_that_folder_and_the_one_before_it(target: Path, drafter: Path, tmp_path: Path) -> None:
    new = write_drafter(tmp_path / "new")
    with serving(FakeServer()) as fake:
        folders = folders_of(target, tmp_path, servers=(fake.url,), check_length=False)
        folders.config = DeployConfig(
            "vllm", (fake.url,), restart=restart_command(tmp_path), num_drafted=3, check_length=False
        )
        deployment = open_deployment(folders.config, drafter, folders)
        deployment.load("drafter", new)
        assert deployment.members() == {"drafter": str(new)}, "the lineage knows it by its own name"
        undo = json.loads(json.dumps(deployment.undo))
        again = open_deployment(folders.config, drafter, folders)
        again.undo = undo
        again.roll_back()
    read = [Path(each["PACELINE_DRAFTER"]) for each in recorded_environments(tmp_path)]
    assert read == [folders.given(new).folder, folders.given(drafter).folder]
    assert json.loads(recorded_environments(tmp_path)[0]["PACELINE_SPECULATIVE_CONFIG"]) == {
        "method": "dflash",
        "model": str(read[0]),
        "num_speculative_tokens": 3,
    }


class Counting(FakeServer):
    """One whose twenty answers have so many accepted drafts each, in ten rounds."""

    def __init__(self, accepted: int) -> None:
        super().__init__()
        self.accepted, self.asked = accepted, 0
        self.count(0, 0, 0)

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "m"}]})
        if path == "/v1/completions":
            self.asked += 1
            self.count(10 * self.asked, self.accepted * self.asked, (10 + self.accepted) * self.asked)
        return super().answer(method, path, body)


class TestLength:
    def test_a_server_that_brings_less_is_refused(self) -> None:
        expected = Expected(3.0, [[1]] * 20)
        with serving(Counting(accepted=19)) as fake:
            check_length("vllm", Client(fake.url), expected)
        with serving(Counting(accepted=2)) as fake, pytest.raises(DeployError, match=r"1\.20 tokens a round.*clearly"):
            check_length("vllm", Client(fake.url), expected)

    def test_one_that_counts_nothing_is_not(self, caplog: pytest.LogCaptureFixture) -> None:
        with serving(FakeServer()) as fake:
            check_length("vllm", Client(fake.url), Expected(3.0, [[1]]))
            assert "was not checked" in caplog.text
            fake.is_away = True
            with pytest.raises(UnreachableError):
                check_length("vllm", Client(fake.url), Expected(3.0, [[1]]))

    def test_it_is_measured_on_the_same_device_and_may_fail_there(
        self, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        devices = list[str]()

        def brings(*settings: Any) -> float:
            devices.append(settings[-1])
            raise RuntimeError("CUDA out of memory.\nTried to allocate 2 GiB")

        monkeypatch.setattr(engine_folders, "brings", brings)
        folders = folders_of(target, tmp_path)
        folders.engine = EngineConfig(model=str(target), device="cpu")
        with pytest.raises(DeployError, match="--no-check-length.*: CUDA out of memory. Tried"):
            folders.expected(Given(tmp_path, "dflash", 3))
        assert devices == ["cpu"]

    @pytest.mark.slow
    def test_the_old_drafter_is_given_back(
        self, target: Path, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And nothing is said against the new one: the engine reads it otherwise."""
        measured = list[Path]()

        def brings(model: str, folder: Path, *_: Any) -> float:
            measured.append(folder)
            return 3.0

        monkeypatch.setattr(engine_folders, "brings", brings)
        with serving(Counting(accepted=2)) as fake:
            folders = folders_of(target, tmp_path)
            folders.config = DeployConfig("vllm", (fake.url,), restart=restart_command(tmp_path), num_drafted=3)
            deployment = open_deployment(folders.config, drafter, folders)
            with pytest.raises(DeployError, match="clearly less"):
                deployment.load("drafter", new := write_drafter(tmp_path / "new"))
            read = [Path(each["PACELINE_DRAFTER"]) for each in recorded_environments(tmp_path)]
            assert read == [folders.given(new).folder, folders.given(drafter).folder] and deployment.undo == []
            with pytest.raises(DeployError):
                deployment.load("drafter", new)
        assert measured == [folders.given(new).folder], "the target is loaded once"
