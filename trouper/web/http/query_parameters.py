"""The parameters of a GET, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from trouper.protocol.problems import bad_request


class Query:
    """The query of a request. Unknown parameters, and invalid values in its methods, raise `RequestFailed` (400)."""

    def __init__(self, arguments: Mapping[str, str], known: tuple[str, ...]) -> None:
        self._arguments = arguments
        for name in arguments:
            if name not in known:
                raise bad_request(f"unknown parameter {name!r}", name, "unknown_parameter")

    def given(self, name: str) -> str | None:
        return self._arguments.get(name)

    def refuse(self, name: str, neutral: str) -> None:
        if self._arguments.get(name, neutral) != neutral:
            raise bad_request(f"{name!r} is not supported here; leave it out", name, "unsupported_parameter")

    def flag(self, name: str) -> bool:
        value = self._arguments.get(name, "false")
        if value not in ("true", "false"):
            raise bad_request(f"{name} must be true or false, not {value!r}", name, "invalid_value")
        return value == "true"

    def number(self, name: str, default: int, low: int, high: int) -> int:
        value = self._arguments.get(name)
        if value is None:
            return default
        with suppress(ValueError):
            if value.isascii() and low <= int(value) <= high:
                return int(value)
        raise bad_request(f"{name} must be a number from {low} to {high}", name, "invalid_value")
