"""A wrong base URL leads to the endpoint that was meant, or says where the API is."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
import trio

from tests.fakes import FakeEngine
from tests.web.serving import ask, exchange, get, post, serving
from trouper.web.http.meant_paths import ENDPOINTS, OTHERS, meant_path

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
MEANT = {
    "/chat/completions": CHAT,
    "/v1/chat/completions/": CHAT,
    "//v1//chat/completions": CHAT,
    "/v1/v1/chat/completions": CHAT,
    "/v1/chat/completions/chat/completions": CHAT,
    "/v1/chat/completions/v1/chat/completions": CHAT,
    "/openai/v1/chat/completions": CHAT,
    "/api/v1/chat/completions": CHAT,
    "/completions": "/v1/completions",
    "/v1/chat/completions/models": "/v1/models",
    "/models": "/v1/models",
    "/health_generate": "/readyz",
    "/get_model_info": "/server_info",
    "/get_server_info": "/server_info",
    "/models/org/name": "/v1/models/org/name",
    "/v1/models/": "/v1/models",
    "/responses": "/v1/responses",
    "/responses/resp_1/cancel": "/v1/responses/resp_1/cancel",
    "/v1/v1/messages": "/v1/messages",
    "/anthropic/v1/messages/count_tokens": "/v1/messages/count_tokens",
    "/v1/messages/v1/messages": "/v1/messages",
    "/embeddings": "/v1/embeddings",
    "/v1/tokenize": "/tokenize",
    "/health/": "/health",
}
LEFT = (
    "/",
    "/v1",
    "/v1/",
    "/nothing",
    "/api/chat",
    "/api/embeddings",
    "/api/generate",
    "/chat",
    "/v1/models/a/completions",
    "/live/0/main.js",
    CHAT,
    "/v1/models",
    "/v1/models/models",
    "/v1/responses/models",
    "/v1/responses/input_tokens",
    "/xv1/models",
    "/v1/chat",
    "/health",
    "/completions/x",
    "/v1/responses/a/b",
)


@pytest.mark.parametrize("path", MEANT)
def test_a_path_that_is_clear(path: str) -> None:
    assert meant_path(path) == MEANT[path]
    assert meant_path(MEANT[path]) == MEANT[path]


@pytest.mark.parametrize("path", LEFT)
def test_a_path_that_stays(path: str) -> None:
    assert meant_path(path) == path


def test_the_endpoints_are_named() -> None:
    assert "chat/completions" in ENDPOINTS


def test_a_page_names_each_path_of_other_servers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "replicas.md").read_text("utf-8")
    assert [path for path in OTHERS if f"`{path}`" not in page] == ["/v2/rerank"], "in /docs"


async def test_it_is_answered_and_strict_does_not() -> None:
    for strict in (False, True):
        async with serving(FakeEngine(), strict=strict) as served:
            for path in ("/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completions/"):
                assert (await ask(served, BODY, path))[0] == (404 if strict else 200), path
            assert (await exchange(served, get("/models/fake")))[0] == (404 if strict else 200)


async def test_keys_hold_for_what_was_meant() -> None:
    async with serving(FakeEngine(), api_key=("k",)) as served:
        assert (await ask(served, BODY, "/chat/completions"))[0] == 401
        assert (await exchange(served, get("//models")))[0] == 401
        assert (await exchange(served, get("/health/")))[0] == 200


async def test_errors_have_the_dialect_of_what_was_meant() -> None:
    async with serving(FakeEngine()) as served:
        status, answer = await ask(served, {}, "/v1/v1/messages")
    assert (status, answer["type"]) == (400, "error")


async def test_what_nobody_meant_says_where_the_api_is() -> None:
    async with serving(FakeEngine()) as served:
        for path, expected in (
            ("/api/chat", "Ollama"),
            ("/v1", "/v1 as their base URL"),
            ("/nothing", "base URL"),
            ("/v1/images/generations", "/docs lists the endpoints"),
        ):
            status, _, body = await exchange(served, get(path))
            error = json.loads(body)["error"]
            message = error if isinstance(error, str) else error["message"]
            assert status == 404 and expected in message and "http://localhost/" in message, message


@pytest.mark.parametrize("base", ["", "/v1/", "/v1/v1", "/v1/chat/completions"])
async def test_the_official_client_with_a_wrong_base_url(base: str) -> None:
    async with serving(FakeEngine()) as served:
        root = served.base_url.removesuffix("/v1")

        def use() -> str:
            with openai.OpenAI(base_url=root + base, api_key="x", max_retries=0) as client:
                answer = client.chat.completions.create(
                    model="fake", messages=[{"role": "user", "content": "x"}], max_tokens=2
                )
                return answer.object

        assert await trio.to_thread.run_sync(use) == "chat.completion"


async def test_ollamas_clients_can_show_what_is_said() -> None:
    """They take `error` for a text; an object in its place is shown as "[object Object]"."""
    async with serving(FakeEngine(), api_key=("a-key",)) as served:
        for headers, status, said in (
            ("Authorization: Bearer a-key\r\n", 404, "Ollama's own API is not served"),
            ("", 401, "API key"),
        ):
            for path in ("/api/tags", "/api/tags/"):
                answered, _, body = await exchange(served, get(path, headers))
                assert answered == status
                assert said in json.loads(body)["error"]


async def test_a_path_where_nothing_is_is_no_matter_of_the_bodys_type() -> None:
    """Found by use: OpenAI's client was told that its upload for /v1/audio/transcriptions had to be
    JSON."""
    async with serving() as served:
        form = "Content-Type: multipart/form-data; boundary=x\r\n"
        for path in ("/v1/audio/transcriptions", "/nothing"):
            status, _, body = await exchange(served, post(path, {}, form))
            assert (status, f"nothing at {path}" in json.loads(body)["error"]["message"]) == (
                404,
                True,
            )


async def test_a_long_path_is_not_sent_back_whole() -> None:
    async with serving() as served:
        _, _, body = await exchange(served, get(f"/{'a' * 60_000}"))
        assert len(body) < 1_000
