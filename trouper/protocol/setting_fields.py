"""Definition of a setting: default, bounds and help together."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Self

import attrs

from trouper.protocol.problems import SettingsInvalid


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _within(
    low: float, high: float | None = None
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    def check(_: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
        if value is None:
            return
        flag = _flag(attribute.name)
        if not isinstance(value, int | float):
            raise SettingsInvalid(f"{flag} must be a number, not {value!r}", flag)
        if not low <= value or (high is not None and value > high) or value == math.inf:
            finite = "" if value != math.inf else "finite and "
            bound = f"{finite}at least {low:g}" if high is None else f"between {low:g} and {high:g}"
            raise SettingsInvalid(f"{flag} must be {bound}, not {value:g}", flag)

    return check


def _among(choices: Sequence[Any]) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    *others, last = choices

    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in choices:
            flag = _flag(attribute.name)
            raise SettingsInvalid(
                f"{flag} must be {', '.join(map(str, others))} or {last}, not {value}", flag
            )

    return check


def setting(
    default: Any,
    help: str,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[Any] | None = None,
    **more: Any,
) -> Any:
    """`choices`: all valid values. `more`: `secret` hides the printed value; `repeat` allows
    several flags; `each` does, too, for one `Settings` each; `directory`: a path; `never_empty`: an
    empty variable counts; `metavar`: in the help, in place of the choices."""
    check = _among(choices) if choices else None if low is None else _within(low, high)
    return attrs.field(
        default=default, validator=check, metadata={"help": help, "choices": choices, **more}
    )


def size(default: Any, help: str) -> Any:
    """A setting in bytes, or text from programs."""
    convert = attrs.Converter(_bytes, takes_field=True)
    return attrs.field(
        default=default, validator=_within(0), converter=convert, metadata={"help": help}
    )


def _bytes(value: Any, field: attrs.Attribute[Any]) -> ByteSize | None:
    try:
        return None if value is None else ByteSize(value)
    except ValueError as error:
        raise SettingsInvalid(f"{_flag(field.name)}: {error}", _flag(field.name)) from None


def entries(read: Callable[[str], str], help: str) -> Any:
    """A setting with several entries, from repeated flags or commas. `read` raises `ValueError` for
    an invalid entry."""

    def convert(value: Any, field: attrs.Attribute[Any]) -> tuple[str, ...]:
        given = (value,) if isinstance(value, str) else value
        parts = [part.strip() for entry in given for part in entry.split(",")]
        try:
            return tuple(dict.fromkeys(read(part) for part in parts if part))
        except ValueError as error:
            raise SettingsInvalid(f"{_flag(field.name)}: {error}", _flag(field.name)) from None

    convert_field = attrs.Converter(convert, takes_field=True)
    return attrs.field(
        default=(),
        converter=convert_field,
        metadata={"help": help, "choices": None, "repeat": True},
    )


class ByteSize(int):
    """A number of bytes. Text may have a unit: 500MB, 4GB, 4GiB, 2T."""

    def __new__(cls, value: int | str) -> Self:
        """Raises `ValueError`."""
        if isinstance(value, int):
            return super().__new__(cls, value)
        match = re.fullmatch(r"\s*+(\d{1,30}(?:\.\d+)?)\s*+([kmgt]?)(i?)b?\s*+", str(value).lower())
        if match is None:
            raise ValueError(f"{value!r} is no size; write bytes, or a unit as in 500MB or 4GB")
        number, unit, binary = match.groups()
        return super().__new__(
            cls, int(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit or " "))
        )

    def __str__(self) -> str:
        for power, unit in ((4, "TB"), (3, "GB"), (2, "MB")):
            if self and self % 1000**power == 0:
                return f"{self // 1000**power}{unit}"
        return str(int(self))
