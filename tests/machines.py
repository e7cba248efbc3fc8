"""Runs the test suite as other machines would: one run for each instruction set, number of threads, and load.

    python tests/machines.py                             # what `make test-machines` runs
    python tests/machines.py --list
    python tests/machines.py --only aten-avx2 tests/model tests/engine

Results go to build/machines/<commit>/<setting>.xml; an interrupted run continues with the settings that have none.
Those of a tree with changes, or without a commit, are not reused: the next tree may be another one under the same name.
Settings of this processor: what PyTorch computes with (ATEN_CPU_CAPABILITY), the native library's instruction sets
(PACELINE_ISA, read by tests/conftest.py), one and four threads of PyTorch (PACELINE_TEST_THREADS), and two busy loops
beside the suite.
Exit status: 0 if all tests of all settings passed, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
ATEN = ("default", "avx2", "avx512")
"""From the smallest to the largest."""
BUSY, NO_COMMIT = "busy", "no-commit"


class Outcome(NamedTuple):
    """Tests of one run by how they ended, and its seconds."""

    num_tests: int
    num_skipped: int
    failed: list[str]
    seconds: float


def settings() -> dict[str, dict[str, str]]:
    """Environment of each setting that this machine can run."""
    import torch  # here, so that --help answers at once

    from paceline.model import native_lib

    here = torch.backends.cpu.get_cpu_capability().lower()
    known = ATEN[: ATEN.index(here) + 1] if here in ATEN else ("default",)
    tried = {f"aten-{name}": {"ATEN_CPU_CAPABILITY": name} for name in known}
    if native_lib.load() is not None:
        names = native_lib.require().pn_available().decode().split(",")
        tried |= {f"native-{name}": {"PACELINE_ISA": name} for name in names}
    tried |= {f"threads-{count}": {"PACELINE_TEST_THREADS": str(count)} for count in (1, 4)}
    return tried | {BUSY: {}}


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Programs that take what they get of the processors."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(name: str, environment: dict[str, str], file: Path, words: list[str]) -> None:
    """One run of pytest, whose results are in `file` only when it has come to its end."""
    part = file.with_suffix(".part")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "auto",
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        "--junitxml",
        str(part),
    ]
    words = words or ["--ignore", "tests/native"]
    with busy_loops(2 if name == BUSY else 0):
        done = subprocess.run([*command, *words], cwd=ROOT, env={**os.environ, **environment})
    if done.returncode not in (0, 1):
        raise SystemExit(f"{name}: pytest ended with status {done.returncode} before its tests did; run it again")
    part.rename(file)


def outcome_of(file: Path) -> Outcome:
    suite = ElementTree.parse(file).getroot().find("testsuite")
    assert suite is not None
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.findall("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return Outcome(int(suite.get("tests", 0)), int(suite.get("skipped", 0)), failed, float(suite.get("time", 0)))


def folder() -> Path:
    """Results of another commit are no results of this one."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    return ROOT / "build" / "machines" / (done.stdout.strip() or NO_COMMIT)


def is_reusable(results: Path) -> bool:
    """True if the folder's name stands for one state of the tree."""
    return not results.name.endswith(("-dirty", NO_COMMIT))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="SETTING", help="this setting alone; may be repeated")
    parser.add_argument("--again", action="store_true", help="also settings that have results")
    parser.add_argument("--list", action="store_true", help="the settings of this machine")
    parser.add_argument("words", nargs="*", metavar="PATH", help="tests to run; without any, the whole suite")
    options = parser.parse_args()
    known = settings()
    if options.list:
        print("\n".join(known))
        return 0
    if unknown := set(options.only or ()) - known.keys():
        parser.error(f"no setting {', '.join(sorted(unknown))} here; choose from {', '.join(known)}")
    results = folder()
    results.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Outcome] = {}
    for name in options.only or known:
        file = results / (f"{name}-some.xml" if options.words else f"{name}.xml")
        if options.again or options.words or not is_reusable(results) or not file.exists():
            print(f"== {name}", flush=True)
            run(name, known[name], file, options.words)
        outcomes[name] = outcome_of(file)
    return report(outcomes)


def report(outcomes: dict[str, Outcome]) -> int:
    """The table, then what failed by setting; 1 if anything did."""
    print(f"\n{'setting':<24}{'tests':>8}{'skipped':>9}{'failed':>8}{'seconds':>9}")
    for name, each in outcomes.items():
        print(f"{name:<24}{each.num_tests:>8}{each.num_skipped:>9}{len(each.failed):>8}{each.seconds:>9.0f}")
    for name, each in outcomes.items():
        for test in each.failed:
            print(f"{name}: {test}")
    return int(any(each.failed for each in outcomes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
