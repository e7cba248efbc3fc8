"""The run folder: whole files, growing metrics, one-line errors."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline.errors import CacheError, ConfigError
from paceline.runs.folder import (
    RunFolder,
    check_file,
    check_own,
    check_place,
    plain,
    sync_folder,
    whole_file,
    whole_folder,
    write_results,
    write_whole,
)


def test_a_run_folder_holds_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/paceline", "train", "--target", "a model"])
    run = RunFolder.create("train", {"target": "a model", "path": tmp_path}, tmp_path / "run")
    config = json.loads((run.path / "config.json").read_text())
    assert config["what"] == "train"
    assert config["path"] == str(tmp_path)
    assert "python" in config["versions"]
    assert (run.path / "command.txt").read_text() == "paceline train --target 'a model'\n"


def test_a_result_file_says_what_made_it(tmp_path: Path) -> None:
    """One writer for run folders and scripts; peers add their versions."""
    run = RunFolder.create("bench", {}, tmp_path / "run")
    files = [run.results({"rate": 2.5}), write_results(tmp_path / "script.json", {"rate": 2.5}, peers={"peer": "1.2"})]
    for file in files:
        record = json.loads(file.read_text())
        assert record["rate"] == 2.5
        assert set(record["processor"]) == {"name", "num_cores"} and record["processor"]["num_cores"] >= 1
        assert {"python", "paceline", "torch"} <= set(record["versions"])
        assert "commit" in record and record["command"] and record["date"]
    assert json.loads(files[1].read_text())["versions"]["peer"] == "1.2"
    assert files[0] == run.path / "results.json"


def test_every_result_that_is_kept_says_what_made_it() -> None:
    files = sorted((Path(__file__).parent.parent.parent / "experiments" / "results").glob("*.json"))
    assert files
    for file in files:
        record = json.loads(file.read_text())
        assert record["versions"].keys() >= {"python", "torch"} and record["commit"] and record["command"], file.name
        assert (record.get("processor") or record["machine"])["name"], file.name


def test_every_script_that_prints_figures_says_what_made_them() -> None:
    scripts = Path(__file__).parent.parent.parent / "experiments"
    for script in scripts.glob("*.py"):
        text = script.read_text()
        assert "versions()" not in text and "commit()" not in text, f"{script.name} has a writer of its own"


def test_default_folders_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [RunFolder.create("bench", {}) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    assert all(run.path.parent == Path("runs") and run.path.name.startswith("bench-") for run in runs)


def test_metrics_grow_and_survive_a_crash(tmp_path: Path) -> None:
    run = RunFolder.create("train", {}, tmp_path / "run")
    run.log(step=1, loss=2.5)
    RunFolder.open(run.path).log(step=2, loss=math.nan)
    with (run.path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 3, "lo')
    assert run.metrics() == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]
    assert RunFolder.create("train", {}, run.path).metrics() == []


def test_a_run_begun_anew_has_no_results_of_the_one_before(tmp_path: Path) -> None:
    """A run that was killed before its results looked finished, with the figures of the one before."""
    for seed in (1, 2):
        run = RunFolder.create("bench", {"seed": seed}, tmp_path)
        assert not (tmp_path / "results.json").exists()
        run.results({"seed": seed})
    assert json.loads((tmp_path / "results.json").read_text())["seed"] == 2


def test_another_runs_folder_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """A run of the same type may be repeated in its folder, but not if its old files are read for the new ones."""
    run = RunFolder.create("train", {}, tmp_path / "run")
    run.log(step=1)
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    with pytest.raises(
        ConfigError, match=r"--out .*run is the folder of another run \(train\), .*choose another folder"
    ):
        RunFolder.create("bench", {}, run.path)
    assert {path.name: path.read_bytes() for path in run.path.iterdir()} == before
    for source in (run.path, run.path / "metrics.jsonl"):
        with pytest.raises(ConfigError, match="another run"):
            check_own(tmp_path / "." / "run", "train", source)
    check_own(tmp_path / "other", "train", run.path)
    check_own(None, "train", run.path)
    with pytest.raises(CacheError, match="a.html is named as a file, and a run needs a folder: give --out .*/a$"):
        check_own(tmp_path / "a.html", "train")


def test_a_run_continued_after_a_crash_drops_the_cut_line(tmp_path: Path) -> None:
    run = RunFolder.create("train", {}, tmp_path / "run")
    run.log(step=1)
    for cut in (b'{"step": 2, "lo', '{"text": "né'.encode()[:-1]):
        with (run.path / "metrics.jsonl").open("ab") as metrics:
            metrics.write(cut)
        assert run.metrics()[-1]["step"] in (1, 2)
        RunFolder.open(run.path).log(step=2)
    assert run.metrics() == [{"step": 1}, {"step": 2}, {"step": 2}]
    (run.path / "metrics.jsonl").write_text('{"step"')
    assert RunFolder.open(run.path).metrics() == []
    (run.path / "metrics.jsonl").unlink()
    assert RunFolder.open(run.path).metrics() == []


def test_writes_are_whole_and_leave_nothing_behind(tmp_path: Path) -> None:
    run = RunFolder.create("bench", {}, tmp_path / "run")
    run.write("report.md", "# one\n")
    run.write("report.md", "# two\n")
    assert (run.path / "report.md").read_text() == "# two\n"
    assert sorted(file.name for file in run.path.iterdir()) == ["command.txt", "config.json", "report.md"]


def test_a_name_that_is_too_long_is_one_line(tmp_path: Path) -> None:
    """The check for devices raised a raw OSError."""
    with pytest.raises(CacheError, match="cannot write .*File name too long"):
        write_whole(tmp_path / ("x" * 300), "text")


def test_a_device_or_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """For root, /dev/null became an ordinary file."""
    os.mkfifo(pipe := tmp_path / "pipe")
    for write in (lambda: write_whole(pipe, "x"), lambda: check_place(pipe), lambda: check_file(pipe, "")):
        with pytest.raises(CacheError, match="a device, a pipe or a socket: name an ordinary file"):
            write()
    assert pipe.is_fifo() and [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Synthesised answers and an MCP client's drafters were deleted before the new ones were whole."""
    for text, error in (("first", None), ("second", OSError(28, "No space left on device")), ("third", None)):
        with contextlib.ExitStack() as stack:
            if error is not None:
                stack.enter_context(pytest.raises(CacheError, match="No space left .*: free space"))
            with whole_folder(tmp_path / "one", "free space") as scratch:
                (scratch / "file").write_text(text)
                if error is not None:
                    raise error
        assert [path.name for path in tmp_path.iterdir()] == ["one"]
        assert (tmp_path / "one" / "file").read_text() == ("first" if error else text)
    umask = os.umask(0o022)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o777 & ~umask


def write_folder(folder: Path, text: str) -> None:
    with whole_folder(folder) as scratch:
        (scratch / "file").write_text(text)


def test_an_old_folder_stays_if_it_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was deleted in part before, and the new one deleted, too."""
    folder, rename = tmp_path / "one", Path.rename
    write_folder(folder, "first")

    def fails(path: Path, target: Path) -> Path:
        if path.name == ".one.part":
            raise OSError(18, "Invalid cross-device link")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fails)
        with pytest.raises(CacheError, match="cannot write .*one .*cross-device"):
            write_folder(folder, "second")
    assert [path.name for path in tmp_path.iterdir()] == ["one"] and (folder / "file").read_text() == "first"
    with monkeypatch.context() as patch:  # nothing of the old one can be deleted
        patch.setattr("paceline.runs.folder.shutil.rmtree", lambda *_, **options: None)
        write_folder(folder, "second")
    assert (folder / "file").read_text() == "second" and (tmp_path / ".one.before" / "file").read_text() == "first"
    write_folder(folder, "third")
    folder.rename(tmp_path / ".one.before")  # as a kill between the two renames leaves it
    with pytest.raises(KeyError), whole_folder(folder):
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["one"] and (folder / "file").read_text() == "third"


def test_the_home_of_an_unknown_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run was written into a folder with the name ~nobody_here."""
    monkeypatch.chdir(tmp_path)
    for out in ("~nobody_here/x", "~/x", "~"):
        with pytest.raises(CacheError, match=f"cannot write {out}: there is no home folder ~.* here: write the path"):
            check_own(out, "train")
    (tmp_path / "~nobody_here").mkdir()
    for out in ("~nobody_here/x", "~copy.json"):
        check_place(Path(out))


def test_a_folder_is_written_through_a_link_and_from_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to another disk could not be replaced, and `--out .` ended in a traceback."""
    for name in ("real", "run", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "answers").symlink_to(tmp_path / "real")
    write_folder(tmp_path / "run" / "answers", "new")
    assert (tmp_path / "run" / "answers").is_symlink() and (tmp_path / "real" / "file").read_text() == "new"
    monkeypatch.chdir(tmp_path / "empty")
    write_folder(Path(), "here")
    assert (tmp_path / "empty" / "file").read_text() == "here"


def test_unwritable_folders_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="choose another folder with --out"):
        RunFolder.create("bench", {}, tmp_path / "file" / "run")
    with pytest.raises(CacheError, match="not a run folder"):
        RunFolder.open(tmp_path)


def test_plain_values() -> None:
    numpy = pytest.importorskip("numpy")
    assert plain({"a": numpy.float32(0.5), 1: (math.inf, True, None), "s": {3}}) == {
        "a": 0.5,
        "1": [None, True, None],
        "s": [3],
    }


class TestWholeFile:
    def test_files_of_one_stem_are_written_side_by_side(self, tmp_path: Path) -> None:
        """Two formats of one thing, and two writers of the same file: the last one to end wins."""
        with whole_file(tmp_path / "a.safetensors") as weights, whole_file(tmp_path / "a.json") as metadata:
            weights.write_bytes(b"weights")
            metadata.write_text("{}")
        with whole_file(tmp_path / "b") as first, whole_file(tmp_path / "b") as second:
            first.write_text("first")
            second.write_text("second")
        names = {path.name: path.read_text() for path in tmp_path.iterdir()}
        assert names == {"a.safetensors": "weights", "a.json": "{}", "b": "first"}

    def test_what_fails_leaves_the_old_file_and_nothing_else(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text("old")

        def fail() -> None:
            with whole_file(tmp_path / "a.json") as scratch:
                scratch.write_text("ne")
                raise OSError("no space")

        with pytest.raises(CacheError, match="no space"):
            fail()
        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]

    def test_it_is_on_the_disk_before_it_has_its_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """File, name, folder: in any other order a power cut may leave a name with half a file."""
        steps: list[str] = []
        replace, fsync = Path.replace, os.fsync

        def renamed(scratch: Path, path: Path) -> Path:
            steps.append("rename")
            return replace(scratch, path)

        def synced(handle: int) -> None:
            steps.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
            fsync(handle)

        monkeypatch.setattr(Path, "replace", renamed)
        monkeypatch.setattr(os, "fsync", synced)
        write_whole(tmp_path / "a.json", "{}")
        assert steps == ["file", "rename", "folder"]

    def test_what_a_killed_writer_left_goes_when_it_is_old(self, tmp_path: Path) -> None:
        kinds = {"old": f"a.json.{'0' * 16}.part", "young": f"a.json.{'1' * 16}.part", "foreign": "a.part"}
        for name in kinds.values():
            (tmp_path / name).write_text("half")
            os.utime(tmp_path / name, (1, 1))
        os.utime(tmp_path / kinds["young"])
        write_whole(tmp_path / "b.json", "{}")
        assert {path.name for path in tmp_path.iterdir()} == {kinds["young"], kinds["foreign"], "b.json"}

    def test_what_another_user_left_hinders_nobody(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a folder like /tmp only a file's owner may delete it."""
        left = tmp_path / f"a.json.{'0' * 16}.part"
        left.write_text("half")
        os.utime(left, (1, 1))
        unlink = Path.unlink

        def guarded(path: Path, missing_ok: bool = False) -> None:
            if path == left:
                raise PermissionError(1, "Operation not permitted")
            unlink(path, missing_ok)

        monkeypatch.setattr(Path, "unlink", guarded)
        write_whole(tmp_path / "b.json", "{}")
        assert {path.name for path in tmp_path.iterdir()} == {left.name, "b.json"}

    def test_it_has_the_mode_that_was_wanted(self, tmp_path: Path) -> None:
        with whole_file(tmp_path / "a", mode=0o600) as scratch:
            assert stat.S_IMODE(scratch.stat().st_mode) == 0o600
            scratch.write_text("secret")
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
        for mode in (0o600, 0o644):  # safetensors puts a file of mode 0600 in the place of another
            with whole_file(tmp_path / "b", mode=mode) as scratch:
                save_file({"a": np.zeros(1)}, scratch)
            assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == mode


def test_a_folder_is_synced_with_all_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("a", "inner/b"):
        (tmp_path / name).write_text("text")
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    sync_folder(tmp_path)
    paths = [tmp_path / "a", tmp_path / "inner" / "b", tmp_path / "inner", tmp_path]
    assert sorted(synced) == sorted(path.stat().st_ino for path in paths) and synced[-1] == tmp_path.stat().st_ino
