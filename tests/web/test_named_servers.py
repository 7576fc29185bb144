"""A proxy that names its servers finds what each has made: their names are in the ids."""

from __future__ import annotations

import re
from pathlib import Path

import openai
import pytest
import trio

from tests.web.batching import ended, request, started, strict
from tests.web.serving import Served, exchange, get, serving

NAME = {"X-Trouper-Server": "b2"}


def ids_of(client: openai.OpenAI) -> list[str]:
    chat = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "x"}], max_tokens=2
    )
    response = client.responses.create(model="fake", input="x", max_output_tokens=2)
    again = client.responses.create(
        model="fake", input="y", max_output_tokens=2, previous_response_id=response.id
    )
    batch = ended(client, started(client, [request("a")]))
    assert batch.output_file_id is not None
    return [
        chat.id,
        response.id,
        again.id,
        batch.id,
        batch.input_file_id,
        batch.output_file_id,
    ]


async def ids(served: Served, **headers: str) -> list[str]:
    def run() -> list[str]:
        with strict(served.base_url, "none") as client:
            return ids_of(client.with_options(default_headers=headers))

    return await trio.to_thread.run_sync(run)


async def test_ids_say_which_server_made_them(tmp_path: Path) -> None:
    async with serving(batch_dir=tmp_path) as served:
        named = await ids(served, **NAME)
        assert [one for one in named if not re.fullmatch(r"[a-z]+[-_]b2_[0-9a-f]{32}", one)] == []
        _, headers, _ = await exchange(served, get("/livez", "X-Trouper-Server: b2\r\n"))
        assert re.fullmatch("b2_[0-9a-f]{32}", headers["x-request-id"])
        sent = "X-Trouper-Server: b2\r\nX-Request-Id: mine\r\n"
        _, answered, _ = await exchange(served, get("/livez", sent))
        assert answered["x-request-id"] == "mine"


@pytest.mark.parametrize("name", ["", "B", "a_b", "a-b", "a" * 33, "a/b"])
async def test_other_names_are_none(name: str) -> None:
    async with serving() as served:
        _, headers, _ = await exchange(served, get("/livez", f"X-Trouper-Server: {name}\r\n"))
        assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
