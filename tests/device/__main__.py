"""`just test-device`: the tests that concern the engine, on whatever MLX runs on, in each
arithmetic that the device has.

NVIDIA's tensor cores round the factors of float32 products to TF32 unless MLX_ENABLE_TF32=0. There
everything runs twice: in full float32, where tokens are compared for equality, and in TF32 (see
tests/arithmetic.py). Further arguments go to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import click

PLACES = (
    "tests/engine",
    "tests/reuse",
    "tests/device",
    "tests/workarounds",
    "tests/drafts/test_mixes.py",
    "tests/zoo",
    "tests/self_check",
)
EVERY = {"TROUPER_EVERY_FAMILY": "1"}
"""Families in all ways, which the short version of the tests plays of one of each kind of cache."""
PROBE = (
    "import mlx.core as mx; from tests import arithmetic; print(mx.default_device().type.name, "
    "arithmetic.TF32)"
)


def probe(tf32: str) -> tuple[str, bool]:
    """The device's type, and whether it multiplies float32 in TF32 with this setting."""
    environment = {**os.environ, "MLX_ENABLE_TF32": tf32}
    command = [sys.executable, "-c", PROBE]
    device, rounds = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout.split()
    return device, rounds == "True"


def main(arguments: list[str]) -> int:
    device, rounds = probe("1")
    modes = {"float32": "0", "TF32": "1"} if rounds else {"float32": "0"}
    click.echo(f"device: {device}; float32 products in {' and in '.join(modes)}")
    failed = 0
    for name, setting in modes.items():
        click.echo(f"\n{name}:")
        began = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:benchmark",
            "-rfs",
            "--continue-on-collection-errors",
            *PLACES,
            *arguments,
        ]
        code = subprocess.run(
            command, env={**os.environ, **EVERY, "MLX_ENABLE_TF32": setting}, check=False
        ).returncode
        click.echo(f"{name}: exit {code} after {time.perf_counter() - began:.0f} s")
        failed = failed or code
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
