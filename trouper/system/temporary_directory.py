"""A private directory for temporary files, and for kernels that MLX compiles.

MLX loads kernels by predictable names below $TMPDIR or MLX_PTX_CACHE_DIR, where others could plant
code.
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
"""MLX's own folder there."""
LIBC = "CS_GNU_LIBC_VERSION"
NOEXEC = getattr(os, "ST_NOEXEC", 0)  # Flag of file systems without executable code; not on macOS.
NOWHERE = Path("/")  # Only root can write here.
YOUNG_S = 60.0  # A younger kernel may still be written.


def keep_private() -> None:
    """Make TMPDIR and MLX_PTX_CACHE_DIR private, also for children."""
    if (ptx := os.environ.get(PTX)) and (why := _unsafe(Path(ptx), Path(ptx))):
        log.warning("%s is not used, for it is not private: %s", PTX, why)
        del os.environ[PTX]
    given = os.environ.get(TEMPORARY)
    if not given or _unsafe(Path(given), Path(given) / FOLDER):
        os.environ[TEMPORARY] = str(_own_directory())


def _own_directory() -> Path:
    """The directory below the user's cache, or a temporary one."""
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
    # Machines may share a home directory.
    libc = os.confstr(LIBC) if LIBC in os.confstr_names else None
    return "-".join(filter(None, (sys.platform, os.uname().machine, libc))).replace(" ", "-")


def _unsafe(above: Path, directory: Path) -> str:
    """Make a directory for code; return a fault, or ""."""
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
    # MLX would load truncated kernels for ever, and fail.
    for path in own.glob(f"{FOLDER}/*/cpu/*.so"):
        with suppress(OSError), path.open("rb") as file:
            info = os.fstat(file.fileno())
            is_old = time.time() - info.st_mtime > YOUNG_S
            if is_old and not _is_complete(file.read(64), info.st_size):
                path.unlink()


def _is_complete(header: bytes, size: int) -> bool:
    """Whether 64-bit ELF has its final table of sections; true for other formats."""
    if not header.startswith(b"\x7fELF\x02\x01"):
        return any(header)
    begin, entry, count = struct.unpack_from("<Q10x2H", header, 40)
    return bool(begin + entry * count <= size)


def _remove(new: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(new, ignore_errors=True)
