"""The native library on ARM: compiled for AArch64, run under QEMU, and compared bit for bit with this machine's.

    make test-arm        (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)

`cases.cpp` runs every function of the interface on inputs that are the same everywhere: products with every format in
every size of tile, sampling, and whole passes. What it prints must not depend on the processor: weights in blocks have
the bits of any x86 instruction set, dense ones those of AVX2. `tests/model/test_native_*.py` say that these are the
right ones.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.model.native import build

NATIVE, HERE = Path(build.__file__).parent, Path(__file__).parent
CROSS, EMULATOR, SYSROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
PROCESSORS = {
    "cortex-a72": "neon,portable",
    "neoverse-n1": "dotprod,neon,portable",
    "max": "i8mm,dotprod,neon,portable",
}
"""For each CPU the instruction sets that the library must find: none, dot products, matrix products."""

missing = [name for name in (CROSS, EMULATOR, "g++") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (g++-aarch64-linux-gnu, qemu-user)"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with x86-64"),
]


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


def compiled(folder: Path, compiler: str) -> Path:
    """The library as an installation makes it, and the cases beside it."""
    library, cases = folder / compiler / build.library_name(), folder / compiler / "cases"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", compiler)
        build.compile_library(NATIVE, library)
    flags = [
        "-std=c++17",
        "-O1",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Wno-psabi",
        "-Werror",
        "-pthread",
        f"-I{NATIVE}",
    ]
    run(compiler, *flags, HERE / "cases.cpp", library, f"-Wl,-rpath,{library.parent}", "-o", cases)
    return cases


@pytest.fixture(scope="module")
def here(folder: Path) -> Path:
    cases = compiled(folder, "g++")
    if "avx2" not in run(cases):
        pytest.skip("this processor has no AVX2 to compare with")
    return cases


@pytest.fixture(scope="module")
def arm(folder: Path) -> Path:
    return compiled(folder, CROSS)


def emulated(cases: Path, processor: str, *arguments: str) -> str:
    return run(EMULATOR, "-L", SYSROOT, "-cpu", processor, cases, *arguments)


def only_blocks(lines: str) -> list[str]:
    return [line for line in lines.splitlines() if line.startswith("blocks")]


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_best_that_a_processor_has_is_found(arm: Path, processor: str) -> None:
    assert emulated(arm, processor).strip() == PROCESSORS[processor]


@pytest.mark.parametrize(("isa", "processor"), [("neon", "cortex-a72"), ("dotprod", "neoverse-n1"), ("i8mm", "max")])
def test_every_bit_is_that_of_x86(here: Path, arm: Path, isa: str, processor: str) -> None:
    """On the oldest processor that has the instruction set: one instruction too new ends it."""
    expected, ours = run(here, "avx2"), emulated(arm, processor, isa)
    assert len(expected.splitlines()) >= 200
    assert ours.splitlines() == expected.splitlines()
    for other in run(here).strip().split(","):
        if other != "avx2" and "emulated" not in other:
            assert only_blocks(run(here, other)) == only_blocks(ours), other


def test_plain_code_has_the_same_bits_too(here: Path, arm: Path) -> None:
    assert emulated(arm, "cortex-a72", "portable") == run(here, "portable")


def test_the_library_needs_nothing_that_a_wheel_may_not(arm: Path) -> None:
    """The C++ runtime is inside; only the C library's own parts are asked for."""
    needed = run("aarch64-linux-gnu-readelf", "-d", arm.parent / build.library_name())
    names = {line.split("[")[1].rstrip("]") for line in needed.splitlines() if "(NEEDED)" in line}
    assert names <= {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-aarch64.so.1"}, names
    assert os.path.getsize(arm.parent / build.library_name()) < 20 << 20
