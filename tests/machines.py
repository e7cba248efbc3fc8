"""Runs the test suite as other machines would, with every instruction set, number of threads, and load.

    python tests/machines.py                             # what `make test-machines` runs
    python tests/machines.py --list
    python tests/machines.py --only aten-avx2 --only native-portable+busy tests/model tests/engine

Settings of this processor: what PyTorch computes with (ATEN_CPU_CAPABILITY), the native library's instruction sets
(PACELINE_ISA, read by tests/conftest.py), one and four threads of PyTorch (PACELINE_TEST_THREADS), and two busy loops
beside the suite. A run combines one setting of each kind; there are as many runs as it takes to try every setting once.
Results go to build/machines/<commit>/<run>.xml; an interrupted day continues with the runs that have none. Those of a
tree with changes, or without a commit, are not reused: the next tree may be another one under the same name.
Exit status: 0 if all tests of all runs passed, else 1.
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
BUSY, JOINT, NO_COMMIT = "busy", "+", "no-commit"


class Outcome(NamedTuple):
    """Tests of one run by how they ended, and its seconds."""

    num_tests: int
    num_skipped: int
    failed: list[str]
    seconds: float


def settings() -> list[dict[str, dict[str, str]]]:
    """The settings that this machine can run, with their environments, by kind."""
    import torch  # here, so that --help answers at once

    from paceline.model.native import library as native_lib

    here = torch.backends.cpu.get_cpu_capability().lower()
    known = ATEN[: ATEN.index(here) + 1] if here in ATEN else ("default",)
    kinds = [{f"aten-{name}": {"ATEN_CPU_CAPABILITY": name} for name in known}]
    if native_lib.load() is not None:
        names = reversed(native_lib.require().pn_available().decode().split(","))
        kinds.append({f"native-{name}": {"PACELINE_ISA": name} for name in names})
    kinds.append({f"threads-{count}": {"PACELINE_TEST_THREADS": str(count)} for count in (1, 4)})
    return kinds


def runs(kinds: list[dict[str, dict[str, str]]]) -> list[str]:
    """The fewest runs that try every setting once, the first beside busy loops; a run's name joins its settings'."""
    names = [JOINT.join(list(kind)[index % len(kind)] for kind in kinds) for index in range(max(map(len, kinds)))]
    return [names[0] + JOINT + BUSY, *names[1:]]


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
    part = file.with_name(f"{file.name}.part")
    command = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
    words = words or ["--ignore", "tests/native"]
    with busy_loops(2 if BUSY in name.split(JOINT) else 0):
        done = subprocess.run([*command, "--junitxml", str(part), *words], cwd=ROOT, env={**os.environ, **environment})
    if done.returncode in (4, 5):
        raise SystemExit(f"{name}: pytest found no tests in {' '.join(words)}; name files or folders that hold some")
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
    parser.add_argument("--only", action="append", metavar="SETTINGS", help="settings joined by +; may be repeated")
    parser.add_argument("--again", action="store_true", help="also runs that have results")
    parser.add_argument("--list", action="store_true", help="the runs of this machine")
    parser.add_argument("words", nargs="*", metavar="PATH", help="tests to run; without any, the whole suite")
    options = parser.parse_args()
    kinds = settings()
    known = {name: environment for kind in [*kinds, {BUSY: {}}] for name, environment in kind.items()}
    if options.list:
        print("\n".join(runs(kinds)))
        return 0
    if unknown := {name for each in options.only or () for name in each.split(JOINT)} - known.keys():
        parser.error(f"no setting {', '.join(sorted(unknown))} here; choose from {', '.join(known)}")
    results = folder()
    results.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Outcome] = {}
    for name in options.only or runs(kinds):
        file = results / (f"{name}-some.xml" if options.words else f"{name}.xml")
        if options.again or options.words or not is_reusable(results) or not file.exists():
            print(f"== {name}", flush=True)
            environment = {key: value for each in name.split(JOINT) for key, value in known[each].items()}
            run(name, environment, file, options.words)
        outcomes[name] = outcome_of(file)
    return report(outcomes)


def report(outcomes: dict[str, Outcome]) -> int:
    """The table, then what failed by run; 1 if anything did."""
    print(f"\n{'run':<52}{'tests':>8}{'skipped':>9}{'failed':>8}{'seconds':>9}")
    for name, each in outcomes.items():
        print(f"{name:<52}{each.num_tests:>8}{each.num_skipped:>9}{len(each.failed):>8}{each.seconds:>9.0f}")
    for name, each in outcomes.items():
        for test in each.failed:
            print(f"{name}: {test}")
    return int(any(each.failed for each in outcomes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
