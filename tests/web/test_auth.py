"""API keys: who is let in, and where."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from trouper import ServerSettings, SettingsInvalid
from trouper.protocol.api_keys import Keys
from trouper.web.keys.endpoint_rights import ENDPOINT_ACCESS, access_of
from trouper.web.keys.key_file import KeyFile

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
        ("Bearer \t ", " \t"),
        ("Bearer \xa0", "\xa0"),
        ("Bearer ü", "日本"),
        ('Bearer ""', '""'),
        ("Bearer \x00", "\x00"),
    ],
)
def test_nobody_else_is(keys: Keys, authorization: str | None, api_key: str | None) -> None:
    problem = keys.problem(authorization, api_key)
    assert problem is not None and (problem.status, problem.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("restricted", [False, True])
def test_what_holds_no_data_is_open_and_nothing_else(restricted: bool) -> None:
    """Probes have no key; scrapes have none where there is no key file."""
    open_paths = {
        path for path in ENDPOINT_ACCESS if access_of(path, restricted=restricted) == "open"
    }
    page = {"/", "/live/<digest>/<name>", "/openapi.json", "/docs"}
    assert open_paths == {"/health", "/livez", "/api/hello", "/readyz", *page} | (
        set() if restricted else {"/metrics"}
    )
    for path in ("/v1/of-the-future", "/v1/live/", "/live", "/metrics/", "/V1/models", "//metrics"):
        assert access_of(path, restricted=restricted) == "admin", path


EMPTY = ["", " ", "\t\n", "\xa0", '""', "''", '  ""  ']


@pytest.mark.parametrize("key", EMPTY)
def test_an_empty_key_is_refused(key: str) -> None:
    """Quotes alone are what Docker makes of `KEY=""` in a file of variables."""
    with pytest.raises(
        SettingsInvalid, match=r"^--api-key is empty; give a key, or leave the flag out$"
    ):
        Keys.of(ServerSettings(api_key=("sk-good", key)))


@pytest.mark.parametrize("key", ["sk-one", ""])
def test_one_text_is_no_list_of_keys(key: str) -> None:
    """Each of its characters would be a key, and an empty one none."""
    with pytest.raises(SettingsInvalid, match="--api-key: give a tuple"):
        ServerSettings(api_key=cast("tuple[str, ...]", key))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key"),
        (" \n\t\n\xa0\n", "holds no key"),
        ("# sk-one\n  # sk-two\n", "holds no key"),
        ("\ufeff\n", "holds no key"),
        ("name=a\n", "line 1 has no key"),
        ("sk-one\n priority=5 name=a\n", "line 2 has no key"),
        ("admin=true", "line 1 has no key"),
        ("max_batch_bytes=5MB name=b", "line 1 has no key"),
        ('"" name=a\n', "line 1 has no key"),
        ("''", "line 1 has no key"),
    ],
)
async def test_a_file_without_a_key_opens_nothing(text: str, said: str, tmp_path: Path) -> None:
    """Neither at the start nor while the server runs."""
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(SettingsInvalid, match=f"--api-key-file .*keys,? {said}; write one"):
        Keys.of(ServerSettings(api_key_file=file))
    file.write_text("sk-before\n")
    keys = Keys.of(ServerSettings(api_key_file=file))
    file.write_text(text)
    await KeyFile(keys).look(0)
    assert keys.needed and keys.let_in(None, "sk-before") and said in keys.stale
    assert not any(
        keys.let_in(f"Bearer {given}", given) for given in (*EMPTY, text, "name=a", "admin=true")
    )


def test_without_keys_everybody_is_let_in() -> None:
    assert Keys.of(ServerSettings()).problem(None, None) is None
