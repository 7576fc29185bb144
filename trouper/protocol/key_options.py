"""An API key with options: a line of --api-key-file, as in `KEY name=batch models=small,big:*
priority=5`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal, get_args

import attrs

from trouper.protocol.problems import SettingsInvalid
from trouper.protocol.requests import MAX_PRIORITY, MIN_PRIORITY
from trouper.protocol.setting_fields import ByteSize

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
    """Name in errors, metrics and logs. Keys of one name are one client, for replacing a key
    without loss."""
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
