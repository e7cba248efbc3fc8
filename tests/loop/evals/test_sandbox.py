"""Code of a stranger: it runs, it is told why it failed, and ten hostile answers do nothing and cost at most their
limits."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hostile_answers import ANSWERS, beyond, world

from paceline.errors import SandboxError
from paceline.loop.evals.sandbox import run as module
from paceline.loop.evals.sandbox.run import Limits, Sandbox

LIMITS = Limits(wall_s=1.0, cpu_s=1, memory_bytes=128 * 2**20, processes=8)
"""Limits of hostile answers; others get enough time for a busy machine."""
PATIENCE_S = 60.0
"""How late the warden may be on a machine that does other work, before whatever is left is killed from outside."""
BOX = Sandbox(Limits(wall_s=30.0))
FENCE = next(
    (
        one
        for python in (None, "/usr/bin/python3")
        if (one := Sandbox(LIMITS, kinds=("landlock",), python=python)).kind != "none"
    ),
    Sandbox(LIMITS, kinds=("landlock",)),
)
"""Where there are no namespaces; of a Python that nobody may read, another one."""
needs_sandbox = pytest.mark.skipif(BOX.kind != "namespaces", reason="this machine allows no user namespaces")
needs_landlock = pytest.mark.skipif(FENCE.kind != "landlock", reason="this machine has no Landlock of Linux 6.2")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", PATIENCE_S)


@pytest.mark.slow
@needs_sandbox
def test_what_runs_to_its_end_has_passed() -> None:
    done = BOX.run("import json, re, math, collections\nassert math.prod([2, 3]) == 6\nopen('/tmp/x', 'w').write('ok')")
    assert done.passed and done.why == "passed"
    threads = "import threading\none = threading.Thread(target=print)\none.start()\none.join()"
    assert BOX.run(threads).passed


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize("code", ["import os; os._exit(0)", "raise SystemExit(0)", "import os; os._exit(42)", "exit()"])
def test_an_answer_that_ends_the_process_has_passed_nothing(code: str) -> None:
    assert BOX.run(code).outcome == "ended"


@pytest.mark.slow
@needs_sandbox
def test_it_says_why() -> None:
    assert BOX.run("assert 1 == 2, 'not equal'").why == "AssertionError: not equal"
    assert "invalid syntax" in BOX.run("def (").stderr
    assert BOX.run("x = '\0'").outcome == "ended"
    assert BOX.run("import sys; sys.stderr.write('\x1b[2J' * 9999); raise SystemExit(1)").why.startswith(
        "\N{REPLACEMENT CHARACTER}"
    )


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize("name", list(ANSWERS))
def test_hostile_answers_do_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TEST", "told")
    with world() as ours:
        ran = Sandbox(LIMITS).run(ours.program(name))
        assert not ran.passed, "its attack has worked"
        assert not ours.harm()
        assert not beyond(ran, LIMITS) and ran.wall_s < PATIENCE_S
    assert ran.outcome != "killed", "the warden ends it, not we from outside"


@pytest.mark.slow
@needs_landlock
@pytest.mark.parametrize(
    "name", ["fork bomb", "file deletion", "network", "symlinks", "pickle", "disk filler", "daemon", "escape"]
)
def test_hostile_answers_do_nothing_without_namespaces(name: str) -> None:
    with world() as ours:
        ran = replace(FENCE, limits=LIMITS).run_in("landlock", ours.program(name))
        assert not ran.passed and ran.outcome not in ("killed", "setup"), ran
        assert not ours.harm()
        assert not beyond(ran, LIMITS) and ran.wall_s < PATIENCE_S


@pytest.mark.slow
@needs_landlock
def test_without_namespaces_threads_run_and_processes_do_not() -> None:
    threads = (
        "import threading\none = threading.Thread(target=print)\none.start()\none.join()\nopen('x', 'w').write('ok')"
    )
    assert FENCE.run(threads).passed
    for line in (
        "os.fork()",
        "os.kill(os.getppid(), 9)",
        "os.chmod('/tmp', 0)",
        "os.listdir('/')",
        "open('/proc/self/environ')",
    ):
        done = FENCE.run(f"import os\n{line}")
        assert done.outcome == "ended" and "PermissionError" in done.why, (line, done)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="other users run answers as themselves")
def test_a_python_that_only_root_may_run_is_said(tmp_path: Path) -> None:
    """Landlock takes rights away and gives none: the answer runs as nobody."""
    (tmp_path / "private").mkdir(mode=0o700)
    python = tmp_path / "private" / "python"
    python.symlink_to(os.path.realpath(sys.executable))
    box = Sandbox(kinds=("landlock",), python=str(python))
    done = box.run_in("landlock", "pass")
    assert not done.passed and "the answer runs as nobody, who may not run" in done.stderr
    with pytest.raises(SandboxError, match="who may not run .*as root with a Python that all users may run"):
        box.check()


@pytest.mark.slow
@needs_sandbox
def test_harm_would_be_seen() -> None:
    with world() as ours:
        ours.file.write_text("theirs")
        assert ours.harm() == ["a file was changed"]


@pytest.mark.slow
@needs_sandbox
def test_no_descriptor_and_no_environment_come_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "told")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        output = BOX.run(
            "import os, sys\nprint(sorted(os.environ), os.getcwd(), os.listdir('/'), file=sys.stderr)\nos._exit(1)"
        ).stderr
        count = BOX.run("import os\nassert len(os.listdir('/proc/self/fd')) <= 5")
    assert (
        "A_SECRET" not in output
        and "LC_ALL" in output
        and "/tmp" in output
        and "work" not in output
        and "home" not in output
    )
    assert count.passed, count.stderr


@pytest.mark.slow
@needs_sandbox
def test_what_the_filter_refuses_and_what_it_does_not() -> None:
    code = """
import ctypes, errno, os, platform
libc = ctypes.CDLL(None, use_errno=True)
for flags in (0x10000000, 0x20000, 0x20000000, 0x40000000):
    assert libc.unshare(flags) == -1 and ctypes.get_errno() == errno.EPERM
numbers = {"x86_64": (41, 101, 165, 250, 321, 425), "aarch64": (198, 117, 40, 219, 280, 425)}[platform.machine()]
for number in numbers:
    assert libc.syscall(number, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM, number
clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
assert libc.syscall(clone, 0x10000000 | 17, 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM
process = os.fork()
if process == 0:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
"""
    done = BOX.run(code)
    assert done.passed, done.stderr


@pytest.mark.slow
@needs_sandbox
def test_each_wall_stands_by_itself() -> None:
    """Where one of them keeps an attack out, the others would not be missed by it."""
    kinds = ("ipc", "mnt", "net", "pid", "user", "uts")
    outside = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in kinds}
    code = f"""
import os, resource
shared = [kind for kind, ours in {outside!r}.items() if os.readlink(f"/proc/self/ns/{{kind}}") == ours]
assert not shared, shared
assert resource.getrlimit(resource.RLIMIT_NPROC) == (8, 8)
assert os.getuid() != 0 and os.geteuid() != 0
for folder in ("/usr", "/"):
    assert os.statvfs(folder).f_flag & os.ST_RDONLY, folder
"""
    done = Sandbox(replace(LIMITS, wall_s=30.0)).run(code)
    assert done.passed, done.stderr


@pytest.mark.slow
def test_without_a_sandbox_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_probed", lambda _: ("none", "code cannot be kept apart: add --unsafe-code"))
    with pytest.raises(SandboxError, match="--unsafe-code"):
        Sandbox().run(f"open({str(tmp_path / 'x')!r}, 'w')")
    assert not (tmp_path / "x").exists()
    trusting = Sandbox(unsafe=True)
    assert trusting.run("assert True").passed and not trusting.run("assert False").passed


@pytest.mark.skipif(sys.platform != "linux", reason="the check is of Linux")
def test_a_machine_that_has_neither_is_named(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="namespaces: no_such_python.*user namespaces are allowed"):
        Sandbox(LIMITS, python=str(python_that_ends_at_once(tmp_path))).check()


def python_that_ends_at_once(folder: Path) -> Path:
    file = folder / "python"
    file.write_text("#!/bin/sh\necho no_such_python >&2\nexit 1\n")
    file.chmod(0o755)
    return file
