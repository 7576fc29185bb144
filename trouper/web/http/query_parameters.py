"""Queries of GET requests, and lists in pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from trouper.protocol.problems import Problem, RequestFailed, bad_request, quoted
from trouper.web.http.leniency import ReadPast
from trouper.web.http.request_body import Report
from trouper.web.http.request_schema import FLAG, TEXT, Json, array, full, nullable

ORDERS = ("asc", "desc")

# Names without which a list would be another page.
PAGES = frozenset({"before", "before_id", "after_id", "ending_before", "offset", "page", "cursor"})


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

    def choice(self, name: str, choices: Sequence[str]) -> str | None:
        value = self._arguments.get(name)
        if value is not None and value not in choices:
            message = f"{name} must be {' or '.join(choices)}"
            raise bad_request(message, name, "invalid_value")
        return value

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


def list_of(item: Json) -> Json:
    """The schema of a page."""
    return full(
        {
            "object": {"const": "list"},
            "data": array(item),
            "first_id": nullable(TEXT),
            "last_id": nullable(TEXT),
            "has_more": FLAG,
        }
    )


def page_body(
    ids: Sequence[str],
    after: str | None,
    limit: int,
    body: Callable[[int], Json],
    code: str = "not_in_list",
) -> Json:
    """Return the page behind the entry `after`. `body` formats the entry of that index. Raises
    `RequestFailed` (404)."""
    start = 0
    if after is not None:
        start = next((index + 1 for index, name in enumerate(ids) if name == after), 0)
        if not start:
            message = f"after: nothing in this list has the id {quoted(after)}"
            raise RequestFailed(Problem(404, message, param="after", code=code))
    page = range(start, min(start + limit, len(ids)))
    return {
        "object": "list",
        "data": [body(index) for index in page],
        "first_id": ids[page[0]] if page else None,
        "last_id": ids[page[-1]] if page else None,
        "has_more": start + limit < len(ids),
    }
