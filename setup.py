"""The one step pyproject.toml cannot say: compile paceline/model/native into a shared library.

The library is loaded with ctypes and uses nothing of Python, so one wheel serves every Python 3 of a platform.
Installing works without a compiler too; paceline/model/native/build.py says what PACELINE_NATIVE_BUILD=0 and =require
do.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

NATIVE = Path("paceline", "model", "native")
spec = importlib.util.spec_from_file_location("native_build", NATIVE / "build.py")
assert spec and spec.loader
native_build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native_build)
LIBRARY = NATIVE / native_build.library_name()


class BuildNative(Command):
    """A step of `build`: into build_lib, or into the source tree when the installation is editable."""

    description = "compile the native CPU library"
    user_options: ClassVar[list[tuple[str, str, str]] | list[tuple[str, str | None, str]]] = []
    build_lib: str | None
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        if not self.editable_mode:
            self._built().unlink(missing_ok=True)  # of an earlier build
        native_build.build_for_install(NATIVE, LIBRARY if self.editable_mode else self._built())

    def get_source_files(self) -> list[str]:
        return sorted(str(path) for pattern in ("*.cpp", "*.h", "*.inl") for path in NATIVE.rglob(pattern))

    def get_outputs(self) -> list[str]:
        return [str(self._built())] if (LIBRARY if self.editable_mode else self._built()).exists() else []

    def get_output_mapping(self) -> dict[str, str]:
        return {str(self._built()): str(LIBRARY)} if self.editable_mode and LIBRARY.exists() else {}

    def _built(self) -> Path:
        assert self.build_lib is not None
        return Path(self.build_lib) / LIBRARY


class Build(build):
    sub_commands: ClassVar = [*build.sub_commands, ("build_native", None)]


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True  # the wheel is unpacked where platform-dependent files belong


class NativeWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        return ("py3", "none", platform if Path(self.bdist_dir or ".", LIBRARY).exists() else "any")


setup(distclass=NativeDistribution, cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": NativeWheel})
