"""What `trouper doctor` finds of the directory of files and batches. Nothing is left behind
there."""

from __future__ import annotations

import tempfile
from typing import Literal

from rich.filesize import decimal

from trouper.protocol.settings import ServerSettings
from trouper.storage.disk_speed import nearest
from trouper.storage.file_operations import Disk


def examine(server: ServerSettings) -> tuple[Literal["ok", "warn"], str, str]:
    """Return level, message and remedy. No finding is a failure: without the directory a server
    runs, and refuses uploads (503)."""
    directory = server.batches_dir
    if directory is None:
        return "ok", "--no-batches: files and batches are not served", ""
    try:
        existing = nearest(directory.absolute())
        with tempfile.TemporaryFile(dir=existing, buffering=0) as file:
            file.write(b"x")  # A full disk still makes empty files.
        free = Disk().free_bytes(existing)
    except OSError as error:
        message = f"{directory}: {error.strerror}; uploads of files and batches will be refused"
        return "warn", message, "give another --batch-dir, or --no-batches"
    message = f"{decimal(free)} free for {directory}"
    if free < server.max_file_bytes:
        return (
            "warn",
            f"{message}, less than one file may have (--max-file-bytes)",
            "make room, or give another --batch-dir",
        )
    return "ok", message, ""
