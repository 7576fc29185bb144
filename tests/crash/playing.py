"""A real server whose model crashes, its streams, and the clients that make it crash: `openai`,
with its default retries."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from threading import Event, Thread
from typing import Any

import attrs
import numpy as np
import openai

from tests.crash.model import MARK
from tests.test_process import PATIENCE_S, get
from trouper.system.ports import free_ports

STREAMS, CLIENTS = 16, 10
TOKENS = 120
BEGUN = 5
"""Chunks of each stream before the others come."""
DEADLY = [10, *MARK, 20]


@attrs.frozen
class Outcome:
    """What was met."""

    wanted: tuple[str, ...]
    """Of the streams on a server that nothing disturbs,"""
    texts: tuple[str, ...]
    """and beside the others."""
    errors: tuple[tuple[int | None, str | None], ...]
    """(status, code) of each of the others; no status where the response had begun."""
    recovery: dict[str, int]
    same_process: bool
    not_ready_s: float
    """The longest time."""
    gap_s: float
    """The longest of any stream."""


@contextmanager
def crashing(model: Path, fault: str, *flags: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """(its port, the process)"""
    [port] = free_ports(1)
    command = [
        sys.executable,
        "-m",
        "tests.crash.model",
        fault,
        "serve",
        "--model",
        str(model),
        "--port",
        str(port),
    ]
    process = subprocess.Popen(
        [
            *command,
            "--no-ssd",
            "--self-check",
            "off",
            "--log-level",
            "error",
            "--served-model-name",
            "default",
            # A busy machine would cut the prompt of six tokens, and its mark, into two chunks.
            "--decode-stall-ms",
            "10000",
            *flags,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert "is ready at" in process.stdout.readline(), process.stderr and process.stderr.read()
        yield port, process
    finally:
        process.kill()
        process.communicate()


def client_of(port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=PATIENCE_S)


def body(place: int) -> dict[str, Any]:
    """A stream's own prompt; every other draws, by a seed beyond 32 bits."""
    prompt = np.random.RandomState(place).randint(1, 300, 5 + 7 * place).tolist()
    sampling: dict[str, Any] = (
        {"temperature": 0} if place % 2 else {"temperature": 0.7, "seed": 2**35 + place}
    )
    return sampling | {"prompt": prompt, "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}


@attrs.define
class Reader:
    """One stream."""

    text: str = ""
    gap_s: float = 0.0
    begun: Event = attrs.field(factory=Event)

    def read(self, client: openai.OpenAI, place: int) -> None:
        chunks, at = 0, time.monotonic()
        for chunk in client.completions.create(model="default", stream=True, **body(place)):
            now = time.monotonic()
            if chunks:
                self.gap_s = max(self.gap_s, now - at)
            at, chunks = now, chunks + 1
            if chunk.choices:
                self.text += chunk.choices[0].text
            if chunks == BEGUN:
                self.begun.set()


def ask_deadly(client: openai.OpenAI, *, stream: bool) -> tuple[int | None, str | None]:
    """What the client raised in the end."""
    try:
        answer: Any = client.completions.create(
            model="default", prompt=DEADLY, max_tokens=20, stream=stream
        )
        for _ in answer if stream else ():
            pass
    except openai.APIError as error:
        return getattr(error, "status_code", None), error.code
    return 200, None


class Readiness(Thread):
    """Polls until it is told to stop."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port, self.over = port, Event()
        self.longest_s = 0.0
        self.start()

    def run(self) -> None:
        since: float | None = None
        while not self.over.wait(0.01):
            now = time.monotonic()
            if self._ready():
                since = None
            else:
                since = now if since is None else since
                self.longest_s = max(self.longest_s, time.monotonic() - since)

    def _ready(self) -> bool:
        try:
            return get(self._port, "/readyz")[0] == 200
        except (OSError, HTTPException, json.JSONDecodeError):
            return False


def read_all(
    client: openai.OpenAI, pool: ThreadPoolExecutor, streams: int
) -> tuple[list[Reader], list[Future[None]]]:
    readers = [Reader() for _ in range(streams)]
    return readers, [
        pool.submit(reader.read, client, place) for place, reader in enumerate(readers)
    ]


def settled(futures: Sequence[Future[Any]]) -> list[Any]:
    return [future.result(PATIENCE_S) for future in futures]


def play(model: Path, streams: int = STREAMS, clients: int = CLIENTS) -> Outcome:
    """Streams undisturbed, then the same beside clients with the prompt that the model does not
    bear."""
    with (
        crashing(model, "a_prompt") as (port, process),
        client_of(port) as client,
        ThreadPoolExecutor(streams + clients) as pool,
    ):
        wanted, futures = read_all(client, pool, streams)
        settled(futures)
        readiness = Readiness(port)
        readers, futures = read_all(client, pool, streams)
        for reader in readers:
            assert reader.begun.wait(PATIENCE_S)
        others = [
            pool.submit(ask_deadly, client, stream=place % 2 == 1) for place in range(clients)
        ]
        errors = settled(others)
        settled(futures)
        errors.append(ask_deadly(client, stream=False))
        readiness.over.set()
        readiness.join()
        return Outcome(
            tuple(reader.text for reader in wanted),
            tuple(reader.text for reader in readers),
            tuple(errors),
            get(port, "/health")[1]["recovery"],
            process.poll() is None,
            readiness.longest_s,
            max(reader.gap_s for reader in readers),
        )
