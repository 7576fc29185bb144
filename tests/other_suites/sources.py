"""Sources of other projects' tests: an archive of a pinned version from its registry, or what
`TROUPER_SUITES` names. Nothing of these is kept in this repository."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.other_suites.suites import OVERLAYS, Suite

DOWNLOADER = "unearth==0.19.0"
"""Downloads an archive as it is: pip and uv build what they download in order to read its metadata,
which takes a compiler for some of these."""


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "trouper" / "suites"


def lay_out(name: str, suite: Suite, home: Path) -> str:
    """Write the suite's files into `home`, and what takes the place of some. Return which version
    these are of."""
    checkouts = os.environ.get("TROUPER_SUITES")
    if checkouts and (checkout := Path(checkouts) / name).exists():
        version, files = f"as in {checkout}", _read_repository(checkout, suite)
    else:
        version, files = suite.version, _read_archive(_download(suite), suite)
    written = 0
    for path, content in files:
        target = home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        written += 1
    if not written:
        raise SystemExit(f"{name}: none of {', '.join(suite.sources)} is there")
    if (overlay := OVERLAYS / name).exists():
        shutil.copytree(overlay, home, dirs_exist_ok=True)
    return version


def _download(suite: Suite) -> Path:
    for archive in cache().glob("*"):
        if archive.is_file() and sha256_of(archive) == suite.sha256:
            return archive
    cache().mkdir(parents=True, exist_ok=True)
    kind = suite.platform or ("--no-binary",)
    line = ("uvx", "--quiet", DOWNLOADER, *kind, "--download", str(cache()), suite.requirement)
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    for archive in cache().glob("*"):
        if archive.is_file() and sha256_of(archive) == suite.sha256:
            return archive
    raise SystemExit(f"the archive of {suite.requirement} is another than that of suites.json")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_selected(path: str, suite: Suite) -> bool:
    return any(path == source or path.startswith(f"{source}/") for source in suite.sources)


def _read_archive(archive: Path, suite: Suite) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for member in wheel.namelist():
                path = member.removeprefix(suite.in_archive)
                if _is_selected(path, suite) and not member.endswith("/"):
                    yield path, wheel.read(member)
        return
    with tarfile.open(archive) as tar:
        yield from _read_tar(tar, suite.in_archive, suite)


def _read_tar(tar: tarfile.TarFile, root: str, suite: Suite) -> Iterator[tuple[str, bytes]]:
    for member in tar:
        path = member.name.removeprefix(root)
        if member.isfile() and _is_selected(path, suite) and (file := tar.extractfile(member)):
            yield path, file.read()


def _read_repository(checkout: Path, suite: Suite) -> Iterator[tuple[str, bytes]]:
    """The files of a checkout as they are, or those of the newest commit of a git directory without
    one."""
    root = suite.in_repository
    if (checkout / "HEAD").exists():
        selected = [root + source for source in suite.sources]
        line = ["git", "--git-dir", str(checkout), "archive", "--format=tar", "HEAD", *selected]
        packed = subprocess.run(line, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            yield from _read_tar(tar, root, suite)
        return
    for source in suite.sources:
        below = checkout / root / source
        for path in [below] if below.is_file() else sorted(below.rglob("*")):
            if path.is_file():
                yield path.relative_to(checkout / root).as_posix(), path.read_bytes()
