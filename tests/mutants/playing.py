"""Playing mutants: a scratch copy of the checkout, one mutant applied in it at a time, its tests
run against that copy."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import cache_from_source
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Literal, Self

import attrs

from tests.mutants.catalogue import ROOT, Mutant

COPIED = (
    "trouper",
    "packages",
    "tests",
    "docs",
    "examples",
    "benchmarks",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "justfile",
)
LIMIT_S = 60.0
"""For one mutant's tests. A mutant that makes them hang is killed, too."""
TAIL = 30
"""Lines of pytest's output that are kept."""

Fate = Literal["killed", "timed out", "survived", "broken"]


@attrs.frozen
class Outcome:
    """What became of a mutant. broken: its tests could not be run, which says nothing."""

    fate: Fate
    said: str = ""
    """The end of pytest's output."""

    @property
    def killed(self) -> bool:
        return self.fate in ("killed", "timed out")


class NotTheCopy(Exception):
    """The tests imported the package from elsewhere than the scratch copy."""


class Scratch:
    """A copy of the checkout, and a process that runs tests in it."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._directory = TemporaryDirectory(prefix="trouper-mutants-")
        self.path = Path(self._directory.name).resolve() / "checkout"

    def __enter__(self) -> Self:
        self.path.mkdir()
        for name in COPIED:
            source = self._root / name
            if source.is_dir():
                shutil.copytree(source, self.path / name)
            elif source.exists():
                shutil.copy2(source, self.path / name)
        environment = os.environ | {
            # For the processes that tests start.
            "PYTHONPATH": f"{self.path}{os.pathsep}{self.path / 'packages' / 'trouper-lab'}",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TROUPER_UNSHRUNK": "1",
        }
        script = str(self.path / "tests" / "mutants" / "player.py")
        self._player = subprocess.Popen(
            [sys.executable, script],
            cwd=self.path,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._player.stdin is not None and self._player.stdout is not None
        self._player.stdin.close()
        self._player.stdout.close()
        self._player.terminate()
        self._player.wait()
        self._directory.cleanup()

    def play(self, mutant: Mutant, limit_s: float = LIMIT_S) -> Outcome:
        """Raises `Stale`, and `NotTheCopy`."""
        file = self.path / mutant.path
        source = file.read_bytes()
        mutated = mutant.applied(source.decode())
        try:
            self._put(file, mutated.encode())
            return self.run(mutant.tests, mutant.path, limit_s)
        finally:
            self._put(file, source)

    def run(self, tests: Sequence[str], file: str = "", limit_s: float = LIMIT_S) -> Outcome:
        """What these tests say of the copy as it is."""
        log = self.path.parent / "log.txt"
        told = self._ask({"tests": [*tests], "file": file, "limit_s": limit_s, "log": str(log)})
        if told["foreign"]:
            raise NotTheCopy(f"imported from elsewhere: {', '.join(told['foreign'])}")
        said = "\n".join(log.read_text("utf-8", "replace").splitlines()[-TAIL:])
        if told["code"] == 0 and not told["imported"]:
            return Outcome("survived", f"{file} was not imported by these tests\n{said}")
        fates: dict[int, Fate] = {0: "survived", 1: "killed", -1: "timed out"}
        return Outcome(fates.get(told["code"], "broken"), said)

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._player.stdin is not None and self._player.stdout is not None
        self._player.stdin.write(json.dumps(order) + "\n")
        self._player.stdin.flush()
        told: dict[str, Any] = json.loads(self._player.stdout.readline())
        return told

    @staticmethod
    def _put(file: Path, source: bytes) -> None:
        """Python takes bytecode for new by its source's size and second, which two mutants may
        share."""
        file.write_bytes(source)
        Path(cache_from_source(str(file))).unlink(missing_ok=True)


class Results:
    """Fates of earlier runs, by what they depend on: the mutant, the file that it changes, and the
    files of its tests."""

    def __init__(self, path: Path, root: Path = ROOT) -> None:
        self._path, self._root = path, root
        self._known: dict[str, Fate] = json.loads(path.read_text("utf-8")) if path.exists() else {}

    def find(self, key: str) -> Outcome | None:
        fate = self._known.get(key)
        return None if fate is None else Outcome(fate, "as in an earlier run")

    def note(self, key: str, outcome: Outcome) -> None:
        """Written at once, so that a run that is stopped can go on. What did not end well is played
        again."""
        if outcome.killed:
            self._known[key] = outcome.fate
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text(json.dumps(self._known, indent=0, sort_keys=True), "utf-8")

    def key(self, mutant: Mutant) -> str:
        """As the files are now."""
        digest = hashlib.sha256(repr(attrs.astuple(mutant)).encode())
        for file in (mutant.path, *sorted({test.partition("::")[0] for test in mutant.tests})):
            path = self._root / file
            for part in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                digest.update(part.read_bytes())
        return digest.hexdigest()
