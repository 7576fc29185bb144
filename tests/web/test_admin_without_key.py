"""Without keys, models and adapters are managed by programs on the server's own machine, unless a
flag says otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.fakes import FakeEngine
from tests.web.serving import PATIENCE_S, exchange, get, post, serving
from tests.web.test_key_rights import bearer
from trouper import ServerSettings
from trouper.web.app import create_app
from trouper.web.keys.endpoint_rights import ENDPOINT_ACCESS, is_local

ADMIN = [path for path, access in ENDPOINT_ACCESS.items() if access == "admin"]
LOCAL = ("127.0.0.1", 50_000)


@pytest.mark.parametrize(
    ("client", "headers", "local"),
    [
        (LOCAL, {}, True),
        (LOCAL, {"host": "localhost:8000"}, True),
        (("::1", 1), {"host": "[::1]:8000"}, True),
        (("::ffff:127.0.0.1", 1), {"host": "127.0.0.1"}, True),
        (
            ["127.8.9.10", 1],
            {"accept": "*/*", "remote-addr": "127.8.9.10", "x-request-id": "1"},
            True,
        ),
        (None, {}, False),
        (("", 0), {}, False),
        (("testclient", 1), {}, False),
        (("192.0.2.7", 1), {}, False),
        (("::ffff:192.0.2.7", 1), {"host": "localhost"}, False),
        (("192.0.2.7", 1), {"host": "localhost", "x-forwarded-for": "127.0.0.1"}, False),
        (LOCAL, {"host": "llm.example.org"}, False),
        (LOCAL, {"host": "two, hosts"}, False),
        *(
            (LOCAL, {"host": "localhost", name: ""}, False)
            for name in (
                "forwarded",
                "via",
                "x-forwarded-for",
                "x-forwarded-proto",
                "x-forwarded-host",
                "x-forwarded",
                "x-real-ip",
                "x-client-ip",
                "client-ip",
                "true-client-ip",
                "cf-connecting-ip",
                "fly-client-ip",
                "x-original-uri",
                "x-envoy-external-address",
                "x-cluster-client-ip",
                "tailscale-user-login",
            )
        ),
    ],
)
def test_who_is_on_this_machine(client: Any, headers: dict[str, str], local: bool) -> None:
    assert is_local(client, headers, "1.1") is local
    assert not is_local(client, headers, "1.0"), "so nginx asked, with no header of its own"


async def test_a_proxy_on_the_same_machine_opens_nothing() -> None:
    forwarded = "X-Forwarded-For: 192.0.2.7\r\n"
    async with serving(FakeEngine()) as served:
        assert len(ADMIN) >= 7
        for path in ADMIN:
            assert (await exchange(served, post(path, {})))[0] != 403, path
            status, _, body = await exchange(served, post(path, {}, forwarded))
            error = json.loads(body)["error"]
            assert (status, error["code"]) == (403, "admin_needs_key"), path
            assert path in error["message"] and "--allow-admin-without-key" in error["message"]
        assert (await exchange(served, get("/v1/models", forwarded)))[0] == 200, (
            "what is no administration"
        )
        old = post(ADMIN[0], {}).replace(b"HTTP/1.1", b"HTTP/1.0")
        assert (await exchange(served, old))[0] == 403


@pytest.mark.parametrize("server", [{"allow_admin_without_key": True}, {"api_key": ("sk-flag",)}])
async def test_a_flag_or_a_key_opens_it(server: dict[str, Any]) -> None:
    headers = bearer("sk-flag") + "X-Forwarded-For: 192.0.2.7\r\nX-Real-IP: 192.0.2.7\r\n"
    async with serving(FakeEngine(), **server) as served:
        for path in ADMIN:
            assert (await exchange(served, post(path, {}, headers)))[0] != 403, path


@pytest.mark.parametrize(
    ("client", "allowed", "refused"),
    [
        (LOCAL, False, False),
        (("192.0.2.7", 1), False, True),
        (None, False, True),
        (None, True, False),
    ],
)
async def test_an_app_in_another_server(
    client: Any, allowed: bool, refused: bool, tmp_path: Path
) -> None:
    """The peer is the one of which that server tells; one that it does not know is a stranger."""
    async with serving(FakeEngine()) as served:
        settings = ServerSettings(batch_dir=tmp_path, allow_admin_without_key=allowed)
        app = create_app(served.runtime, settings)
        statuses: list[int | None] = []
        bodies = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> Any:
            if not bodies:
                await trio.sleep_forever()
            return bodies.pop()

        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        headers = [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", b"2"),
        ]
        path = "/v1/models/load"
        scope: Any = {
            "type": "http",
            "asgi": {},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "headers": headers,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "client": client,
            "server": None,
            "extensions": {},
        }
        with trio.fail_after(PATIENCE_S):
            await app(scope, receive, send)
    assert (statuses[0] == 403) is refused
