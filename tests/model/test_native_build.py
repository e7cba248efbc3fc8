"""The build of the native library, on a small source tree of its own: what it makes, and how it fails."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from support.native_models import ISAS

from paceline.model.native import build
from paceline.model.native.build import (
    NativeBuildError,
    build_for_install,
    compile_library,
    find_compiler,
    library_name,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMPILER = next(filter(shutil.which, build.COMPILERS), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
ON_X86 = platform.machine() in ("x86_64", "AMD64")

HEADER = """
// As many definitions of one function as there are files: the library must keep a portable one.
inline __attribute__((noinline)) int widest() {
#if defined(__AVX512F__)
    return 512;
#elif defined(__AVX2__)
    return 256;
#else
    return 128;
#endif
}
"""
MODEL = """
#include <string>
#include "shared.h"
#ifdef PN_HAS_AVX2
int avx2();
#endif
#ifdef PN_HAS_AVX512
int avx512();
#endif
#define API extern "C" __attribute__((visibility("default")))
API int widest_in_shared_code() { return widest(); }
API int length(const char* text) { return static_cast<int>(std::string(text).size()); }
API int past_the_end(int count) {
    int* values = new int[count];
    int value = values[count];
    delete[] values;
    return value;
}
API int sets() {
    int found = 0;
#ifdef PN_HAS_AVX2
    found += avx2() ? 1 : 0;
#endif
#ifdef PN_HAS_AVX512
    found += avx512() ? 2 : 0;
#endif
    return found;
}
"""


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "CXX",
        "PACELINE_NATIVE_BUILD",
        "LD_PRELOAD",
    ):  # make sanitize preloads its runtime: not into the compiler
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "shared.h").write_text(HEADER)
    (folder / "model.cpp").write_text(MODEL)
    return folder


@pytest.fixture
def sources_with_kernels(sources: Path) -> Path:
    for name in ("avx2", "avx512", "portable"):
        (sources / f"kernels_{name}.cpp").write_text(f'#include "shared.h"\nint {name}() {{ return widest(); }}\n')
    return sources


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))


@needs_compiler
def test_a_library_loads_and_exports_only_its_interface(
    sources_with_kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instruction set that the compiler refuses is left out."""
    monkeypatch.setitem(build.INSTRUCTION_SETS, "avx512", ("-mavx4096",))
    out = tmp_path / "new" / library_name()
    sets = compile_library(sources_with_kernels, out)
    assert sets == (["avx2"] if ON_X86 else [])
    library = ctypes.CDLL(str(out))
    assert library.length(b"seven..") == 7
    assert library.sets() == len(sets)
    assert library.widest_in_shared_code() == 128, "code every processor runs holds newer instructions"
    assert not hasattr(library, "_Z6widestv") and not hasattr(library, "_Z8portablev")
    assert [path.name for path in out.parent.iterdir()] == [library_name()], "scratch files stay"


@needs_compiler
@pytest.mark.skipif(not ON_X86, reason="instruction sets of x86")
def test_an_instruction_set_that_is_left_out_is_not_compiled(sources_with_kernels: Path, tmp_path: Path) -> None:
    out = tmp_path / library_name()
    assert compile_library(sources_with_kernels, out, leave_out={"avx512", "amx"}) == ["avx2"]
    assert ctypes.CDLL(str(out)).sets() == 1


def test_the_sets_that_a_processor_lacks_are_read_from_its_flags(tmp_path: Path) -> None:
    flags = "flags\t\t: fpu avx2 avx512f avx512_vnni avx512_bf16 erms\nbugs\t\t: amx_int8_of_another_name\n"
    (tmp_path / "zen4").write_text(flags)
    assert build.lacking_here(tmp_path / "zen4") == {"avxvnni", "amx", "dotprod", "i8mm"}
    assert build.lacking_here(tmp_path / "missing") == set()


def test_the_library_for_this_processor_alone_has_all_that_the_whole_one_offers_here() -> None:
    sets = {*build.INSTRUCTION_SETS, "amx"} & set(ISAS)
    assert not sets & build.lacking_here(), "the library finds sets that /proc/cpuinfo does not name"


@needs_compiler
def test_the_first_error_of_the_compiler_is_reported_and_the_old_library_kept(sources: Path, tmp_path: Path) -> None:
    out = tmp_path / library_name()
    out.write_text("the old one")
    (sources / "pool.cpp").write_text("#warning first a warning\nint half() { return undeclared / 2; }\n")
    with pytest.raises(NativeBuildError, match=r"pool.cpp:2:\d+: error: .*undeclared") as caught:
        compile_library(sources, out)
    assert "first a warning" not in str(caught.value)
    assert out.read_text() == "the old one"


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="the words are those of GNU ld")
def test_a_function_nobody_wrote_is_found_at_the_link(tmp_path: Path) -> None:
    (tmp_path / "pool.cpp").write_text("void nowhere();\nvoid call() { nowhere(); }\n")
    with pytest.raises(NativeBuildError, match="nowhere"):
        compile_library(tmp_path, tmp_path / library_name())


def test_without_a_compiler_the_error_says_what_to_install(sources: Path, tmp_path: Path, no_compiler: None) -> None:
    with pytest.raises(
        NativeBuildError, match=r"no C\+\+ compiler \(none of g\+\+, clang\+\+, c\+\+ is on the path\)\ninstall g\+\+"
    ):
        compile_library(sources, tmp_path / library_name())


def test_a_wrong_CXX_is_named_and_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m32")
    with pytest.raises(NativeBuildError, match="CXX=no-such-compiler is not on the path"):
        find_compiler()


def test_CXX_may_carry_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -m something")
    assert find_compiler() == [sys.executable, "-m", "something"]


def test_a_folder_without_sources_says_where_to_build(tmp_path: Path) -> None:
    with pytest.raises(NativeBuildError, match="from a checkout"):
        compile_library(tmp_path, tmp_path / library_name())


@needs_compiler
def test_the_sanitized_library_catches_a_read_past_the_end(sources: Path, tmp_path: Path) -> None:
    printed = subprocess.run([str(COMPILER), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    runtime = Path(printed.stdout.strip())
    if not runtime.is_absolute():
        pytest.skip("no address sanitizer runtime of GCC")
    out = tmp_path / library_name()
    compile_library(sources, out, sanitize=True)
    script = f"import ctypes; ctypes.CDLL({str(out)!r}).past_the_end(3)"
    environment = os.environ | {"LD_PRELOAD": str(runtime), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr and "model.cpp" in done.stderr


def test_an_installation_goes_on_without_a_compiler_after_one_line(
    sources: Path, tmp_path: Path, no_compiler: None, capfd: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / library_name()
    stale.write_text("made of other sources")
    assert not build_for_install(sources, stale)
    assert not stale.exists()
    printed = capfd.readouterr().err
    assert printed.count("\n") == 1
    assert printed.startswith("warning: no C++ compiler") and "PyTorch alone, slower on CPU; install g++" in printed


def test_require_makes_the_failure_an_error(
    sources: Path, tmp_path: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_NATIVE_BUILD", "require")
    with pytest.raises(NativeBuildError, match=r"no C\+\+ compiler"):
        build_for_install(sources, tmp_path / library_name())


def test_zero_compiles_nothing_and_leaves_what_is_there(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_NATIVE_BUILD", "0")
    (tmp_path / library_name()).write_text("mine")
    assert not build_for_install(sources, tmp_path / library_name())
    assert (tmp_path / library_name()).read_text() == "mine"


def test_an_unknown_wish_is_refused(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE_BUILD", "yes")
    with pytest.raises(NativeBuildError, match="say 0, 1 or require"):
        build_for_install(sources, tmp_path / library_name())


@pytest.fixture
def project(sources: Path, tmp_path: Path) -> Path:
    """The real setup.py and pyproject.toml around the small sources."""
    if (
        int(version("setuptools").split(".")[0]) < 77
    ):  # asked without importing it: it will not go with another's distutils
        pytest.skip("needs setuptools 77")
    folder = tmp_path / "project"
    native = folder / "paceline" / "model" / "native"
    shutil.copytree(sources, native)
    shutil.copy(build.__file__, native)
    (folder / "paceline" / "__init__.py").write_text('__version__ = "1.0"\n')
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def run_hook(project: Path, hook: str) -> tuple[Path, str]:
    """Build as pip builds: what the hook made, and what it printed to stderr."""
    script = textwrap.dedent(f"""
        import pathlib, setuptools.build_meta
        pathlib.Path("out").mkdir(exist_ok=True)
        print("made", setuptools.build_meta.{hook}("out"))
    """)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return project / "out" / done.stdout.splitlines()[-1].removeprefix("made "), done.stderr


def native_files(wheel: Path) -> set[str]:
    prefix = "paceline/model/native/"
    return {name.removeprefix(prefix) for name in zipfile.ZipFile(wheel).namelist() if name.startswith(prefix)}


@needs_compiler
def test_a_wheel_carries_the_library_for_any_python_of_the_platform(project: Path) -> None:
    wheel, _ = run_hook(project, "build_wheel")
    assert wheel.name.startswith("paceline-1.0-py3-none-") and not wheel.name.endswith("any.whl")
    assert native_files(wheel) == {"build.py", library_name()}


@pytest.mark.parametrize(("wish", "warnings"), [("1", 1), ("0", 0)])
def test_a_wheel_without_the_library_is_pure_and_never_holds_an_old_one(
    project: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch, wish: str, warnings: int
) -> None:
    monkeypatch.setenv("PACELINE_NATIVE_BUILD", wish)
    build_lib = f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    for stale in (project / "paceline/model/native", project / build_lib / "paceline/model/native"):
        stale.mkdir(parents=True, exist_ok=True)
        (stale / library_name()).write_text("of an editable installation, or of an earlier build")
    wheel, printed = run_hook(project, "build_wheel")
    assert wheel.name == "paceline-1.0-py3-none-any.whl"
    assert native_files(wheel) == {"build.py"}
    assert printed.count("paceline will run on PyTorch alone, slower on CPU") == warnings


@needs_compiler
def test_an_editable_installation_puts_the_library_beside_its_sources(project: Path) -> None:
    run_hook(project, "build_editable")
    assert ctypes.CDLL(str(project / "paceline/model/native" / library_name())).length(b"four") == 4


def test_a_source_distribution_carries_the_sources_and_no_library(project: Path) -> None:
    (project / "paceline/model/native" / library_name()).write_text("of an editable installation")
    archive, _ = run_hook(project, "build_sdist")
    shutil.unpack_archive(archive, project / "unpacked")
    packed = project / "unpacked" / "paceline-1.0"
    assert (packed / "setup.py").exists()
    names = {path.name for path in (packed / "paceline/model/native").iterdir()}
    assert names == {"build.py", "model.cpp", "shared.h"}
