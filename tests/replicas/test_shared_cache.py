"""Two real servers of one cache directory: a conversation goes on at the other one."""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from typing import Any

from tests.families import save
from tests.test_process import get, serving, until
from trouper.system.ports import free_ports

BLOCK = 64


def complete(port: int, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    with closing(HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(body | {"return_token_ids": True} | more),
            {"Content-Type": "application/json"},
        )
        with connection.getresponse() as response:
            answer = response.read()
            assert response.status == 200, answer
            return dict(json.loads(answer))


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def blocks(port: int) -> int:
    return int(get(port, "/health")[1]["directory"]["blocks"])


def test_a_server_finds_what_the_other_computed(tmp_path: Path) -> None:
    """Without a restart and long before the next sweep; also when the first one is gone."""
    model = save("llama", tmp_path / "llama")
    one, other = free_ports(2)
    flags = ("--self-check", "off")
    random = Random(3)
    prompt = [random.randrange(1, 90) for _ in range(10 * BLOCK + 5)]
    ssd = tmp_path / "blocks"
    with serving(model, other, *flags, ssd=ssd), serving(model, one, *flags, ssd=ssd) as process:
        first = complete(one, prompt)
        assert cached(first) == 0
        until(lambda: blocks(one) >= 10 and blocks(other) >= 10)
        process.kill()
        process.wait()
        turn = [*prompt, *first["choices"][0]["token_ids"], 7, 8, 9]
        there = complete(other, turn)
        assert cached(there) >= 10 * BLOCK
        anew = complete(other, turn, cache_salt="another tenant")
        assert cached(anew) == 0
        assert there["choices"][0]["token_ids"] == anew["choices"][0]["token_ids"]
