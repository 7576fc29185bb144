"""API keys: how one travels, in a header as `Authorization: Bearer KEY`, and the file that has several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trouper.protocol.problems import SettingsInvalid

FILE_FLAG = "--api-key-file"


def sendable(key: str, flag: str, file: Path | None = None) -> str:
    """Strip the blanks around a key, which a header does not keep. Raises `SettingsInvalid`, whose message does not contain
    the key, if the key is empty or not printable ASCII: clients encode other characters differently."""
    key = key.strip()
    if not key:
        raise SettingsInvalid(f"{flag} is empty; give a key, or leave the flag out", flag)
    if not (key.isascii() and key.isprintable()):
        where = f"{flag} {file}" if file else flag
        raise SettingsInvalid(
            f"{where}: a key has a character that a header cannot hold; use letters, digits and signs of ASCII", flag
        )
    return key


def keys_in(path: Path) -> Iterator[str]:
    """Read the keys of a file, one a line. Raises `SettingsInvalid` if the file cannot be read, or for a key that cannot be sent."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        said = f"{FILE_FLAG} {path}: {error.strerror}; give a file with one key a line"
        raise SettingsInvalid(said, FILE_FLAG) from None
    except UnicodeDecodeError:
        said = f"{FILE_FLAG} {path} is not a text file; give one with one key a line"
        raise SettingsInvalid(said, FILE_FLAG) from None
    yield from (sendable(line, FILE_FLAG, path) for line in lines if line.strip())
