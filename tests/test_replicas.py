"""Two real servers behind HAProxy, without smg and with it, as examples/replicas.py runs them: what
docs/replicas.md promises."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, IncompleteRead
from pathlib import Path
from random import Random
from typing import Any

import attrs
import psutil
import pytest

from examples.replicas import __file__ as program
from examples.replicas import healthy, ready
from tests.families import save
from tests.replicas.recording_server import needs_haproxy, needs_smg, router_before
from tests.test_process import get, stats, until
from trouper.system.ports import free_ports

log = logging.getLogger(__name__)
ROUTERS = (pytest.param("haproxy", marks=needs_haproxy), pytest.param("smg", marks=needs_smg))
LONG = bool(os.environ.get("TROUPER_LONG_TESTS"))
TALKS, TURNS = 8, 4
CUT = "a stream that had begun was cut"
PATIENCE_S = 120.0


@attrs.frozen
class Replicas:
    router: str
    port: int
    """Of the router."""
    ports: tuple[int, ...]
    """Of the replicas."""
    program: psutil.Process

    def process(self, port: int) -> psutil.Process:
        [one] = [child for child in self.program.children() if f"--port={port}" in child.cmdline()]
        return one

    def all_are_seen(self) -> bool:
        """By HAProxy, and by smg if there is one."""
        commands = [child.cmdline() for child in self.program.children()]
        of_smg = [
            int(part.removeprefix("--port="))
            for command in commands
            if "smg.launch_router" in command
            for part in command
            if part.startswith("--port=")
        ]
        return all(healthy(port) == len(self.ports) for port in (self.port, *of_smg))


@pytest.fixture(scope="module", params=ROUTERS)
def replicas(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replicas]:
    """At the end a signal ends all of it, and nothing is left."""
    home = tmp_path_factory.mktemp("replicas")
    model = save("llama", home / "llama")
    [port] = free_ports(1)
    flags = ["--model", str(model), "--served-model-name", "tiny", "--no-ssd"]
    router = str(request.param)
    command = [sys.executable, program, "--router", router, "--port", str(port), "--", *flags]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"XDG_CACHE_HOME": str(home)},
    ) as process:
        assert process.stdout is not None
        running = psutil.Process(process.pid)
        while " routes to " not in (line := process.stdout.readline()):
            assert process.poll() is None, "it ended before it was ready"
        ports = tuple(int(url.rsplit(":", 1)[1]) for url in line.split(" routes to ")[1].split())
        children = running.children(recursive=True)
        try:
            yield Replicas(router, port, ports, running)
            children = running.children(recursive=True)
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
            assert [child for child in children if alive(child)] == []
        finally:
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()


@needs_haproxy
def test_flags_that_cannot_be_end_all_of_it() -> None:
    """Found by use: replicas with a wrong flag were started again every second, for ever."""
    [port] = free_ports(1)
    command = [sys.executable, program, "--port", str(port), "--", "--prot", "1"]
    outcome = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert outcome.returncode == 2, outcome.stderr
    assert "there is no flag --prot; did you mean --port?" in outcome.stderr
    assert "is started again" not in outcome.stderr


@needs_haproxy
def test_no_server_is_open_to_others_without_a_key() -> None:
    """`--host` is the servers', too: they refuse, on the ports that were named."""
    [port, first] = free_ports(2)
    command = [sys.executable, program, "--replicas", "1", "--port", str(port)]
    command += ["--host", "0.0.0.0", "--first-port", str(first)]
    outcome = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert outcome.returncode == 2, outcome.stderr
    assert "--allow-no-key" in outcome.stderr
    assert f"the replica a on port {first} ended with code 2" in outcome.stderr


def alive(process: psutil.Process) -> bool:
    """A zombie has ended: only nobody has asked for its code yet."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        connection.request(
            "POST", path, json.dumps({"model": "tiny"} | body), {"Content-Type": "application/json"}
        )
        with connection.getresponse() as response:
            answer = response.read()
            assert response.status == 200, answer
            return dict(json.loads(answer))


def chat(port: int, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return post(
        port,
        "/v1/chat/completions",
        {"messages": messages, "temperature": 0, "ignore_eos": True} | more,
    )


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab", "max_tokens": 2}),
        ("/v1/responses", {"input": "ab", "max_output_tokens": 2}),
        ("/v1/embeddings", {"input": "ab"}),
    ],
)
def test_what_the_router_adds_to_a_body_asks_for_nothing(
    replicas: Replicas, path: str, body: dict[str, Any]
) -> None:
    """It sends every parameter that SGLang knows; here what would be ignored is refused, unless it
    asks for nothing."""
    assert post(replicas.port, path, body)["usage"]["total_tokens"] > 0


def test_tenants_are_kept_apart(replicas: Replicas) -> None:
    text = (
        "a conversation that is longer than one block of the cache, which has sixty-four tokens. "
        * 4
    )

    def cached(path: str, salt: str, **body: Any) -> int:
        common = {"max_tokens": 1, "cache_salt": "a"} | body
        post(replicas.port, path, common)
        return cached_tokens(post(replicas.port, path, common | {"cache_salt": salt}))

    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        assert cached(path, "other", **body) == 0
        assert cached(path, "a", **body) > 0


def cached_part(port: int, seed: int) -> float:
    """Of the prompt tokens of conversations that run at once, turn by turn, the part that came from
    a cache."""
    random = Random(seed)

    def words(count: int) -> dict[str, Any]:
        return {"role": "user", "content": " ".join(f"{random.random():.6f}" for _ in range(count))}

    talks = [[words(6)] for _ in range(TALKS)]
    cached = prompt = 0
    with ThreadPoolExecutor(TALKS) as clients:
        for _ in range(TURNS):
            answers = [*clients.map(lambda talk: chat(port, talk, max_tokens=6), talks)]
            for talk, answer in zip(talks, answers, strict=True):
                cached += cached_tokens(answer)
                prompt += answer["usage"]["prompt_tokens"]
                talk += [answer["choices"][0]["message"], words(4)]
            # Or an even number of them would make a round-robin send each to where it was.
            Random(seed + len(talks[0])).shuffle(talks)
    return cached / prompt


def test_the_router_knows_the_model_by_its_name(replicas: Replicas) -> None:
    """From /server_info; without that its list says `unknown`."""
    status, body = get(replicas.port, "/v1/models")
    assert status == 200 and [one["id"] for one in body["data"]] == ["tiny"]


def test_more_prompt_tokens_come_from_a_cache_than_in_turns(
    replicas: Replicas, tmp_path: Path
) -> None:
    """Each conversation stays where its beginning is, and yet both replicas work."""
    before = [stats(port)["total_requests"] for port in replicas.ports]
    kept_together = cached_part(replicas.port, 1)
    answered = [
        stats(port)["total_requests"] - old
        for port, old in zip(replicas.ports, before, strict=True)
    ]
    assert sum(answered) == TALKS * TURNS and min(answered) >= TURNS
    urls = [f"http://127.0.0.1:{port}" for port in replicas.ports]
    with router_before(urls, tmp_path, replicas.router, "round_robin") as port:
        in_turns = cached_part(port, 2)
    log.info(
        "cached: %.3f kept together by %s, %.3f in turns; requests of each replica: %s",
        kept_together,
        replicas.router,
        in_turns,
        answered,
    )
    assert kept_together > in_turns * 1.1


class Client(threading.Thread):
    """Asks one thing after the other, each a new conversation, until it is told to stop."""

    def __init__(self, port: int, number: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._port, self._number, self._stop_asking = port, number, stop
        self.ended: list[str] = []
        """What became of each."""

    def run(self) -> None:
        random = Random(self._number)
        while not self._stop_asking.is_set():
            self.ended.append(
                self._ask(f"{random.random()} {self._number}", stream=self._number % 2 == 0)
            )

    def _ask(self, text: str, *, stream: bool) -> str:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 60,
            "stream": stream,
            "ignore_eos": True,
        }
        try:
            with closing(HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)) as connection:
                connection.request(
                    "POST",
                    "/v1/chat/completions",
                    json.dumps(body),
                    {"Content-Type": "application/json"},
                )
                with connection.getresponse() as response:
                    received = response.read()
        except IncompleteRead as cut:
            # The head of a stream goes out before its first token.
            begun = stream and b"[DONE]" not in cut.partial
            return CUT if begun else f"cut after {cut.partial!r}"
        except (OSError, HTTPException) as error:
            return f"{error!r}"
        complete = (
            b"data: [DONE]" in received if stream else b'"finish_reason":"length"' in received
        )
        return (
            "answered"
            if response.status == 200 and complete
            else f"{response.status}: {received[-200:]!r}"
        )


@contextmanager
def asking(port: int) -> Iterator[list[Client]]:
    """Clients, half of which stream, until the block is over."""
    stop = threading.Event()
    clients = [Client(port, number, stop) for number in range(8)]
    for client in clients:
        client.start()
    try:
        yield clients
    finally:
        stop.set()
        for client in clients:
            client.join(PATIENCE_S)


def is_busy(port: int) -> bool:
    return stats(port)["active_sequences"] > 0


def has_ended(process: psutil.Process) -> bool:
    return not alive(process)


def test_replicas_that_are_started_again_in_turn_lose_no_request(replicas: Replicas) -> None:
    """Each gets SIGTERM, drains, and comes back before the next one. With
    TROUPER_LONG_TESTS=1 both, also behind smg."""
    if replicas.router == "smg" and not LONG:
        pytest.skip("TROUPER_LONG_TESTS=1 is not set")
    with asking(replicas.port) as clients:
        for port in replicas.ports[: 2 if LONG else 1]:
            until(partial(is_busy, port))
            leaving = replicas.process(port)
            leaving.terminate()
            until(partial(has_ended, leaving))
            until(partial(ready, f"http://127.0.0.1:{port}"))
            until(replicas.all_are_seen)
    ends = [end for client in clients for end in client.ended]
    log.info("%d requests behind %s", len(ends), replicas.router)
    assert {*ends} == {"answered"}
    assert len(ends) > 16


def answers_again(replicas: Replicas, port: int) -> bool:
    chat(replicas.port, [{"role": "user", "content": f"{Random().random()}"}])
    return stats(port)["total_requests"] > 0


def test_a_replica_that_is_killed_costs_the_streams_that_it_had_begun_and_nothing_else(
    replicas: Replicas,
) -> None:
    """Whoever has heard nothing yet is asked again at the other one, which takes over. With
    TROUPER_LONG_TESTS=1 the first one comes back, too."""
    killed, other = replicas.ports
    with asking(replicas.port) as clients:
        until(lambda: all(map(is_busy, replicas.ports)))
        replicas.process(killed).kill()
        asked = stats(other)["total_requests"]
        until(lambda: stats(other)["total_requests"] > asked + 2 * len(clients))
    ends = [end for client in clients for end in client.ended]
    cut = ends.count(CUT)
    log.info("%d requests, %d cut", len(ends), cut)
    assert {*ends} <= {"answered", CUT}
    assert ends.count("answered") > 16
    assert cut <= len(clients) / 2
    if not LONG:
        return
    until(replicas.all_are_seen)
    with ThreadPoolExecutor(4) as at_once:
        until(lambda: any(at_once.map(lambda _: answers_again(replicas, killed), range(4))))
