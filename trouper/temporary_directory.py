"""A directory for temporary files, and for the kernels that MLX compiles, in which nobody else can
put one.

MLX's CPU build compiles kernels into $TMPDIR/mlx/VERSION/cpu, and loads whatever lies there by a
name that can be predicted; its CUDA build does so with PTX in $TMPDIR/mlx/VERSION/ptx, or
MLX_PTX_CACHE_DIR. In /tmp the first user to make that directory would have their code run by
everybody else. So TMPDIR becomes a directory below the user's cache before MLX compiles, unless it
is private already.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import struct
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from trouper.protocol.private_files import make_private, who_may_change
from trouper.protocol.problems import SettingsInvalid
from trouper.protocol.settings import default_cache_dir

log = logging.getLogger("trouper")
TEMPORARY, PTX = "TMPDIR", "MLX_PTX_CACHE_DIR"
FOLDER = "mlx"
"""Name of MLX's own folder there."""
LIBC = "CS_GNU_LIBC_VERSION"
NOEXEC = getattr(os, "ST_NOEXEC", 0)
"""Flag of a file system from which no code is loaded; macOS has none."""
NOWHERE = Path("/")
"""A directory in which nobody can put anything but root."""
YOUNG_S = 60.0
"""Age below which a kernel may still be written by a compiler."""


def keep_private() -> None:
    """Let TMPDIR and MLX_PTX_CACHE_DIR be private, for this process and those that it starts.
    Safe to call again."""
    if (ptx := os.environ.get(PTX)) and (why := _unsafe(Path(ptx), Path(ptx))):
        log.warning("%s is not used, for it is not private: %s", PTX, why)
        del os.environ[PTX]
    given = os.environ.get(TEMPORARY)
    if not given or _unsafe(Path(given), Path(given) / FOLDER):
        os.environ[TEMPORARY] = str(_own_directory())


def _own_directory() -> Path:
    """Return the directory below the user's cache; where that cannot be private, a new one that
    ends with this process."""
    try:
        own = default_cache_dir().absolute() / "tmp" / _platform()
        make_private(own)
        why = _unsafe(own, own / FOLDER)
    except (OSError, SettingsInvalid) as error:
        why = _reason(error)
    if not why:
        _remove_incomplete(own)
        return own
    try:
        new = Path(tempfile.mkdtemp(prefix="trouper-"))
    except OSError:
        log.warning("no directory takes temporary files, and MLX compiles nothing: %s", why)
        return NOWHERE
    atexit.register(_remove, new, os.getpid())
    log.warning("each start compiles kernels anew, in %s, as no directory is private: %s", new, why)
    return new


def _platform() -> str:
    """Name what compiled code depends on: a home directory may be shared by different machines."""
    libc = os.confstr(LIBC) if LIBC in os.confstr_names else None
    return "-".join(filter(None, (sys.platform, os.uname().machine, libc))).replace(" ", "-")


def _unsafe(above: Path, directory: Path) -> str:
    """Make a directory that MLX loads code from; return why others could put code there, or why
    it cannot be used, or ""."""
    try:
        if who := who_may_change(above) if above.exists() else "":
            return who
        make_private(directory)
        if os.statvfs(directory).f_flag & NOEXEC:
            return f"{directory} is on a file system from which no code is loaded (noexec)"
        return who_may_change(directory)
    except OSError as error:
        return _reason(error)


def _reason(error: OSError | SettingsInvalid) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


def _remove_incomplete(own: Path) -> None:
    """Remove kernels that a power loss or a kill has cut short: MLX would load each for ever,
    and fail."""
    for path in own.glob(f"{FOLDER}/*/cpu/*.so"):
        with suppress(OSError), path.open("rb") as file:
            info = os.fstat(file.fileno())
            is_old = time.time() - info.st_mtime > YOUNG_S
            if is_old and not _is_complete(file.read(64), info.st_size):
                path.unlink()


def _is_complete(header: bytes, size: int) -> bool:
    """Whether a file of 64-bit ELF has its table of sections, which is its end. Another format
    (a Mac's) counts as complete."""
    if not header.startswith(b"\x7fELF\x02\x01"):
        return any(header)
    begin, entry, count = struct.unpack_from("<Q10x2H", header, 40)
    return bool(begin + entry * count <= size)


def _remove(new: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(new, ignore_errors=True)
