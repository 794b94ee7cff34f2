"""Builds the native CPU kernels where there is a C++ compiler for x86-64; see pyproject.toml for
everything else. Without one the install succeeds, and the engine uses torch's own operators.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path("src/tidemill/ops/cpu/csrc")
# One library serves every processor: each source names the instruction set it may use, and the
# right kernels are chosen at run time.
FLAGS = ["-std=c++20", "-O3", "-fvisibility=hidden", "-pthread", "-g0"]
FLAGS += ["-Wno-maybe-uninitialized", "-Wno-psabi"]


class BuildNative(build_ext):
    """A plain shared library: no Python symbols in it, nor a Python version in its name."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()


native = Extension(
    "tidemill.ops.cpu._native",
    sources=sorted(str(path) for path in ROOT.glob("*.cpp")),
    depends=sorted(str(path) for path in ROOT.glob("*.h")),
    language="c++",
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread"],
    optional=True,
)
supported = platform.machine().lower() in ("x86_64", "amd64") and os.name == "posix"
setup(ext_modules=[native] if supported else [], cmdclass={"build_ext": BuildNative})
