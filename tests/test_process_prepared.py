"""Imports of the library leave the process as it is; `prepare_process` prepares it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from trouper.workarounds.mlx_reference_blas import load_fast

SCRIPT = """
import gc, json, os, pathlib, resource, signal, sys, warnings
import numpy  # Adds filters of warnings, and has a BLAS of its own.

numpys = set()

def describe():
    maps = pathlib.Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "environment": dict(os.environ),
        "finders": [getattr(finder, "__name__", str(type(finder))) for finder in sys.meta_path],
        "path hooks": [hook.__qualname__ for hook in sys.path_hooks],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "setrlimit": resource.setrlimit.__name__,
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "warnings": [str(entry) for entry in warnings.filters],
        "garbage": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
        "blas": sorted({path for line in lines if "blas" in (path := line.split()[-1])} - numpys),
        "hooks": [str(sys.excepthook), str(sys.unraisablehook)],
        "mlx": "mlx.core" in sys.modules,
    }

numpys = set(describe()["blas"])
before = describe()
IMPORTS
print(json.dumps([before, describe()]))
"""


def compare(imports: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The process before and after."""
    environment = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    command = [sys.executable, "-c", SCRIPT.replace("IMPORTS", imports)]
    ended = subprocess.run(command, capture_output=True, check=True, env=environment)
    before, after = json.loads(ended.stdout)
    return before, after


@pytest.mark.parametrize(
    "imports", ["import trouper, trouper.engine, trouper.workarounds", "from trouper import *"]
)
def test_imports_leave_the_process_as_it_is(imports: str) -> None:
    before, after = compare(imports)
    assert after == before


def test_preparing_twice_is_preparing_once() -> None:
    once = "from trouper import prepare_process; prepare_process()"
    before, after = compare(once)
    assert {name for name in before if before[name] != after[name]} >= {"environment", "setrlimit"}
    assert not after["mlx"]
    assert bool(after["blas"]) == (load_fast() is not None)
    assert compare(f"{once}; prepare_process()")[1] == after
