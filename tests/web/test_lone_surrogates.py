"""Half a surrogate pair in a body: what JavaScript's `JSON.stringify` makes of a text that was cut
in the middle of an emoji."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import FakeEngine
from tests.web.serving import exchange, post, serving
from trouper.protocol.problems import RequestFailed
from trouper.web.http.body_parsing import NAME, parse_json, with_replacements
from trouper.web.http.leniency import ReadPast

CUT = "a result that ends in half an emoji: \ud83d"
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": CUT}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": CUT}], "max_tokens": 2},
    "/v1/responses": {"input": CUT, "max_output_tokens": 2},
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": [RESULT]},
        ],
        "max_tokens": 2,
    },
    "/v1/embeddings": {"input": CUT},
}


async def test_every_dialect_reads_it_as_a_replacement_character_and_names_it() -> None:
    async with serving(FakeEngine()) as served:
        for path, body in BODIES.items():
            status, headers, said = await exchange(served, post(path, body))
            assert status == 200, said
            assert headers["x-trouper-ignored"] == NAME


async def test_a_strict_server_says_what_it_is() -> None:
    async with serving(FakeEngine(), strict=True) as served:
        for path, body in BODIES.items():
            status, _, said = await exchange(served, post(path, body))
            assert status == 400
            assert "half of a surrogate pair" in json.loads(said)["error"]["message"]


def test_whole_pairs_and_other_escapes_stay_as_they_are() -> None:
    body = rb'{"a": "\ud83d\ude00 \\ud83d \\\ud83d \ude00\ud83d\u0041 \uD83D"}'
    assert (
        with_replacements(body)
        == rb'{"a": "\ud83d\ude00 \\ud83d \\\ufffd \ufffd\ufffd\u0041 \ufffd"}'
    )


@given(st.text(st.characters(codec=None, categories=None) | st.sampled_from('\\u"d8\ud83d\ude00')))
def test_whatever_the_text_it_is_read_as_utf_16_is_decoded(text: str) -> None:
    meant = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    past = ReadPast()
    assert parse_json(json.dumps({"text": text}).encode(), past) == {"text": meant}
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    assert bool(past.names) is any("\ud800" <= char <= "\udfff" for char in whole)


def test_what_is_no_json_besides_is_refused() -> None:
    for body in (rb'{"a": "\ud83d', rb'{"a": "\ud83d"', rb'["\ud83d"]', rb'{"a": "\ud83x"}'):
        with pytest.raises(RequestFailed, match="JSON"):
            parse_json(body, ReadPast())
