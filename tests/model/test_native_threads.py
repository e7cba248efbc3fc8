"""The native library while threads of a process share it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from native_models import needs_library

from paceline.model.native.build import COMPILERS

COMPILER = next(filter(shutil.which, COMPILERS), None)
pytestmark = [
    needs_library,
    pytest.mark.skipif(COMPILER is None or platform.libc_ver()[0] != "glibc", reason="needs a compiler and glibc"),
    pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="another library is preloaded"),
]
ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "paceline" / "model" / "native"

COMMON = """
#include <cstdlib>
#include <new>
#include <thread>

#include "model.h"

namespace pn {
const Kernels* portable_kernels(int) {
    static const Kernels none = {};
    return &none;
}
}
"""
READERS = """
int main() {
    std::thread writer([] {
        for (int at = 0; at < 1000; ++at) pn_use("portable"), pn_set_threads(at % 2 + 1);
    });
    int sum = 0;
    for (int at = 0; at < 1000; ++at) sum += pn::kernels_for(PN_F32) && pn_in_use() ? pn_num_threads() : 0;
    writer.join();
    return sum > 0 ? 0 : 1;
}
"""


def compiled(source: str, folder: Path, *flags: str) -> Path:
    """Compile a C++ program or library; returns its path."""
    file, out = folder / "program.cpp", folder / "program"
    file.write_text(source)
    assert COMPILER is not None
    subprocess.run([COMPILER, "-std=c++17", "-O1", "-o", str(out), str(file), *flags], check=True)
    return out


def with_shared_state(main: str, folder: Path, *flags: str) -> Path:
    """Compile a program with the files of the library that hold what all models share."""
    files = [str(NATIVE / name) for name in ("shared.cpp", "pool.cpp", "memory.cpp")]
    return compiled(COMMON + main, folder, f"-I{NATIVE}", "-pthread", *files, *flags)


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_settings_may_be_read_while_another_thread_changes_them(tmp_path: Path) -> None:
    """Rows of a matrix, and the likeliest tokens, are computed during passes of other threads, without their lock."""
    thread_sanitizer = "-fsanitize=thread"
    try:
        idle = compiled("int main() { return 0; }", tmp_path, thread_sanitizer)
    except subprocess.CalledProcessError:
        pytest.skip("this compiler has no thread sanitizer")
    if run([str(idle)]).returncode:
        pytest.skip("the thread sanitizer does not run here")
    done = run([str(with_shared_state(READERS, tmp_path, thread_sanitizer))], TSAN_OPTIONS="halt_on_error=1")
    assert done.returncode == 0 and "data race" not in done.stderr, done.stderr[:2000]
