"""API keys: parsing the file of keys (--api-key-file), reading the key of a request, and comparing it."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import attrs

from trouper.protocol.problems import Problem, SettingsInvalid
from trouper.protocol.settings import ServerSettings

FILE_FLAG = "--api-key-file"
OPEN_PATHS = frozenset({"/", "/health", "/livez", "/readyz", "/metrics", "/openapi.json", "/docs"})
ASSETS = "/live/"
"""The live page's files; they hold no data."""


@attrs.frozen
class Keys:
    """Digests of the accepted keys; without any, every request is accepted."""

    _digests: tuple[bytes, ...]

    @classmethod
    def of(cls, settings: ServerSettings) -> Keys:
        """Read the keys from the settings. Raises `SettingsInvalid` if a key cannot be sent, or the key file cannot be
        read or holds no key."""
        keys = [sendable(key, "--api-key") for key in settings.api_key]
        if settings.api_key_file is not None:
            file_keys = [*keys_in(settings.api_key_file)]
            if not file_keys:
                message = f"{FILE_FLAG} {settings.api_key_file} holds no key; write one a line into it"
                raise SettingsInvalid(message, FILE_FLAG)
            keys += file_keys
        return cls(tuple(sha256(key.encode()).digest() for key in keys))

    @property
    def needed(self) -> bool:
        return bool(self._digests)

    def let_in(self, authorization: str | None, api_key: str | None) -> bool:
        given = _given(authorization, api_key)
        return not self.needed or (given is not None and self._known(given))

    def problem(self, path: str, authorization: str | None, api_key: str | None) -> Problem | None:
        """Return the reason to refuse the request, or None."""
        if path in OPEN_PATHS or path.startswith(ASSETS) or self.let_in(authorization, api_key):
            return None
        given = _given(authorization, api_key)
        message = "the API key is wrong" if given else "an API key is needed: send `Authorization: Bearer KEY`"
        return Problem(401, message, "authentication_error", code="invalid_api_key")

    def _known(self, key: str) -> bool:
        """Whether the key is accepted. In constant time: every digest is compared, whether or not one matched."""
        digest = sha256(key.encode("utf-8", "surrogatepass")).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _given(authorization: str | None, api_key: str | None) -> str | None:
    """Return the key of a request."""
    scheme, _, bearer = (authorization or "").partition(" ")
    return (bearer.strip() if scheme.lower() == "bearer" and bearer.strip() else api_key) or None


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
        message = f"{FILE_FLAG} {path}: {error.strerror}; give a file with one key a line"
        raise SettingsInvalid(message, FILE_FLAG) from None
    except UnicodeDecodeError:
        message = f"{FILE_FLAG} {path} is not a text file; give one with one key a line"
        raise SettingsInvalid(message, FILE_FLAG) from None
    yield from (sendable(line, FILE_FLAG, path) for line in lines if line.strip())
