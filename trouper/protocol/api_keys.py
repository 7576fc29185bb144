"""API keys: parsing the file of keys (--api-key-file) and its options, reading the key of a request, and comparing it."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

import attrs

from trouper.protocol.problems import Problem, SettingsInvalid
from trouper.protocol.requests import MAX_PRIORITY, MIN_PRIORITY
from trouper.protocol.settings import ServerSettings

FILE_FLAG = "--api-key-file"
OPEN_PATHS = frozenset({"/", "/health", "/livez", "/readyz", "/metrics", "/openapi.json", "/docs"})
ASSETS = "/live/"
"""The live page's files; they hold no data."""
OPTION = re.compile(r"(.*\S)\s+([A-Za-z_-]+)=(\S*)")
"""A line whose last word is an option. A key may itself have blanks."""
OPTIONS = ("priority", "name")


@attrs.frozen
class ApiKey:
    """A key of the file, with the options of its line."""

    key: str = attrs.field(repr=False)
    priority: int = 0
    """Priority of requests with this key that send none."""
    name: str = ""
    """A label for the readers of the file."""


@attrs.frozen
class Keys:
    """Digests of the accepted keys, the priority and the identity of each; without any, every request is accepted."""

    _priorities: Mapping[bytes, int]
    _identities: Mapping[bytes, str] = attrs.field(factory=dict)

    @classmethod
    def of(cls, settings: ServerSettings) -> Keys:
        """Read the keys from the settings. Raises `SettingsInvalid` if a key cannot be sent, or the key file cannot be
        read or holds no key."""
        keys = [ApiKey(sendable(key, "--api-key")) for key in settings.api_key]
        if settings.api_key_file is not None:
            file_keys = [*keys_in(settings.api_key_file)]
            if not file_keys:
                message = f"{FILE_FLAG} {settings.api_key_file} holds no key; write one a line into it"
                raise SettingsInvalid(message, FILE_FLAG)
            keys += file_keys
        return cls(
            {_digest(key.key): key.priority for key in keys},
            {_digest(key.key): f"name:{key.name}" if key.name else f"key:{_digest(key.key).hex()}" for key in keys},
        )

    @property
    def needed(self) -> bool:
        return bool(self._priorities)

    def let_in(self, authorization: str | None, api_key: str | None) -> bool:
        given = _given(authorization, api_key)
        return not self.needed or (given is not None and self._known(given))

    def priority_of(self, authorization: str | None, api_key: str | None) -> int:
        """Return the default priority of a request's key."""
        given = _given(authorization, api_key)
        return 0 if given is None else self._priorities.get(_digest(given), 0)

    def identity_of(self, authorization: str | None, api_key: str | None) -> str:
        """Return what stands for a request's key where the key itself must not be stored: its name, so that a key may be replaced by
        another one of this name, or its digest. Empty for a request without an accepted key."""
        given = _given(authorization, api_key)
        return "" if given is None else self._identities.get(_digest(given), "")

    def accepts(self, identity: str) -> bool:
        """Whether requests that were accepted with this identity once would be accepted now."""
        return not self.needed or identity in self._identities.values()

    def problem(self, path: str, authorization: str | None, api_key: str | None) -> Problem | None:
        """Return the reason to refuse the request, or None."""
        if path in OPEN_PATHS or path.startswith(ASSETS) or self.let_in(authorization, api_key):
            return None
        given = _given(authorization, api_key)
        message = "the API key is wrong" if given else "an API key is needed: send `Authorization: Bearer KEY`"
        return Problem(401, message, "authentication_error", code="invalid_api_key")

    def _known(self, key: str) -> bool:
        """Whether the key is accepted. In constant time: every digest is compared, whether or not one matched."""
        digest = _digest(key)
        return sum(hmac.compare_digest(digest, known) for known in self._priorities) > 0


NO_KEYS = Keys({})


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


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


def keys_in(path: Path) -> Iterator[ApiKey]:
    """Read the keys of a file, one a line. Raises `SettingsInvalid` if the file cannot be read, for a key that cannot be sent, or for an
    unknown or wrong option."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        message = f"{FILE_FLAG} {path}: {error.strerror}; give a file with one key a line"
        raise SettingsInvalid(message, FILE_FLAG) from None
    except UnicodeDecodeError:
        message = f"{FILE_FLAG} {path} is not a text file; give one with one key a line"
        raise SettingsInvalid(message, FILE_FLAG) from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _key_of(line.strip(), path, f"{FILE_FLAG} {path}, line {number}")


def _key_of(line: str, path: Path, where: str) -> ApiKey:
    """Parse a line: a key, and options behind it. Messages do not contain the key."""
    options: dict[str, str] = {}
    while match := OPTION.fullmatch(line):
        line, name, value = match.groups()
        if name not in OPTIONS:
            raise SettingsInvalid(f"{where}: unknown option {name!r}; there are {' and '.join(OPTIONS)}", FILE_FLAG)
        if name in options:
            raise SettingsInvalid(f"{where}: {name} is given twice", FILE_FLAG)
        options[name] = value
    key, priority = sendable(line, FILE_FLAG, path), options.get("priority", "0")
    if not re.fullmatch(r"-?\d{1,10}", priority) or not MIN_PRIORITY <= int(priority) <= MAX_PRIORITY:
        message = f"{where}: priority must be an integer of at least {MIN_PRIORITY} and at most {MAX_PRIORITY}"
        raise SettingsInvalid(f"{message}, not {priority!r}", FILE_FLAG)
    return ApiKey(key, int(priority), options.get("name", ""))
