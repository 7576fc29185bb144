"""HAProxy keeps each conversation with one server, by what agents and clients send."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from typing import Any

import attrs
import pytest

from examples.replicas import SESSION_HEADERS, healthy
from tests.replicas.recording_server import RecordingServer, behind, needs_haproxy
from tests.test_process import until

pytestmark = needs_haproxy
MANY = 16
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@attrs.frozen
class Front:
    port: int
    servers: Sequence[RecordingServer]

    def send(
        self, path: str, body: Any = None, method: str = "POST", **headers: str
    ) -> tuple[int, str]:
        """Return the status, and the name of the server that answered."""
        before = [len(server.arrived) for server in self.servers]
        data = None if body is None else json.dumps(body).encode()
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method, path, data, sent | {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                response.read()
                status = response.status
        new = [server.arrived[count:] for server, count in zip(self.servers, before, strict=True)]
        return status, "".join(arrival.server for arrived in new for arrival in arrived)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with behind(tmp_path_factory.mktemp("haproxy"), "haproxy", 3) as (port, servers):
        yield Front(port, servers)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def turns(number: int, *begin: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The messages of two turns of a conversation."""
    first = [*begin, user(f"Task {number}.")]
    return [first, [*first, {"role": "assistant", "content": "Done."}, user(f"Thanks {number}.")]]


SYSTEM = {"role": "system", "content": "You are an agent. " * 20}
DEVELOPER = {"role": "developer", "content": [{"type": "input_text", "text": "You are one."}]}


Sent = tuple[str, dict[str, Any], dict[str, str]]
"""A path, a body and headers"""


def by_name(header: str, number: int) -> list[Sent]:
    """Two turns of a conversation that differ in all but their header."""
    return [
        (CHAT, {"messages": [user(f"{number} {turn}")]}, {header: f"session-{number}"})
        for turn in "ab"
    ]


def after_a_system_prompt(number: int) -> list[Sent]:
    return [(CHAT, {"model": "m", "messages": one}, {}) for one in turns(number, SYSTEM)]


def without_a_system_prompt(number: int) -> list[Sent]:
    return [(CHAT, {"messages": one, "model": "m"}, {}) for one in turns(number)]


def in_blocks(number: int) -> list[Sent]:
    return [
        (
            MESSAGES,
            {
                "system": "An agent.",
                "messages": [
                    one | {"content": [{"type": "text", "text": one["content"]}]}
                    for one in messages
                ],
            },
            {},
        )
        for messages in turns(number)
    ]


def by_cache_key(number: int) -> list[Sent]:
    return [
        (RESPONSES, {"input": f"{number} {turn}", "prompt_cache_key": f"key {number}"}, {})
        for turn in "ab"
    ]


def in_items(number: int) -> list[Sent]:
    return [(RESPONSES, {"input": one}, {}) for one in turns(number, DEVELOPER)]


def longer_than_the_buffer(number: int) -> list[Sent]:
    long = user(f"{number}" + "x" * 1_200_000)
    return [(CHAT, {"messages": [long, user(turn)]}, {}) for turn in "ab"]


KINDS: tuple[Callable[[int], list[Sent]], ...] = (
    *(partial(by_name, name.replace("-", "_")) for name in SESSION_HEADERS),
    after_a_system_prompt,
    without_a_system_prompt,
    in_blocks,
    by_cache_key,
    in_items,
    longer_than_the_buffer,
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_stays_where_it_began(
    kind: Callable[[int], list[Sent]], front: Front
) -> None:
    """Conversations of each kind are spread over the servers, and each stays with one."""
    places = [
        [front.send(path, body, **headers)[1] for path, body, headers in kind(number)]
        for number in range(MANY)
    ]
    assert [servers for servers in places if len({*servers}) != 1] == []
    assert {first for first, _ in places} == {*"abc"}


def places(front: Front) -> dict[int, str]:
    """Where conversations without a name are answered; each once."""
    return {
        number: front.send(CHAT, {"messages": [user(f"Elsewhere {number}.")]})[1]
        for number in range(MANY)
    }


@pytest.mark.parametrize("leaving", ["not ready", "503"])
def test_a_server_that_leaves_moves_its_own_conversations_and_nobody_is_refused(
    leaving: str, front: Front
) -> None:
    """A server that drains answers 503 until the router has seen that it is not ready: the request
    is sent again, to another."""
    before = places(front)
    left = front.servers[1]
    if leaving == "503":
        left.status = 503
    else:
        left.ready = False
        until(lambda: healthy(front.port) == 2)
    answers = {
        number: front.send(CHAT, {"messages": [user(f"Elsewhere {number}.")]})
        for number in range(MANY)
    }
    left.status, left.ready = 200, True
    until(lambda: healthy(front.port) == 3)
    assert {status for status, _ in answers.values()} == {200}
    assert "b" in before.values()
    for number, (_, reached) in answers.items():
        if before[number] == "b":
            assert reached.replace("b", "") in ("a", "c")
        else:
            assert reached == before[number]
    assert places(front) == before


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/responses/resp_{}_0a1b", None),
        ("GET", "/v1/responses/resp_{}_0a1b/input_items?limit=2", None),
        ("POST", "/v1/responses/resp_{}_0a1b/cancel", {}),
        ("DELETE", "/v1/files/file-{}_0a1b", None),
        ("GET", "/v1/files/file-{}_0a1b/content", None),
        ("GET", "/v1/batches/batch_{}_0a1b", None),
        ("POST", "/v1/requests/chatcmpl-{}_0a1b/cancel", {}),
        ("GET", "/v1/requests/{}_0a1b", None),
        ("POST", RESPONSES, {"input": "x" * 9_000, "previous_response_id": "resp_{}_0a1b"}),
        ("POST", "/v1/batches", {"endpoint": CHAT, "input_file_id": "file-{}_0a1b"}),
        (
            "POST",
            RESPONSES,
            {"input": [user("x"), {"content": [{"type": "input_image", "file_id": "file-{}_01"}]}]},
        ),
    ],
)
def test_requests_for_what_a_server_made_reach_that_server(
    method: str, path: str, body: Any, front: Front
) -> None:
    def filled(value: Any, name: str) -> Any:
        return json.loads(json.dumps(value).replace("{}", name)) if value else value

    for name in "abc":
        # The session says otherwise.
        assert [
            front.send(
                path.replace("{}", name), filled(body, name), method, x_session_id=f"{number}"
            )
            for number in range(4)
        ] == [(200, name)] * 4


def test_files_and_batches_of_a_key_are_on_one_server(front: Front) -> None:
    """Also for a list, and for clients without a key."""
    for headers in ({}, {"authorization": "Bearer k"}, {"x_api_key": "k2"}):
        servers = {
            front.send(path, None, "GET", x_session_id=f"{number}", **headers)[1]
            for number in range(4)
            for path in ("/v1/files", "/v1/batches?limit=3")
        }
        assert len(servers) == 1
