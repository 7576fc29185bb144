"""The version, here because Trouper also runs without installation."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

VERSION = "0.1.0"


def installed_version(package: str, absent: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return absent
