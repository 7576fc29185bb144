"""An API key as it travels: in a header, as `Authorization: Bearer KEY`."""

from __future__ import annotations

from pathlib import Path

from trouper.protocol.errors import SettingsInvalid


def sendable(key: str, flag: str, file: Path | None = None) -> str:
    """The key without blanks around it, which a header does not keep. Raises `SettingsInvalid`, which does not tell the
    key, if it is empty or not every client can send it: other than printable ASCII is read differently by each."""
    key = key.strip()
    if not key:
        raise SettingsInvalid(f"{flag} is empty; give a key, or leave the flag out", flag)
    if not (key.isascii() and key.isprintable()):
        where = f"{flag} {file}" if file else flag
        raise SettingsInvalid(
            f"{where}: a key has a character that a header cannot hold; use letters, digits and signs of ASCII", flag
        )
    return key
