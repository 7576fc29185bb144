"""What web pages may ask for, over sockets: every endpoint, and what a browser is told."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from tests.fakes import FakeEngine, FakeRow
from tests.web.serving import Served, eventually, exchange, get, post, serving

HERE = "http://localhost:5173"
EVIL = "https://evil.example"
BODY = {"prompt": "hello", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
PREFLIGHT = (
    f"Origin: {HERE}\r\nAccess-Control-Request-Method: POST\r\n"
    "Access-Control-Request-Headers: authorization,content-type,x-stainless-lang\r\n"
    "Access-Control-Request-Private-Network: true\r\n"
)


def asked(method: str, path: str, headers: str = "", host: str = "localhost") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{headers}\r\n".encode()
    )


async def endpoints(served: Served) -> list[tuple[str, str]]:
    """Everything there is: methods and paths."""
    _, _, body = await exchange(served, get("/openapi.json"))
    paths = json.loads(body)["paths"]
    return [
        (method.upper(), path.replace("{", "").replace("}", ""))
        for path, told in paths.items()
        for method in told
    ]


@pytest.mark.parametrize(
    ("host", "headers", "code"),
    [
        ("evil.example", "", "host_not_allowed"),
        (
            "evil.example:8000",
            "Origin: http://evil.example:8000\r\nSec-Fetch-Site: same-origin\r\n",
            "host_not_allowed",
        ),
        (
            "evil.example",
            "X-Forwarded-Host: localhost\r\nForwarded: host=localhost\r\n",
            "host_not_allowed",
        ),
        ("localhost", f"Origin: {EVIL}\r\n", "origin_not_allowed"),
        ("localhost", "Origin: null\r\n", "origin_not_allowed"),
        (
            "localhost",
            "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\n",
            "origin_not_allowed",
        ),
        (
            "localhost",
            "Sec-Fetch-Site: same-site\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: iframe\r\n",
            "origin_not_allowed",
        ),
    ],
)
async def test_every_endpoint_refuses_what_a_page_may_not(
    host: str, headers: str, code: str
) -> None:
    """Also what is nowhere, and what changes nothing. Nothing is run, and nothing said but why."""
    async with serving() as served:
        found = await endpoints(served)
        assert {
            ("GET", "/v1/live"),
            ("GET", "/metrics"),
            ("GET", "/docs"),
            ("POST", "/v1/requests/request_id/cancel"),
        } <= {*found}
        assert ("DELETE", "/v1/responses/response_id") in found
        for method, path in [
            *found,
            ("GET", "/nowhere"),
            ("OPTIONS", "/v1/models"),
            ("GET", "/live/x/page.js"),
        ]:
            status, told, body = await exchange(served, asked(method, path, headers, host))
            assert status == 403, (method, path)
            error = json.loads(body)["error"]
            assert error["type"] == "permission_error" and "access-control-allow-origin" not in told
            assert code in (error.get("code"), error.get("details", {}).get("error_code"))
        assert served.runtime.health().scheduler.tokens_generated == 0


async def test_a_head_needs_no_body_to_be_refused() -> None:
    async with serving() as served:
        status, _, body = await exchange(served, asked("HEAD", "/v1/models", f"Origin: {EVIL}\r\n"))
        assert (status, body) == (403, b"")


async def test_an_absolute_target_counts_beside_the_host() -> None:
    async with serving() as served:
        assert (await exchange(served, asked("GET", "http://evil.example/v1/models")))[0] == 403
        assert (await exchange(served, asked("GET", "http://localhost/v1/models")))[0] == 200
        assert (
            await exchange(served, asked("GET", "http://localhost/v1/models", host="evil.example"))
        )[0] == 403


async def test_two_hosts_are_no_request_and_none_is_an_old_client() -> None:
    async with serving() as served:
        assert (await exchange(served, asked("GET", "/livez", "Host: evil.example\r\n")))[0] == 400
        assert (await exchange(served, b"GET /livez HTTP/1.1\r\nConnection: close\r\n\r\n"))[
            0
        ] == 400
        assert (await exchange(served, b"GET /livez HTTP/1.0\r\n\r\n"))[0] == 200


async def test_an_error_has_the_dialects_own_shape_and_names_the_flag() -> None:
    async with serving() as served:
        _, _, body = await exchange(served, asked("GET", "/v1/models", host="llm.example.org:8000"))
        assert json.loads(body) == {
            "error": {
                "message": "this server does not answer to the name llm.example.org; if it is one "
                "of its own, start it with "
                "--allowed-hosts llm.example.org",
                "type": "permission_error",
                "param": None,
                "code": "host_not_allowed",
            }
        }
        _, _, body = await exchange(served, asked("POST", "/v1/messages", f"Origin: {EVIL}\r\n"))
        said = json.loads(body)
        assert (said["type"], said["error"]["type"]) == ("error", "permission_error")
        assert "--cors-origins https://evil.example" in said["error"]["message"]


async def test_a_body_says_that_it_is_json() -> None:
    async with serving() as served:
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
        ):
            status, _, body = await exchange(
                served, post("/v1/completions", BODY, f"Content-Type: {kind}\r\n")
            )
            assert (status, json.loads(body)["error"]["code"]) == (415, "unsupported_media_type"), (
                kind
            )
        bare = post("/v1/completions", BODY).replace(b"Content-Type: application/json\r\n", b"")
        chunked = b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        for request in (bare, asked("POST", "/v1/completions")[:-2] + chunked):
            status, _, body = await exchange(served, request)
            assert (
                status == 415
                and "-H 'Content-Type: application/json'" in json.loads(body)["error"]["message"]
            )
        assert served.runtime.health().scheduler.tokens_generated == 0
        status, _, _ = await exchange(
            served, post("/v1/completions", BODY, "Content-Type: application/vnd.api+json\r\n")
        )
        assert status == 200


async def test_cancelling_needs_no_body_and_says_nothing_to_a_page() -> None:
    async with serving() as served:
        stream = await served.connect()
        async with stream:
            await stream.send_all(
                post(
                    "/v1/completions",
                    BODY | {"max_tokens": 4000, "stream": True, "ignore_eos": True},
                    "X-Request-Id: mine\r\n",
                )
            )
            await eventually(lambda: served.busy == 1)
            for headers in (
                f"Origin: {EVIL}\r\n",
                "Origin: null\r\n",
                "Sec-Fetch-Site: cross-site\r\n",
            ):
                assert (await exchange(served, asked("POST", "/v1/requests/mine/cancel", headers)))[
                    0
                ] == 403
            assert served.busy == 1
            assert (await exchange(served, asked("POST", "/v1/requests/mine/cancel")))[0] == 200
        await eventually(lambda: served.busy == 0)


async def test_a_preflight_needs_no_key_and_says_what_may_be_sent() -> None:
    async with serving(cors_origins=HERE, api_key=("secret",)) as served:
        for method, path in await endpoints(served):
            status, told, body = await exchange(served, asked("OPTIONS", path, PREFLIGHT))
            assert (status, body) == (204, b""), (method, path)
            assert told["access-control-allow-origin"] == HERE
            assert method.lower() in told["access-control-allow-methods"]
            assert (
                told["access-control-allow-headers"]
                == "authorization,content-type,x-stainless-lang"
            )
            assert told["access-control-allow-private-network"] == "true"
            assert (told["access-control-max-age"], told["vary"]) == ("600", "origin")
            assert "access-control-allow-credentials" not in told
        assert (await exchange(served, asked("OPTIONS", "/v1/models", f"Origin: {HERE}\r\n")))[
            0
        ] == 401, "this is no preflight"
        refused = PREFLIGHT.replace(HERE, EVIL)
        status, told, _ = await exchange(served, asked("OPTIONS", "/v1/models", refused))
        assert status == 403 and "access-control-allow-origin" not in told


async def test_a_named_origin_may_read_whatever_comes() -> None:
    """Answers, streams, and errors from before, in and below the endpoints."""
    origin = f"Origin: {HERE}\r\nSec-Fetch-Site: cross-site\r\n"
    requests: list[tuple[int, bytes]] = [
        (200, post("/v1/completions", BODY, origin)),
        (200, post("/v1/completions", BODY | {"stream": True}, origin)),
        (200, post("/v1/chat/completions", CHAT, origin)),
        (200, post("/v1/messages", CHAT, origin)),
        (200, get("/v1/models", origin)),
        (400, post("/v1/completions", b"{", origin)),
        (400, post("/v1/completions", BODY | {"n": 0}, origin)),
        (404, get("/nowhere", origin)),
        (405, get("/v1/completions", origin)),
        (413, post("/v1/completions", BODY | {"prompt": "x" * 2000}, origin)),
        (415, post("/v1/completions", BODY, origin + "Content-Type: text/plain\r\n")),
        (304, get("/", origin + "If-None-Match: *\r\n")),
    ]
    async with serving(cors_origins=f"https://other.example,{HERE}", max_body_bytes=1500) as served:
        for wanted, request in requests:
            status, told, _ = await exchange(served, request)
            assert status == wanted
            assert (told["access-control-allow-origin"], told["vary"]) == (HERE, "origin"), request
            assert (
                "x-request-id" in told and "x-request-id" in told["access-control-expose-headers"]
            )
        status, told, _ = await exchange(served, get("/v1/models"))
        assert "access-control-allow-origin" not in told and told["vary"] == "origin", (
            "a cache must know that there are two answers"
        )
        assert (await exchange(served, get("/v1/models", f"Origin: {EVIL}\r\n")))[0] == 403


async def test_a_key_is_needed_all_the_same() -> None:
    async with serving(cors_origins="*", api_key=("secret",)) as served:
        status, told, _ = await exchange(served, get("/v1/models", f"Origin: {EVIL}\r\n"))
        assert (status, told["access-control-allow-origin"]) == (401, "*")
        status, told, _ = await exchange(
            served, get("/v1/models", "Origin: null\r\nAuthorization: Bearer secret\r\n")
        )
        assert (status, told["access-control-allow-origin"]) == (200, "*")


async def test_an_error_inside_is_readable_too() -> None:
    def dies(rows: Sequence[FakeRow]) -> bool:
        return any(row.prompt[-5:] == tuple(b"hello") for row in rows)

    async with serving(FakeEngine(dies=dies), cors_origins=HERE) as served:
        status, told, body = await exchange(
            served, post("/v1/completions", BODY, f"Origin: {HERE}\r\n")
        )
        assert (
            status == 422
            and told["access-control-allow-origin"] == HERE
            and b"request_crashes_engine" in body
        )


async def test_without_the_settings_nothing_is_said_of_origins() -> None:
    async with serving() as served:
        _, told, _ = await exchange(served, get("/v1/models"))
        assert not [name for name in told if name.startswith("access-control") or name == "vary"]
