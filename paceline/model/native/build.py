"""Compiles the native CPU library: the C++ sources of a folder become one shared library with a C interface.

    python paceline/model/native/build.py                # into this folder, where paceline looks for it
    python paceline/model/native/build.py --sanitize     # checks addresses and undefined behaviour; into build/native
    python paceline/model/native/build.py --emulated     # with AMX tiles and AVX-VNNI emulated, for tests
    python paceline/model/native/build.py --here         # without instruction sets that this processor lacks: sooner

Sources are compiled for the oldest processor of their architecture. Those of an instruction set (kernels_avx2.cpp etc.)
are compiled for that set, or skipped if the compiler cannot do so on this machine. setup.py loads this file by path
before paceline and torch are installed: it uses only the standard library.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMPILERS = ("g++", "clang++", "c++")

# Contraction would make rounding depend on the instruction set; the other two only enable vectorisation.
ARITHMETIC_FLAGS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
# GCC warns that passing wide vectors depends on the instruction set; these never leave their file.
WARNING_FLAGS = ("-Wall", "-Wextra", "-Wno-psabi")
COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", *ARITHMETIC_FLAGS, *WARNING_FLAGS)
SANITIZE_FLAGS = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g1", "-O1")

AVX2 = ("-mavx2", "-mfma", "-mf16c")
# GCC 12 calls the undefined registers of its own intrinsics uninitialized (gcc.gnu.org/PR105593).
AVX512 = (*(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")), "-mfma", "-mf16c", "-Wno-uninitialized")
INSTRUCTION_SETS = {
    "avx2": AVX2,
    "avxvnni": (*AVX2, "-mavxvnni"),
    "avx512": AVX512,
    "avx512bf16": (*AVX512, "-mavx512bf16"),
    "neon": (),
    "dotprod": ("-march=armv8.2-a+dotprod",),
    "i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
}
"""Instruction set -> compiler flags of kernels_<set>.cpp; oldest first, x86 and ARM. If a set is compiled, the macro
PN_HAS_<SET> is defined in other files."""
AMX = ("-mamx-tile", "-mamx-int8")
"""Additional flags of kernels_avx512bf16.cpp if the compiler supports them; defines PN_HAS_AMX in other files."""

LINUX_FLAGS = {
    "avx2": "avx2",
    "avxvnni": "avx_vnni",
    "avx512": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "amx": "amx_int8",
    "dotprod": "asimddp",
    "i8mm": "i8mm",
}
"""Instruction set -> its name in /proc/cpuinfo. Every ARM processor that is supported has neon."""

PROBES = HERE / "probes"
"""Test programs, each with one instruction of a set: an assembler may lack instructions that the compiler accepts."""

# The library must not depend on the build machine, and its C++ runtime must not clash with PyTorch's.
LINK_FLAGS_IF_ACCEPTED = (("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL"), ("-Wl,-z,defs",))


class NativeBuildError(RuntimeError):
    """Raised if the library cannot be compiled. The message's first line is the reason; further lines, if any, are the
    compiler's output or a remedy."""


def library_name() -> str:
    return "libpaceline_native" + (".dylib" if sys.platform == "darwin" else ".so")


def find_compiler() -> list[str]:
    """Return the C++ compiler's command: `$CXX`, else the first of g++, clang++ and c++ on the path. Raises
    NativeBuildError without a compiler."""
    configured = shlex.split(os.environ.get("CXX", ""))
    for command in [configured] if configured else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    if configured:
        raise NativeBuildError(
            f"no C++ compiler (CXX={configured[0]} is not on the path)\nunset CXX, or name one that is"
        )
    raise NativeBuildError(f"no C++ compiler (none of {', '.join(COMPILERS)} is on the path)\ninstall g++, or set CXX")


def lacking_here(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Return the instruction sets that this processor lacks according to `cpuinfo`; an empty set where that file cannot
    be read, as on macOS."""
    try:
        words = set(cpuinfo.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return set()
    return {name for name, flag in LINUX_FLAGS.items() if flag not in words}


class _Compiler:
    def __init__(self, command: list[str], scratch: Path) -> None:
        self.command = command
        self.scratch = scratch
        self.environment = os.environ | {"LC_ALL": "C"}  # errors are looked for by the word "error"

    def _start(self, arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        command = [*self.command, *arguments]
        try:
            return subprocess.run(
                command, capture_output=True, text=True, errors="replace", env=self.environment, check=False
            )
        except OSError as error:
            raise NativeBuildError(f"the C++ compiler does not start: {error}") from error

    def run(self, *arguments: str) -> None:
        done = self._start(arguments)
        if done.returncode != 0:
            raise NativeBuildError(
                f"{self.command[0]}: {_first_errors(done.stderr) or f'exit status {done.returncode}'}"
            )
        if done.stderr:
            print(done.stderr, end="", file=sys.stderr)

    def accepts(self, probe: str, *flags: str) -> bool:
        probe_out = self.scratch / f"probe_{probe}.out"
        done = self._start((*COMMON_FLAGS, *flags, str(PROBES / f"{probe}.cpp"), "-o", str(probe_out)))
        return done.returncode == 0


def _first_errors(output: str) -> str:
    """Up to 12 lines of the compiler's output, from the first error on."""
    lines = output.strip().splitlines()
    first = next((number for number, line in enumerate(lines) if "error:" in line or "undefined reference" in line), 0)
    return "\n".join(lines[first : first + 12])


def compile_library(
    source_folder: Path,
    out_path: Path,
    *,
    sanitize: bool = False,
    emulated: bool = False,
    leave_out: Collection[str] = (),
) -> list[str]:
    """Compile the .cpp files of `source_folder` into the library `out_path`, which is replaced atomically. Returns the
    names of the instruction sets that were compiled in.

    `sanitize`: add checks for address errors and undefined behaviour. `emulated`: replace some instruction sets by
    emulations, for tests. `leave_out`: instruction sets that are not compiled. Raises NativeBuildError if there are no
    sources or no compiler, or if compiling fails.
    """
    sources = sorted(source_folder.glob("*.cpp"))
    if not sources:
        raise NativeBuildError(
            f"no C++ sources in {source_folder}: build from a checkout or a source distribution of paceline"
        )
    command = find_compiler()
    out_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".native-", dir=out_path.parent) as scratch:
        tool = _Compiler(command, Path(scratch))
        known = {
            name: flags for name, flags in INSTRUCTION_SETS.items() if (source_folder / f"kernels_{name}.cpp").exists()
        }
        sets = [name for name, flags in known.items() if name not in leave_out and tool.accepts(name, *flags, "-c")]
        has_amx = "avx512bf16" in sets and "amx" not in leave_out and tool.accepts("amx", *AMX, "-c")
        more = (*(SANITIZE_FLAGS if sanitize else ()), *(("-DPN_EMULATED",) if emulated else ()))
        objects, finished = _compile_all(tool, sources, sets, has_amx, more), Path(scratch, "linked")
        flag_groups = (SANITIZE_FLAGS,) if sanitize else LINK_FLAGS_IF_ACCEPTED
        flags = [flag for group in flag_groups if sanitize or tool.accepts("link", "-shared", *group) for flag in group]
        tool.run("-shared", "-pthread", *flags, *map(str, objects), "-o", str(finished))
        os.replace(finished, out_path)
    return [*sets, "amx"] if has_amx else sets


def _compile_all(
    tool: _Compiler, sources: list[Path], sets: list[str], has_amx: bool, more: tuple[str, ...]
) -> list[Path]:
    """Compile the sources; returns the object files in linking order.

    The linker keeps the first copy of an inline function or template. Portable files come first, so that shared code
    never contains newer instructions.
    """
    special = {f"kernels_{name}": name for name in INSTRUCTION_SETS}
    portable = [source for source in sources if source.stem not in special]
    newer = [source for name in sets for source in sources if special.get(source.stem) == name]
    has = [*sets, "amx"] if has_amx else sets
    flags = [*COMMON_FLAGS, *more, *(f"-DPN_HAS_{name.upper()}" for name in has)]

    def compile_one(source: Path) -> Path:
        target = tool.scratch / f"{source.stem}.o"
        own = INSTRUCTION_SETS.get(special.get(source.stem, ""), ())
        amx = AMX if has_amx and source.stem == "kernels_avx512bf16" else ()
        tool.run(*flags, *own, *amx, "-c", str(source), "-o", str(target))
        return target

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        # The newest instruction sets take longest, so they start first.
        objects = [workers.submit(compile_one, source) for source in reversed(portable + newer)]
        return [each.result() for each in reversed(objects)]


def build_for_install(
    source_folder: Path, out_path: Path, *, emulated: bool = False, leave_out: Collection[str] = ()
) -> bool:
    """Build the library during an installation, as `compile_library` does; returns True if it was built. If compiling
    fails, removes an older library at `out_path`, prints one warning and returns False.

    The environment variable PACELINE_NATIVE_BUILD changes this: with 0, nothing is compiled, and the result is False;
    with "require", NativeBuildError is raised if compiling fails.
    """
    wish = os.environ.get("PACELINE_NATIVE_BUILD") or "1"
    if wish not in ("0", "1", "require"):
        raise NativeBuildError(f"PACELINE_NATIVE_BUILD={wish}: say 0, 1 or require")
    if wish == "0":
        return False
    try:
        compile_library(source_folder, out_path, emulated=emulated, leave_out=leave_out)
    except NativeBuildError as error:
        out_path.unlink(missing_ok=True)  # an older library would not match these sources
        if wish == "require":
            raise
        reason = str(error).splitlines()[0]
        print(
            f"warning: {reason}: paceline will run on PyTorch alone, slower on CPU; install g++ and reinstall "
            "(PACELINE_NATIVE_BUILD=require shows the whole error)",
            file=sys.stderr,
        )
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile paceline's native CPU library.")
    switches = {
        "--sanitize": "with address and undefined-behaviour checks (make sanitize)",
        "--emulated": "with instruction sets made of other instructions, for tests",
        "--here": "without instruction sets that this processor lacks",
        "--optional": "as installing does: a failure is one line and exit status 0",
    }
    out_help = "the library to write; default: next to this file, sanitized in build/native"
    parser.add_argument("--out", type=Path, help=out_help)
    for switch, text in switches.items():
        parser.add_argument(switch, action="store_true", help=text)
    args = parser.parse_args()
    sanitized = Path("build", "native", "libpaceline_native_sanitize.so")
    out = args.out or (sanitized if args.sanitize else HERE / library_name())
    leave_out = lacking_here() if args.here else ()
    try:
        if args.optional:
            build_for_install(HERE, out, emulated=args.emulated, leave_out=leave_out)
            return 0
        start = time.perf_counter()
        sets = compile_library(HERE, out, sanitize=args.sanitize, emulated=args.emulated, leave_out=leave_out)
    except NativeBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{out}: {', '.join([*reversed(sets), 'portable'])}, compiled in {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
