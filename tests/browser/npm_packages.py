"""JavaScript packages of tests, by npm, into the user's cache: `python -m
tests.browser.npm_packages`, which `just test` does.

Their files run in a browser as they are. They are part of no checkout; where there is no npm, their
tests are skipped by name.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trouper-tests"


@attrs.frozen
class NpmPackage:
    name: str
    version: str
    sha512: str
    """As the registry's `dist.integrity` has it."""

    @property
    def directory(self) -> Path:
        return CACHE / f"{self.name}-js-{self.version}" / "package"

    @property
    def missing(self) -> str:
        """Why tests cannot use it; "" if they can."""
        if (self.directory / "package.json").is_file():
            return ""
        return (
            f"{self.name} {self.version} for JavaScript is not in {CACHE}: run just test, with npm"
        )

    def fetch(self) -> None:
        """Raises `OSError`, `CalledProcessError` or `ValueError`. The directory appears whole or
        not at all."""
        CACHE.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=CACHE) as scratch:
            command = [
                "npm",
                "pack",
                f"{self.name}@{self.version}",
                "--silent",
                "--ignore-scripts",
                "--pack-destination",
                scratch,
            ]
            subprocess.run(
                command,
                check=True,
                cwd=scratch,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=120,
            )
            [archive] = Path(scratch).glob("*.tgz")
            digest = hashlib.sha512(archive.read_bytes()).digest()
            if b64encode(digest).decode() != self.sha512:
                raise ValueError(f"{archive.name} is not what it was")
            (unpacked := Path(scratch) / "unpacked").mkdir()
            # The module tarfile has no safe way before 3.11.4.
            subprocess.run(["tar", "-xzf", archive, "-C", unpacked], check=True)
            unpacked.rename(self.directory.parent)


OPENAI = NpmPackage(
    "openai",
    "7.57.0",
    "RbmrdE5NdfW6nGq/FaCJ3KFCZpotoExPzruQUSMCTw/ouUFO08vpvVdSmgmPxQMFAiv9EXZCEXvcWYU+n6NzsQ==",
)
AXE = NpmPackage(
    "axe-core",
    "4.14.1",
    "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
)
"""Checks a page's accessibility (MPL 2.0)."""


def main() -> None:
    missing = [package for package in (OPENAI, AXE) if package.missing]
    if missing and shutil.which("npm") is None:
        sys.stdout.write("no npm here: tests of openai's client and of axe are skipped\n")
        return
    for package in missing:
        try:
            package.fetch()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            sys.stdout.write(
                f"{package.name} {package.version} for JavaScript could not be had, its test is "
                f"skipped: {error}\n"
            )


if __name__ == "__main__":
    main()
