"""API keys: who is let in, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from trouper import ServerSettings
from trouper.protocol.api_keys import OPEN_PATHS, Keys

ONE, TWO, FILED = "sk-one", "sk-two", "sk-filed"
GUARDED = "/v1/chat/completions"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    file = tmp_path / "keys"
    file.write_text(f"\n  {FILED} \n\nsk-other\n")
    return Keys.of(ServerSettings(api_key=(ONE, TWO), api_key_file=file))


@pytest.mark.parametrize("key", [ONE, TWO, FILED, "sk-other"])
def test_every_key_is_let_in_however_it_travels(keys: Keys, key: str) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert keys.problem(GUARDED, f"{scheme} {key}", None) is None
    assert keys.problem(GUARDED, f"Bearer  {key} ", None) is None
    assert keys.problem(GUARDED, None, key) is None
    assert keys.problem(GUARDED, "Basic dXNlcg==", key) is None, "a proxy's own header beside it"


@pytest.mark.parametrize(
    ("authorization", "api_key"),
    [
        (None, None),
        ("", ""),
        ("Bearer", None),
        ("Bearer ", ""),
        (f"Basic {ONE}", None),
        (ONE, None),
        (f"Bearer {ONE}x", None),
        (f"Bearer {ONE[:-1]}", None),
        ("Bearer sk-wrong", ONE),
        (None, "\ud800"),
    ],
)
def test_nobody_else_is(keys: Keys, authorization: str | None, api_key: str | None) -> None:
    problem = keys.problem(GUARDED, authorization, api_key)
    assert problem is not None and (problem.status, problem.code) == (401, "invalid_api_key")


def test_what_holds_no_data_is_open_and_nothing_else(keys: Keys) -> None:
    for path in (*OPEN_PATHS, "/live/page.js"):
        assert keys.problem(path, None, None) is None, path
    for path in ("/v1/models", "/v1/live", "/v1/live/", "/live", "/metrics/", "/tokenize", "/V1/models", "//metrics"):
        assert keys.problem(path, None, None) is not None, path
    assert {"/health", "/livez", "/readyz", "/metrics"} <= OPEN_PATHS, "probes and scrapes have no key"


def test_without_keys_everybody_is_let_in() -> None:
    assert Keys.of(ServerSettings()).problem(GUARDED, None, None) is None
