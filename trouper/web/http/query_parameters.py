from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from trouper.protocol.problems import RequestFailed, bad_request
from trouper.web.http.leniency import ReadPast
from trouper.web.http.request_body import Report

PAGES = frozenset({"before", "before_id", "after_id", "ending_before", "offset", "page", "cursor"})
"""Names without which a list would be another page."""


class Query:
    """The query of a GET. Methods raise `RequestFailed` (400) for invalid values, and for unknown
    parameters unless read past."""

    def __init__(
        self, arguments: Mapping[str, str], known: tuple[str, ...], report: Report
    ) -> None:
        self._arguments, self._report = arguments, report
        for name in arguments:
            if name not in known:
                self._unread(
                    name, bad_request(f"unknown parameter {name!r}", name, "unknown_parameter")
                )

    def _unread(self, name: str, refusal: RequestFailed) -> None:
        if not isinstance(self._report, ReadPast):
            self._report(refusal)
        elif name in PAGES:
            raise refusal
        else:
            self._report.skip(name)

    def given(self, name: str) -> str | None:
        return self._arguments.get(name)

    def refuse(self, name: str, neutral: str) -> None:
        if self._arguments.get(name, neutral) != neutral:
            refusal = bad_request(
                f"{name!r} is not supported here; leave it out", name, "unsupported_parameter"
            )
            self._unread(name, refusal)

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
