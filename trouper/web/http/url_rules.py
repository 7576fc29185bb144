"""The rules by which paths find their handlers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from quart.routing import QuartRule
from werkzeug.routing import BaseConverter


class OneWayRule(QuartRule):
    """A rule that is matched, and from which a URL is hardly ever built: nothing of this server wants one.

    Werkzeug compiles two functions of each rule for that, beforehand: 38 of the 50 ms that making the app took. Here each is compiled
    when it is called.
    """

    def _compile_builder(self, append_unknown: bool = True) -> Callable[..., tuple[str, str]]:
        compiled = cache(super()._compile_builder)

        def build(rule: OneWayRule, *args: Any, **values: Any) -> tuple[str, str]:
            return compiled(append_unknown).__get__(rule)(*args, **values)  # type: ignore[no-any-return]

        return build


class ResponseId(BaseConverter):
    """A response id in a path. Paths of other endpoints are excluded: otherwise a 405 would list methods that they do
    not have."""

    regex = r"(?!input_tokens$)[^/]+"
