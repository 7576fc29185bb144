"""`python -m tests.batch_kill KILLS REQUESTS [SEED] [FLAGS]`: a server that is killed again and
again while it runs a batch and answers stored responses.

SIGKILL comes at moments that the seed chooses, also while the server starts and while the batch
ends. After each kill the database is looked at: no answer that was there is lost or another one. At
the end each request has one answer, and none two, and each response whose end a client heard of is
stored as the client heard it. With `--real` the server is `trouper serve` with the embedded model,
else one with a fake engine, which is ready sooner.
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import httpx2
import openai
from openai.types import Batch

from tests.web.batch_server import STORED_RESPONSES
from tests.web.batching import ENDED, lines, request, state_copied, stored_answers, strict

PATIENCE_S = 180.0
START_S = 0.5
"""A kill comes within so much of the start of a process,"""
EARLY = 0.2
"""so often; else soon after so many answers as the seed says."""
ASKING, RESPONSES_A_LIFE = 3, 4
"""Clients that ask for responses at a time, and responses that end before a kill."""
RUN = "from trouper.cli import main; main()"


@attrs.define
class Tally:
    """What happened."""

    requests: int
    kills: int = 0
    early: int = 0
    """Of these, before the server was ready,"""
    idle: int = 0
    """and when the batch had ended already."""
    answers: int = 0
    twice: list[str] = attrs.field(factory=list)
    missing: list[str] = attrs.field(factory=list)
    changed: list[str] = attrs.field(factory=list)
    """Answers that were in the database before a kill and were lost or others after it."""
    errors: Counter[str] = attrs.field(factory=Counter)
    """Requests whose answer is an error, by its code."""
    at_kills: list[int] = attrs.field(factory=list)
    """Answers in the database when a kill came."""
    responses: int = 0
    """Responses whose end a client heard of."""
    lost_responses: list[str] = attrs.field(factory=list)
    """Those that are not stored, or otherwise than the client heard."""
    status: str = ""

    @property
    def good(self) -> bool:
        wrong = (self.twice, self.missing, self.changed, self.lost_responses)
        return self.status == "completed" and not any(wrong)

    def __str__(self) -> str:
        return (
            f"{self.kills} kills ({self.early} before the server was ready, {self.idle} after the "
            f"end) at {self.at_kills} answers; "
            f"{self.requests} requests, {self.answers} answered: {len(self.twice)} twice, "
            f"{len(self.missing)} not, "
            f"{len(self.changed)} changed by a kill; errors: {dict(self.errors)}; {self.status}; "
            f"{self.responses} responses, {len(self.lost_responses)} lost"
        )


class Server:
    """A process."""

    def __init__(self, directory: Path, rows: int, *, real: bool) -> None:
        own = ["-m", "tests.web.batch_server", str(directory), str(rows)]
        serve = [
            "serve",
            "--port",
            "0",
            "--no-ssd",
            "--batch-dir",
            str(directory),
            "--batch-rows",
            str(rows),
            "--stored-responses",
            str(STORED_RESPONSES),
        ]
        self._url: str | None = None
        self.process = subprocess.Popen(
            [sys.executable, *(["-c", RUN, *serve] if real else own)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ},
            start_new_session=True,
        )

    def url(self) -> str:
        """Wait until it serves; empty if it died before."""
        if self._url is None:
            assert self.process.stdout is not None
            line = self.process.stdout.readline().strip()
            said = "http" + line.partition("http")[2].split()[0] if line else ""
            self._url = said.rstrip("/").removesuffix("/v1")
        return self._url

    def died(self) -> None:
        """Wait until it has killed itself."""
        self.process.wait(PATIENCE_S)
        self.process.communicate()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Asking(threading.Thread):
    """A client that asks for stored responses, each of which continues the one before, streamed and
    not in turns, until its server dies."""

    def __init__(self, url: str, heard: dict[str, Any]) -> None:
        super().__init__()
        self._url, self._heard = f"{url}/v1", heard
        self.start()

    def run(self) -> None:
        previous: str | None = None
        with suppress(openai.APIError, httpx2.HTTPError), strict(self._url) as client:
            while True:
                create = partial(
                    client.responses.create,
                    input="hello",
                    max_output_tokens=4,
                    previous_response_id=previous,
                )
                response = create() if previous is None else last_of(create(stream=True))
                self._heard[response.id] = response.output
                previous = response.id if previous is None else None


def last_of(events: Iterable[Any]) -> Any:
    return [event for event in events if event.type.startswith("response.")][-1].response


class Campaign:
    """One batch."""

    def __init__(
        self, directory: Path, requests: list[dict[str, Any]], rows: int, *, real: bool
    ) -> None:
        self.directory, self._requests, self._rows, self._real = directory, requests, rows, real
        self.tally = Tally(len(requests))
        self._batch: Batch | None = None
        self._answers: dict[int, str] = {}
        self._heard: dict[str, Any] = {}

    def server(self) -> Server:
        return Server(self.directory, self._rows, real=self._real)

    def client(self, server: Server) -> openai.OpenAI:
        url = server.url()
        assert url, "it does not start"
        return strict(f"{url}/v1")

    def begin(self, server: Server) -> None:
        with self.client(server) as client:
            file = client.files.create(file=("in.jsonl", lines(self._requests)), purpose="batch")
            create = client.batches.create
            self._batch = create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )

    def kill_after(self, server: Server, seconds: float) -> None:
        """Kill it, and look at the database."""
        time.sleep(seconds)
        server.kill()
        self.tally.kills += 1
        found = self.logged()
        if found is None:
            self.tally.idle += 1
            return
        lost = [
            str(number) for number, answer in self._answers.items() if found.get(number) != answer
        ]
        self.tally.changed += lost
        self.tally.at_kills.append(len(found))
        self._answers = found

    def logged(self) -> dict[int, str] | None:
        """The answers in the database; None if the batch has ended."""
        assert self._batch is not None
        with state_copied(self.directory) as connection:
            select = "SELECT state FROM batches WHERE id = ?"
            [state] = connection.execute(select, (self._batch.id,)).fetchone()
        if json.loads(state)["status"] in ENDED:
            return None
        return stored_answers(self.directory, self._batch.id)

    def wait_for(self, server: Server, answers: int) -> None:
        """Ask for responses until some have ended, and there are so many answers or the batch has
        ended."""
        assert self._batch is not None
        with self.client(server) as client:
            enough = len(self._heard) + RESPONSES_A_LIFE
            for _ in range(ASKING):
                Asking(server.url(), self._heard)
            end = time.monotonic() + PATIENCE_S
            while time.monotonic() < end:
                if len(self._heard) < enough:
                    time.sleep(0.002)
                    continue
                batch = client.batches.retrieve(self._batch.id)
                counts = batch.request_counts
                assert counts is not None
                if batch.status in ENDED or counts.completed + counts.failed >= answers:
                    return

    def end(self, server: Server) -> None:
        """Let it finish, and look at the answers."""
        assert self._batch is not None
        with self.client(server) as client:
            end = time.monotonic() + PATIENCE_S
            while (batch := client.batches.retrieve(self._batch.id)).status not in ENDED:
                assert time.monotonic() < end, batch
                time.sleep(0.02)
            self.tally.status = batch.status
            self._check(client, batch)
            self._check_responses(client)
        server.kill()

    def _check_responses(self, client: openai.OpenAI) -> None:
        self.tally.responses = len(self._heard)
        for response_id, heard in self._heard.items():
            try:
                stored = client.responses.retrieve(response_id).output
            except openai.APIError:
                stored = []
            if stored != heard:
                self.tally.lost_responses.append(response_id)

    def _check(self, client: openai.OpenAI, batch: Batch) -> None:
        ids = [one for one in (batch.output_file_id, batch.error_file_id) if one is not None]
        found = [
            json.loads(line) for one in ids for line in client.files.content(one).text.splitlines()
        ]
        counts = Counter(line["custom_id"] for line in found)
        self.tally.answers = len(found)
        self.tally.twice = [custom_id for custom_id, count in counts.items() if count > 1]
        self.tally.missing = [
            line["custom_id"] for line in self._requests if line["custom_id"] not in counts
        ]
        self.tally.errors = Counter(
            line["error"]["code"] if line["error"] else str(line["response"]["status_code"])
            for line in found
            if line["error"] or line["response"]["status_code"] != 200
        )
        final = {line["custom_id"]: line["id"] for line in found}
        named = {number: line["custom_id"] for number, line in enumerate(self._requests)}
        self.tally.changed += [
            named[number]
            for number, one in self._answers.items()
            if final.get(named[number]) != one
        ]


def requests_of(count: int) -> list[dict[str, Any]]:
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return [
        request(f"r{n}", body | {"prompt": f"number {n}"}, "/v1/completions") for n in range(count)
    ]


def campaign(
    kills: int, count: int, seed: int, directory: Path, *, real: bool = False, quiet: bool = True
) -> Tally:
    """Kill the server of one batch so many times, spread over its requests."""
    dice, loop = Random(seed), Campaign(directory, requests_of(count), 8, real=real)
    server = loop.server()
    loop.begin(server)
    # How many answers there are at each kill, so that the kills are spread over the batch however
    # fast it is.
    targets = sorted(dice.sample(range(count), kills))
    for target in targets:
        if loop.tally.kills and dice.random() < EARLY:
            loop.kill_after(server, dice.uniform(0, START_S))
            loop.tally.early += 1
        else:
            loop.wait_for(server, target)
            loop.kill_after(server, dice.uniform(0, 0.02))
        if not quiet:
            print(loop.tally, flush=True)
        server = loop.server()
    loop.end(server)
    return loop.tally


def main(arguments: list[str]) -> int:
    kills, count, seed = (*map(int, [one for one in arguments if not one.startswith("-")]), 0)[:3]
    with TemporaryDirectory() as directory:
        tally = campaign(
            kills, count, seed, Path(directory), real="--real" in arguments, quiet=False
        )
    print(tally)
    return not tally.good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
