"""API keys: who is let in, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from trouper import ServerSettings
from trouper.protocol.api_keys import Keys
from trouper.web.keys.endpoint_rights import ENDPOINT_ACCESS, access_of

ONE, TWO, FILED = "sk-one", "sk-two", "sk-filed"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    file = tmp_path / "keys"
    file.write_text(f"\n  {FILED} \n\nsk-other\n")
    return Keys.of(ServerSettings(api_key=(ONE, TWO), api_key_file=file))


@pytest.mark.parametrize("key", [ONE, TWO, FILED, "sk-other"])
def test_every_key_is_let_in_however_it_travels(keys: Keys, key: str) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert keys.problem(f"{scheme} {key}", None) is None
    assert keys.problem(f"Bearer  {key} ", None) is None
    assert keys.problem(None, key) is None
    assert keys.problem("Basic dXNlcg==", key) is None, "a proxy's own header beside it"


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
    problem = keys.problem(authorization, api_key)
    assert problem is not None and (problem.status, problem.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("restricted", [False, True])
def test_what_holds_no_data_is_open_and_nothing_else(restricted: bool) -> None:
    """Probes have no key; scrapes have none where there is no key file."""
    open_paths = {path for path in ENDPOINT_ACCESS if access_of(path, restricted=restricted) == "open"}
    page = {"/", "/live/<digest>/<name>", "/openapi.json", "/docs"}
    assert open_paths == {"/health", "/livez", "/readyz", *page} | (set() if restricted else {"/metrics"})
    for path in ("/v1/of-the-future", "/v1/live/", "/live", "/metrics/", "/V1/models", "//metrics"):
        assert access_of(path, restricted=restricted) == "admin", path


def test_without_keys_everybody_is_let_in() -> None:
    assert Keys.of(ServerSettings()).problem(None, None) is None
