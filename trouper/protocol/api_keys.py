"""API keys: the file of keys (--api-key-file), the options of a line, as in `KEY name=batch
models=small,big:* priority=5`, and the check of a request's key."""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

import attrs

from trouper.protocol.private_files import others_may_read, owner_or_writers
from trouper.protocol.problems import Problem, SettingsInvalid
from trouper.protocol.requests import MAX_PRIORITY, MIN_PRIORITY
from trouper.protocol.setting_fields import ByteSize
from trouper.protocol.settings import ServerSettings

FILE_FLAG = "--api-key-file"
Right = Literal["inference", "observability", "admin"]
"""inference: ask models. observability: the live page, metrics, details of health, usage of all
keys. admin: change the server, cancel requests of other keys."""
ALL_RIGHTS: frozenset[Right] = frozenset(get_args(Right))
# Default rights of a key in the file.
FILE_RIGHTS: frozenset[Right] = frozenset({"inference"})
OWN, SHARED = "own", "shared"
# A line whose last word is an option. A key may contain blanks.
OPTION = re.compile(r"(.*\S)\s+([A-Za-z_-]+)=(\S*)")
NAME = re.compile(r"[\w.:@-]{1,64}", re.ASCII)
# Names that stand for keys without a name.
RESERVED = re.compile(r"line-.*|api-key.*|anybody")
MAX_LIMIT = 10**12


def digest_of(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


@attrs.frozen
class ApiKey:
    key: str = attrs.field(repr=False)
    priority: int = 0
    name: str = ""
    """Name in errors, metrics and logs. Keys of one name are one client."""
    models: tuple[str, ...] = ()
    """Allowed names or patterns; empty: all."""
    min_priority: int | None = None
    """The most urgent priority that requests may send; lower is first. None: any. Default for the
    file: `priority`."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_batch_bytes: int | None = None
    """Bound on files and batches. None: half of --batch-max-bytes once there are several keys."""
    rights: frozenset[Right] = FILE_RIGHTS
    cache: str = OWN
    """own: cached prompts are private; shared: shared with all keys that say so; else shared by
    keys of the same word."""
    line: int = attrs.field(default=0, eq=False)
    """Line of the file; 0, -1, -2 for --api-key."""

    @property
    def identity(self) -> str:
        """The name or the digest, where the key itself must not be stored."""
        return f"name:{self.name}" if self.name else self.nameless

    @cached_property
    def nameless(self) -> str:
        """The identity before the line had a name."""
        return f"key:{digest_of(self.key).hex()}"

    @property
    def label(self) -> str:
        return self.name or (f"line-{self.line}" if self.line > 0 else f"api-key{self.line or ''}")

    @property
    def cache_group(self) -> str:
        """Group of the cache scope; the prefix keeps groups apart from identities."""
        return {OWN: self.identity, SHARED: ""}.get(self.cache, f"group:{self.cache}")

    def may_use(self, names: Sequence[str]) -> bool:
        return not self.models or any(
            fnmatchcase(name, pattern) for name in names for pattern in self.models
        )


ANYBODY = ApiKey("", name="anybody", rights=ALL_RIGHTS, cache=SHARED)


def _integer(low: int, high: int) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        if not re.fullmatch(r"-?\d{1,13}", text) or not low <= int(text) <= high:
            raise ValueError(
                f"{name} must be an integer of at least {low} and at most {high}, not {text!r}"
            )
        return int(text)

    return parse


def _bytes(name: str, text: str) -> ByteSize:
    try:
        return ByteSize(text)
    except ValueError as wrong:
        raise ValueError(f"{name}: {wrong}") from None


def _flag(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{name} must be true or false, not {text!r}")
    return text == "true"


def _word(name: str, text: str) -> str:
    if not NAME.fullmatch(text) or RESERVED.fullmatch(text):
        raise ValueError(
            f"{name} must be letters, digits and . : @ - _, at most 64, and no line-, api-key or "
            f"anybody; not {text!r}"
        )
    return text


def _names(name: str, text: str) -> tuple[str, ...]:
    models = tuple(model for model in text.split(",") if model)
    if not models:
        raise ValueError(f"{name} must be names of models, parted by commas; leave it out for all")
    return models


OPTIONS: Mapping[str, Callable[[str, str], Any]] = {
    "priority": _integer(MIN_PRIORITY, MAX_PRIORITY),
    "name": _word,
    "models": _names,
    "min_priority": _integer(MIN_PRIORITY, MAX_PRIORITY),
    "requests_per_minute": _integer(1, MAX_LIMIT),
    "tokens_per_minute": _integer(1, MAX_LIMIT),
    "max_batch_bytes": _bytes,
    "cache": _word,
    "inference": _flag,
    "observability": _flag,
    "admin": _flag,
}


def split_options(line: str, where: str) -> tuple[str, dict[str, Any]]:
    """Split a line into key and options. Raises `SettingsInvalid`, without the key in its
    message."""
    options: dict[str, Any] = {}
    while match := OPTION.fullmatch(line):
        line, name, value = match.groups()
        if name not in OPTIONS:
            message = (
                f"{where}: unknown option {name!r}; there are {', '.join([*OPTIONS][:-1])} and "
                f"{[*OPTIONS][-1]}"
            )
            raise SettingsInvalid(message, FILE_FLAG)
        if name in options:
            raise SettingsInvalid(f"{where}: {name} is given twice", FILE_FLAG)
        try:
            options[name] = OPTIONS[name](name, value)
        except ValueError as wrong:
            raise SettingsInvalid(f"{where}: {wrong}", FILE_FLAG) from None
    return line, options


def is_option(text: str) -> bool:
    """Whether an option stands where a key belongs. A key may end as `abc=`."""
    name, sign, _ = text.partition("=")
    return bool(sign) and name in OPTIONS


def key_with(key: str, options: Mapping[str, Any], number: int, where: str) -> ApiKey:
    more = {name: value for name, value in options.items() if name not in ALL_RIGHTS}
    rights = frozenset(
        right for right in get_args(Right) if options.get(right, right in FILE_RIGHTS)
    )
    priority = options.get("priority", max(0, options.get("min_priority", 0)))
    lowest = options.get("min_priority", priority)
    if priority < lowest:
        raise SettingsInvalid(
            f"{where}: priority {priority} is below min_priority {lowest}; raise it", FILE_FLAG
        )
    return ApiKey(
        key, rights=rights, line=number, **more | {"priority": priority, "min_priority": lowest}
    )


def require_one_client_a_name(keys: Sequence[ApiKey]) -> None:
    """Raises `SettingsInvalid` if keys of one name have different options."""
    named: dict[str, ApiKey] = {}
    for key in keys:
        first = named.setdefault(key.name, key) if key.name else key
        if attrs.evolve(first, key="") != attrs.evolve(key, key=""):
            raise SettingsInvalid(
                f"{FILE_FLAG}: lines {first.line} and {key.line} have the name {key.name} and "
                "different options; "
                "keys of one name are one client: give both the same options, or different names",
                FILE_FLAG,
            )


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
    """Whether a key file restricts metrics and details of health."""
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
            "Incorrect API key provided: ask for one whoever runs this server"
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
    lines_of_keys: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        key = _key_of(line, number, path)
        first = lines_of_keys.setdefault(key.key, number)
        if first != number:
            raise SettingsInvalid(
                f"{FILE_FLAG} {path}: lines {first} and {number} are of the same key, whose name "
                "and limits would be of one of them; leave one out",
                FILE_FLAG,
            )
        yield key


def _key_of(line: str, number: int, path: Path) -> ApiKey:
    # Parse a key and the options behind it. Messages do not contain the key.
    where = f"{FILE_FLAG} {path}, line {number}"
    key, options = split_options(line, where)
    if is_option(key):
        raise SettingsInvalid(f"{where} has no key; write one before the options", FILE_FLAG)
    return key_with(sendable(key, FILE_FLAG, where), options, number, where)
