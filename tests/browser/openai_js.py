"""The `openai` package for JavaScript, by npm, into the user's cache: `python -m
tests.browser.openai_js`, which `just test` does.

Its ES modules run in a browser as they are. It is part of no checkout; where there is no npm, its
test is skipped by name.
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

VERSION = "7.57.0"
SHA512 = "RbmrdE5NdfW6nGq/FaCJ3KFCZpotoExPzruQUSMCTw/ouUFO08vpvVdSmgmPxQMFAiv9EXZCEXvcWYU+n6NzsQ=="
"""As the registry's `dist.integrity` has it."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trouper-tests"
MODULES = CACHE / f"openai-js-{VERSION}" / "package"
MISSING = (
    ""
    if (MODULES / "index.mjs").is_file()
    else f"openai {VERSION} for JavaScript is not in {CACHE}: run just test, with npm"
)


def fetch() -> None:
    """Raises `OSError`, `CalledProcessError` or `ValueError`. The directory appears whole or not at
    all."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=CACHE) as scratch:
        command = [
            "npm",
            "pack",
            f"openai@{VERSION}",
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
        if b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode() != SHA512:
            raise ValueError(f"{archive.name} is not what it was")
        (whole := Path(scratch) / "whole").mkdir()
        # The module tarfile has no safe way before 3.11.4.
        subprocess.run(["tar", "-xzf", archive, "-C", whole], check=True)
        whole.rename(MODULES.parent)


def main() -> None:
    if not MISSING:
        return
    if shutil.which("npm") is None:
        sys.stdout.write("no npm here: the test of openai's client in a browser is skipped\n")
        return
    try:
        fetch()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        sys.stdout.write(
            f"openai {VERSION} for JavaScript could not be had, its test is skipped: {error}\n"
        )


if __name__ == "__main__":
    main()
