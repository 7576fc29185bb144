"""API keys: the file of keys (--api-key-file), and the check of a request's key."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from trouper.protocol.key_options import (
    ALL_RIGHTS,
    ANYBODY,
    FILE_FLAG,
    SHARED,
    ApiKey,
    digest_of,
    is_option,
    key_with,
    require_one_client_a_name,
    split_options,
)
from trouper.protocol.private_files import others_may_read, owner_or_writers
from trouper.protocol.problems import Problem, SettingsInvalid
from trouper.protocol.settings import ServerSettings

log = logging.getLogger("trouper.web")
FileState = tuple[int, int, int] | None


def _state_of(path: Path | None) -> FileState:
    try:
        stat = None if path is None else path.stat()
    except OSError:
        return None
    return None if stat is None else (stat.st_mtime_ns, stat.st_ino, stat.st_size)


@attrs.define(eq=False)
class Keys:
    _keys: Mapping[bytes, ApiKey]
    restricted: bool = False
    """Whether there is a key file: then metrics and details of health need a right."""
    _settings: ServerSettings | None = None
    # State of the file at the last read.
    _read: FileState = None
    stale: str = ""
    """Reason why the keys differ from the file; "" if the keys are up to date."""

    @classmethod
    def of(cls, settings: ServerSettings) -> Keys:
        keys = [
            ApiKey(sendable(key, "--api-key"), rights=ALL_RIGHTS, cache=SHARED, line=-index)
            for index, key in enumerate(settings.api_key)
        ]
        read = _state_of(settings.api_key_file)
        if settings.api_key_file is not None:
            file_keys = [*keys_in(settings.api_key_file)]
            require_one_client_a_name(file_keys)
            if (file := settings.api_key_file).is_file() and others_may_read(file):
                log.warning("%s %s may be read by everybody: chmod 600 closes it", FILE_FLAG, file)
            keys += file_keys
        return cls(
            {digest_of(key.key): key for key in keys},
            settings.api_key_file is not None,
            settings,
            read,
        )

    @property
    def file(self) -> Path | None:
        return None if self._settings is None else self._settings.api_key_file

    def read_again(self) -> Reread | None:
        """Read the file again; None if unchanged. Changes nothing, for any thread."""
        if self._settings is None or (state := _state_of(self.file)) == self._read:
            return None
        try:
            return Reread(state, Keys.of(self._settings))
        except SettingsInvalid as wrong:
            return Reread(state, wrong)

    def take(self, reread: Reread) -> None:
        """Replace the keys. A wrong file is logged and leaves the keys unchanged."""
        self._read, found = reread.state, reread.found
        if isinstance(found, SettingsInvalid):
            self.stay(str(found))
            return
        self._keys, self.stale = found._keys, ""
        log.info("%s was read again: %d keys", FILE_FLAG, len(self._keys))

    def stay(self, reason: str) -> None:
        log.warning("the keys stay as they were: %s", reason)
        self.stale = reason

    @property
    def needed(self) -> bool:
        return bool(self._keys)

    def all(self) -> tuple[ApiKey, ...]:
        return tuple(self._keys.values()) or (ANYBODY,)

    def find(self, authorization: str | None, api_key: str | None) -> ApiKey | None:
        """`ANYBODY` if no key is needed, None if no key is accepted."""
        if not self.needed:
            return ANYBODY
        given = _given(authorization, api_key)
        return self._keys[digest_of(given)] if given is not None and self._known(given) else None

    def of_identity(self, identity: str) -> ApiKey | None:
        if not self.needed:
            return ANYBODY
        return next(
            (key for key in self._keys.values() if identity in (key.identity, key.nameless)), None
        )

    def identities_of(self, identity: str) -> frozenset[str]:
        return frozenset(
            (identity, *(key.nameless for key in self._keys.values() if key.identity == identity))
        )

    @property
    def several(self) -> bool:
        keys = self.all()
        return any(key.identity != keys[0].identity for key in keys)

    def clients_of(self, identity: str) -> tuple[ApiKey | None, frozenset[str]]:
        key = self.of_identity(identity)
        return key, frozenset((identity,)) if key is None else self.identities_of(key.identity) | {
            identity
        }

    def label_of(self, identity: str) -> str:
        """Return the label of a client, also of a removed key; "" if made without a key."""
        if (key := self.of_identity(identity)) is not None and key is not ANYBODY:
            return key.label
        kind, _, name = identity.partition(":")
        return name if kind == "name" else kind and "removed key"

    def let_in(self, authorization: str | None, api_key: str | None) -> bool:
        return self.find(authorization, api_key) is not None

    def problem(self, authorization: str | None, api_key: str | None) -> Problem | None:
        if self.let_in(authorization, api_key):
            return None
        given = _given(authorization, api_key)
        message = (
            "Incorrect API key provided: this server has another one"
            if given
            else "You didn't provide an API key: send `Authorization: Bearer KEY`"
        )
        return Problem(401, message, "authentication_error", code="invalid_api_key")

    def _known(self, key: str) -> bool:
        # Compare in constant time: every digest, whether or not one matched.
        digest = digest_of(key)
        return sum(hmac.compare_digest(digest, known) for known in self._keys) > 0


@attrs.frozen
class Reread:
    state: FileState
    found: Keys | SettingsInvalid


NO_KEYS = Keys({})


def _given(authorization: str | None, api_key: str | None) -> str | None:
    scheme, _, bearer = (authorization or "").partition(" ")
    return (bearer.strip() if scheme.lower() == "bearer" and bearer.strip() else api_key) or None


def sendable(key: str, flag: str, where: str = "") -> str:
    """Strip blanks, which a header does not keep. `where`: the line of a file. Raises
    `SettingsInvalid`, without the key in its message, unless the key is printable ASCII, which all
    clients encode alike."""
    key = key.strip()
    if not key.strip("\"'"):  # Docker keeps the quotes of KEY="" in a file of variables.
        remedy = "write one before the options" if where else "give a key, or leave the flag out"
        raise SettingsInvalid(
            f"{where} has no key; {remedy}" if where else f"{flag} is empty; {remedy}", flag
        )
    if not (key.isascii() and key.isprintable()):
        raise SettingsInvalid(
            f"{where or flag}: a key has a character that a header cannot hold; use letters, "
            "digits and signs of ASCII",
            flag,
        )
    return key


# Content of pipes (`--api-key-file <(...)`, /dev/stdin), which can be read once.
_PIPED: dict[Path, str] = {}


def _text_of(path: Path) -> str:
    text = path.read_text("utf-8-sig")
    if path.is_file():
        if why := owner_or_writers(path):
            remedy = "make it this user's, with mode 600: who writes there has every right"
            raise SettingsInvalid(f"{FILE_FLAG} {path}: {why}; {remedy}", FILE_FLAG)
        return text
    if text:
        _PIPED[path] = text
    return _PIPED.get(path, "")


def keys_in(path: Path) -> Iterator[ApiKey]:
    """Read the keys of a file, one a line; # begins a comment. Raises `SettingsInvalid`."""
    try:
        lines = _text_of(path).splitlines()
    except OSError as error:
        message = f"{FILE_FLAG} {path}: {error.strerror}; give a file with one key a line"
        raise SettingsInvalid(message, FILE_FLAG) from None
    except UnicodeDecodeError:
        message = f"{FILE_FLAG} {path} is not a text file; give one with one key a line"
        raise SettingsInvalid(message, FILE_FLAG) from None
    lines = [line.strip() for line in lines]
    if not any(line and not line.startswith("#") for line in lines):
        raise SettingsInvalid(
            f"{FILE_FLAG} {path} holds no key; write one a line into it", FILE_FLAG
        )
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#"):
            yield _key_of(line, number, path)


def _key_of(line: str, number: int, path: Path) -> ApiKey:
    # Parse a key and the options behind it. Messages do not contain the key.
    where = f"{FILE_FLAG} {path}, line {number}"
    key, options = split_options(line, where)
    if is_option(key):
        raise SettingsInvalid(f"{where} has no key; write one before the options", FILE_FLAG)
    return key_with(sendable(key, FILE_FLAG, where), options, number, where)
