"""Runs CUDA kernels on a CPU, where the threads of a block take turns (cuda_on_threads.h)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = shutil.which("g++")


def run(program: str, given: bytes, directory: Path) -> bytes:
    """Compile a C++ program that launches kernels, and return what it writes for what it is
    `given`. Skips the test where there is no compiler."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    source, binary = directory / "kernel.cpp", directory / "kernel"
    source.write_text(program)
    flags = ["-std=c++20", "-O1", "-I", str(Path(__file__).parent), "-o", str(binary)]
    subprocess.run([COMPILER, *flags, str(source)], check=True)
    return subprocess.run([binary], input=given, stdout=subprocess.PIPE, check=True).stdout
