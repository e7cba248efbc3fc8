"""The native library while threads of a process share it, and where the system has no memory left."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from native_models import needs_library

from paceline.model.native.build import COMPILERS

COMPILER = next(filter(shutil.which, COMPILERS), None)
pytestmark = [
    needs_library,
    pytest.mark.skipif(COMPILER is None or platform.libc_ver()[0] != "glibc", reason="needs a compiler and glibc"),
    pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="another malloc is preloaded"),
]
ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "paceline" / "model" / "native"

MALLOC = """
#include <cstddef>
#include <sys/syscall.h>
#include <unistd.h>

extern "C" {
void* __libc_malloc(size_t bytes);
static volatile int is_refused = 0;
void refuse_workers(int refuse) { is_refused = refuse; }
void* malloc(size_t bytes) {
    return is_refused && syscall(SYS_gettid) != getpid() ? nullptr : __libc_malloc(bytes);
}
}
"""
PASSES = """
import ctypes, sys
import torch
from native_models import SHAPES, random_weights, same_bits, use
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import ForwardBatch

shape, malloc = SHAPES[sys.argv[1]], ctypes.CDLL(sys.argv[2])
weights = random_weights(shape)
target = NativeDecoder(shape, weights.items(), num_rows=2, max_len=64, dtype=torch.float32)
use("portable", 3)
for row in range(2):
    target.cache.allocate()
batch = ForwardBatch([0, 1], [0, 0], [12, 5], list(range(17)))
expected = target.forward(batch).logits_TV.clone()
for _ in range(10):
    target.cache.rollback([0, 1], [0, 0])
    malloc.refuse_workers(1)
    logits = target.forward(batch).logits_TV
    malloc.refuse_workers(0)
    assert same_bits(logits, expected)
print("all passes")
"""
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
ERROR = """
static bool is_refused = false;
void* operator new(size_t bytes) {
    if (is_refused) throw std::bad_alloc();
    return malloc(bytes);
}
void operator delete(void* data) noexcept { free(data); }
int main() {
    is_refused = true;
    return pn_set_threads(0) == -1 && pn_last_error()[0] ? 0 : 1;
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


@pytest.mark.parametrize("shape", ["oss-experts", "shared-expert", "delta-nets", "mistral-window"])
def test_a_pass_needs_no_memory_in_its_worker_threads(shape: str, tmp_path: Path) -> None:
    """A worker that sorted rows by expert, or multiplied experts, allocated: without memory the process ended."""
    malloc = str(compiled(MALLOC, tmp_path, "-shared", "-fPIC"))
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    command = [sys.executable, "-c", PASSES, shape, malloc]
    done = run(command, LD_PRELOAD=malloc, OMP_NUM_THREADS="1", PYTHONPATH=paths)
    assert done.returncode == 0 and done.stdout == "all passes\n", done.stderr[-2000:]


def test_an_error_is_reported_without_memory(tmp_path: Path) -> None:
    """The message was copied into a string: without memory that exception ended the process."""
    done = run([str(with_shared_state(ERROR, tmp_path))])
    assert done.returncode == 0, done.stderr


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
