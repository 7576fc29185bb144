"""`python -m tests.batch_kill KILLS REQUESTS [SEED] [FLAGS]`: a batch whose server is killed again
and again.

SIGKILL comes at moments that the seed chooses, also while the server starts and while the batch
ends. After each the log is looked at: no answer that was there is lost or another one. At the end
each request has one answer, and none two. With `--real` the server is `trouper serve` with the
embedded model, else one with a fake engine, which is ready sooner.
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import openai
from openai.types import Batch

from tests.web.batching import ENDED, lines, request, strict

PATIENCE_S = 180.0
START_S = 0.5
"""A kill comes within so much of the start of a process,"""
EARLY = 0.2
"""so often; else soon after so many answers as the seed says."""
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
    """Answers that were in the log before a kill and were lost or others after it."""
    errors: Counter[str] = attrs.field(factory=Counter)
    """Requests whose answer is an error, by its code."""
    at_kills: list[int] = attrs.field(factory=list)
    """Answers in the log when a kill came."""
    status: str = ""

    @property
    def good(self) -> bool:
        return self.status == "completed" and not (self.twice or self.missing or self.changed)

    def __str__(self) -> str:
        return (
            f"{self.kills} kills ({self.early} before the server was ready, {self.idle} after the "
            f"end) at {self.at_kills} answers; "
            f"{self.requests} requests, {self.answers} answered: {len(self.twice)} twice, "
            f"{len(self.missing)} not, "
            f"{len(self.changed)} changed by a kill; errors: {dict(self.errors)}; {self.status}"
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
        ]
        self._real = real
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
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        return (
            line
            if not self._real or not line
            else "http" + line.partition("http")[2].split()[0].rstrip("/")
        )

    def died(self) -> None:
        """Wait until it has killed itself."""
        self.process.wait(PATIENCE_S)
        self.process.communicate()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Campaign:
    """One batch."""

    def __init__(
        self, directory: Path, requests: list[dict[str, Any]], rows: int, *, real: bool
    ) -> None:
        self.directory, self._requests, self._rows, self._real = directory, requests, rows, real
        self.tally = Tally(len(requests))
        self._batch: Batch | None = None
        self._answers: dict[int, str] = {}

    def server(self) -> Server:
        return Server(self.directory, self._rows, real=self._real)

    def client(self, server: Server) -> openai.OpenAI:
        url = server.url()
        assert url, "it does not start"
        return strict(f"{url.removesuffix('/v1')}/v1")

    def begin(self, server: Server) -> None:
        with self.client(server) as client:
            file = client.files.create(file=("in.jsonl", lines(self._requests)), purpose="batch")
            create = client.batches.create
            self._batch = create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )

    def kill_after(self, server: Server, seconds: float) -> None:
        """Kill it, and look at the log."""
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
        """The answers in the log; None if it is not needed any more."""
        assert self._batch is not None
        log = self.directory / "batches" / self._batch.id / "log.jsonl"
        if not log.exists():
            return None
        found: dict[int, str] = {}
        for line in log.read_bytes().splitlines(keepends=True):
            record = json.loads(line) if line.endswith(b"\n") else {}
            if "answer" in record:
                assert record["answer"] not in found, "two answers in the log"
                found[record["answer"]] = record["output"]["id"]
        return found

    def count(self) -> int:
        """About how many answers there are; -1 if the batch has ended."""
        assert self._batch is not None
        log = self.directory / "batches" / self._batch.id / "log.jsonl"
        return log.read_bytes().count(b'{"answer":') if log.exists() else -1

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
        server.kill()

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
            if loop.tally.kills:
                assert server.url(), "it does not start"
            end = time.monotonic() + PATIENCE_S
            while 0 <= loop.count() < target and time.monotonic() < end:
                time.sleep(0.002)
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
