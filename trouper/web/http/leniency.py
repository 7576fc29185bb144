"""Lenient reading, without `--strict`: unknown names are collected, unless essential
(`Body.essential`); other servers' names (`Body.aliases`) and forms (`Body.adapt`) are converted."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs

from trouper.protocol.problems import Problem
from trouper.web.http.client_paths import Adaptation, trace_to_client

Json = dict[str, Any]
Skip = Callable[[str], None]
Adapt = Callable[[Json, Skip], Json]
"""Converts an object to the form of a class, which refuses values of a wrong type."""

MAX_NAMES = 32
MAX_CHARS = 80
MAX_PATTERN = 1000
EMPTY = "(empty)"
UNSAFE = re.compile(r"[^A-Za-z0-9_.:@$-]")
MORE = "..."
NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""Values that request nothing."""


def messages_adapted(value: Json, adapted: Callable[[Any], Any]) -> Json:
    """Adapt each message of a body; a value that is no list stays."""
    messages = value.get("messages")
    return (
        value | {"messages": [adapted(message) for message in messages]}
        if isinstance(messages, list)
        else value
    )


def known_value(name: str, known: Collection[str], value: Json, skip: Skip) -> Json:
    """Drop the field if the value is not `known`, as an effort of a newer model."""
    given = value.get(name)
    if not isinstance(given, str) or given in known:
        return value
    skip(name)
    return {key: inner for key, inner in value.items() if key != name}


class ReadPast:
    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.adaptations: list[Adaptation] = []
        self._taken = 0

    @property
    def full(self) -> bool:
        return MORE in self.names

    def skip(self, name: str) -> None:
        name = safe_name(name)
        if name not in self.names:
            self.names[name if len(self.names) < MAX_NAMES else MORE] = None

    def as_sent(self, problem: Problem) -> Problem:
        """Name the parameter at fault by its place in the client's body."""
        if problem.param is None:
            return problem
        sent = trace_to_client(problem.param, self.adaptations)
        # A client's key of a megabyte would take a second as a pattern.
        if sent == problem.param or len(problem.param) > MAX_PATTERN:
            return attrs.evolve(problem, param=sent)
        message = word(problem.param).sub(lambda _: sent, problem.message)
        return attrs.evolve(problem, message=message, param=sent)

    def take_new(self) -> list[str]:
        """Return the names since the last call."""
        names = [*self.names][self._taken :]
        self._taken += len(names)
        return names


def word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.]){re.escape(name)}\b")


def safe_name(name: str) -> str:
    """For headers, labels and logs."""
    return UNSAFE.sub(_percent, name[:MAX_CHARS])[:MAX_CHARS] or EMPTY


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))


def renamed(value: Json, aliases: Mapping[str, str], skip: Skip) -> Json:
    """Rename aliases to fields. An alias beside a different field value is skipped."""
    found = [alias for alias in aliases if alias in value]
    if not found:
        return value
    value = {**value}
    for alias in found:
        given = value.pop(alias)
        if given is not None and value.get(aliases[alias]) is None:
            value[aliases[alias]] = given
        elif given is not None and not same(value[aliases[alias]], given):
            skip(alias)
    return value


def put(value: Json, name: str, given: object, skip: Skip) -> None:
    """Set a field in place; a field with another value stays, and `name` is skipped."""
    if given is None:
        return
    if value.get(name) is None:
        value[name] = given
    elif not same(value[name], given):
        skip(name)


def same(one: object, other: object) -> bool:
    """Whether two parameters are equal; arrays and objects never are."""
    return isinstance(one, str | int | float) and one == other
