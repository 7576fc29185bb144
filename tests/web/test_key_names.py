"""What a key is called in the access log and among recent requests, and what needs it according to
/openapi.json and `trouper top`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner

from tests.fakes import FakeEngine
from tests.owners import give_away
from tests.web.serving import ask, serving
from tests.web.test_key_rights import bearer, key_file
from tests.web.test_openapi import described, operations
from trouper import cli
from trouper.cli.exits import USAGE_ERROR
from trouper.protocol.api_keys import Keys, keys_in
from trouper.protocol.logs import FIELDS
from trouper.protocol.problems import SettingsInvalid
from trouper.protocol.record import RequestRecord
from trouper.protocol.settings import ServerSettings

PROMPT = {"prompt": "hi", "max_tokens": 2}


async def test_requests_name_their_key_and_never_say_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = list[RequestRecord]()
    with caplog.at_level(logging.INFO, "trouper.requests"):
        async with serving(
            FakeEngine(),
            observers=[records.append],
            api_key_file=key_file(tmp_path),
            api_key=("sk-flag",),
        ) as served:
            for key in ("sk-plain", "sk-flag"):
                assert (await ask(served, PROMPT, headers=bearer(key)))[0] == 200
        async with serving(FakeEngine(), observers=[records.append]) as served:
            assert (await ask(served, PROMPT))[0] == 200
    assert [record.key for record in records] == ["plain", "api-key", ""]
    lines = [line for line in caplog.records if line.name == "trouper.requests"]
    assert [getattr(line, FIELDS).get("key") for line in lines] == ["plain", "api-key", None]
    assert lines[0].getMessage().startswith("/v1/completions by plain length after")
    assert lines[2].getMessage().startswith("/v1/completions length after")
    assert "sk-" not in caplog.text


def test_comments_and_a_byte_order_mark_are_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(
        b"\xef\xbb\xbfsk-first name=a\r\n# of the second team\r\n  #sk-old\r\n\r\nsk-#2\r\n"
    )
    assert [(key.key, key.name, key.line) for key in keys_in(file)] == [
        ("sk-first", "a", 1),
        ("sk-#2", "", 5),
    ]


def test_a_file_that_others_write_is_refused_and_one_that_all_read_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServerSettings(api_key_file=(file := key_file(tmp_path)))
    for mode, warns in ((0o600, False), (0o640, False), (0o440, False), (0o644, True)):
        file.chmod(mode)
        caplog.clear()
        assert Keys.of(settings).needed
        assert (f"{file} may be read by everybody: chmod 600 closes it" in caplog.text) == warns
    file.chmod(0o666)
    with pytest.raises(
        SettingsInvalid, match=f"{file}: others may write to it; make it this user's"
    ):
        Keys.of(settings)
    file.chmod(0o600)
    give_away(file, monkeypatch)
    with pytest.raises(SettingsInvalid, match=f"{file}: it belongs to the user"):
        Keys.of(settings)


async def test_metrics_need_a_key_in_the_description_where_keys_have_rights(tmp_path: Path) -> None:
    async def keyless(**server: Any) -> set[str]:
        async with serving(FakeEngine(), **server) as served:
            document = await described(served)
        return {path for _, path, operation in operations(document) if "security" not in operation}

    assert "/metrics" in await keyless(api_key=("sk-flag",))
    restricted = await keyless(api_key_file=key_file(tmp_path))
    assert (
        "/metrics" not in restricted and {"/", "/health", "/livez", "/openapi.json"} <= restricted
    )


async def test_top_says_which_right_a_key_lacks(tmp_path: Path) -> None:
    async with serving(FakeEngine(), api_key_file=key_file(tmp_path)) as served:

        def top(*arguments: str) -> tuple[int, str]:
            url = f"http://127.0.0.1:{served.port}"
            outcome = CliRunner().invoke(
                cli.main, ["top", "--url", url, "--once", "--interval-s", "0.1", *arguments]
            )
            return outcome.exit_code, outcome.stderr

        code, told = await trio.to_thread.run_sync(top, "--api-key", "sk-plain")
        assert (
            code == USAGE_ERROR
            and "no right to observability" in told
            and "observability=true in --api-key-file" in told
        )
        code, told = await trio.to_thread.run_sync(top)
        assert (
            code == USAGE_ERROR
            and "keys with the right observability only; give one by --api-key" in told
        )
        assert (await trio.to_thread.run_sync(top, "--api-key", "sk-watcher"))[0] == 0
