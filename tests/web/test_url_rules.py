"""Rules that build no URL beforehand are werkzeug's in all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from quart.routing import QuartMap, QuartRule
from werkzeug.routing import BuildError, MapAdapter

from trouper.web.http.url_rules import OneWayRule, ResponseId

PATHS = {
    "plain": "/v1/models",
    "file": "/v1/files/<id>",
    "name": "/v1/<path:name>/x",
    "answer": "/v1/responses/<response:id>",
}


def bound(rule: type[QuartRule]) -> MapAdapter:
    rules = QuartMap(
        [rule(path, endpoint=name, methods=["GET"]) for name, path in PATHS.items()],
        converters={"response": ResponseId},
    )
    return rules.bind("host")


@pytest.mark.parametrize(
    ("endpoint", "values"),
    [
        ("plain", {}),
        ("plain", {"page": 2, "of": "a b"}),
        ("file", {"id": "a/b é"}),
        ("name", {"name": "org/model"}),
        ("answer", {"id": "resp_1", "more": 1}),
        ("file", {}),
        ("other", {}),
    ],
)
def test_a_url_is_built_as_by_a_rule_that_can_from_the_start(endpoint: str, values: dict[str, Any]) -> None:
    def built(rule: type[QuartRule]) -> str:
        adapter = bound(rule)
        try:
            twice = {adapter.build(endpoint, values) for _ in range(2)}
        except BuildError as error:
            return repr(error)
        return str(twice)

    assert built(OneWayRule) == built(QuartRule)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/files/a%20b", "/v1/org/model/x", "/v1/responses/resp_1"])
def test_a_path_finds_its_handler(path: str) -> None:
    assert bound(OneWayRule).match(path) == bound(QuartRule).match(path)


def test_nothing_is_compiled_before_a_url_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails, too, if werkzeug compiles by another method than the one that ours overrides."""
    compiled: list[bool] = []
    plain = QuartRule._compile_builder

    def compiling(rule: QuartRule, append_unknown: bool) -> Callable[..., tuple[str, str]]:
        compiled.append(append_unknown)
        return plain(rule, append_unknown)

    monkeypatch.setattr(QuartRule, "_compile_builder", compiling)
    adapter = bound(OneWayRule)
    assert not compiled
    assert adapter.build("file", {"id": "a"}) == "/v1/files/a"
    assert adapter.build("file", {"id": "b"}) == "/v1/files/b"
    assert compiled == [True]
