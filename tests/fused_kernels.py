"""MLX's header for fused kernels on a CPU, compiled once and not once a kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

HEADER = Path("mlx/backend/cpu/compiled_preamble.h")
FLAGS = ("-std=c++17", "-O3", "-Wall", "-fPIC")
"""MLX's own. GCC reads past a precompiled header that was made with others, or by another version
of it."""


def precompile_header() -> None:
    """For this process and its children a `g++` comes first in PATH which finds the header
    precompiled. Where there is none, nothing changes.

    `mx.compile` calls `g++` for each kernel and shape of strides that this machine has not had yet:
    some hundred times in a run of all tests on a clean machine, of a second each, nine tenths of it
    for this header. With it precompiled each takes a fifth; the code is the same.
    """
    compiler = shutil.which("g++")
    package = find_spec("mlx.core")
    if sys.platform != "linux" or compiler is None or package is None or package.origin is None:
        return
    include = Path(package.origin).parent / "include"
    directory = Path(sys.prefix) / "fused-kernels" / version("mlx")
    wrapper = directory / "g++"
    if Path(compiler) == wrapper:
        return
    try:
        _compile(compiler, include, directory / HEADER.with_suffix(".h.gch"))
        _replace(wrapper, f'#!/bin/sh\nexec {quote(compiler)} -I {quote(str(directory))} "$@"\n')
    except (OSError, subprocess.CalledProcessError):
        return
    os.environ["PATH"] = os.pathsep.join([str(directory), os.environ["PATH"]])


def _compile(compiler: str, include: Path, precompiled: Path) -> None:
    if precompiled.exists():
        return
    precompiled.parent.mkdir(parents=True, exist_ok=True)
    own = precompiled.with_suffix(f".{os.getpid()}")
    command = [
        compiler,
        *FLAGS,
        "-w",
        "-I",
        str(include),
        "-x",
        "c++-header",
        str(include / HEADER),
        "-o",
        str(own),
    ]
    subprocess.run(command, check=True, capture_output=True)
    own.replace(precompiled)


def _replace(wrapper: Path, script: str) -> None:
    """In one step: other processes may be calling it."""
    own = wrapper.with_suffix(f".{os.getpid()}")
    own.write_text(script)
    own.chmod(0o755)
    own.replace(wrapper)
