"""The version, here because Trouper also runs without installation."""

from __future__ import annotations

VERSION = "0.1.0"


def installed_version(package: str, absent: str) -> str:
    # The import takes longer than `trouper --version`.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return absent
