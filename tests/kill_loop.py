"""`python -m tests.kill_loop N [SEED]`: a server that is killed N times answers right and finds
what it stored.

A real server with the embedded model, and one directory for its SSD tier. Each round asks the same
few prompts under a new `cache_salt`, so that there is always something to compute and to write
while the answers are known; SIGKILL comes at a moment that the seed chooses. Then the directory is
looked at, the server is started on it again, and asked the same with the same salt: what was stored
must be hit, the rest is computed, and every answer must be the known one.
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import attrs
import numpy as np

from trouper.storage import cache_inspection, run_reading
from trouper.storage.cache_directory import TAG, TAG_TEXT, TEMPORARY_SUFFIX
from trouper.storage.stored_blocks import RunInfo

RUN = "from trouper.cli import main; main()"
PATIENCE_S = 180.0
BLOCK = 16
BLOCKS = (3, 5, 8, 11, 18)
"""Full blocks of each prompt, which has two tokens more."""
TOKENS = 4
CERTAIN = 0.1
"""Between the best two log-probabilities, so that no rounding of a batch changes an answer."""
LOAD_S = 5.0
"""A kill comes within so much of the first request,"""
AFTER_A_STORE = 0.7
"""or, so often, within"""
STORED_S = 2.0
"""seconds after the first block of the load was reported stored: else a slow machine would have
little to find again."""
START_S = 4.0
"""... or within so much of the start,"""
EARLY = 0.2
"""so often."""
IN_A_WRITE = 0.5
"""So often it waits for the next write to begin, for at most"""
WRITE_S = 2.0
"""seconds."""
ROUNDS_A_DIRECTORY = 20
"""33 MB each."""
OLD_S = 7200.0
"""Temporary files as old as this have no writer."""
LEAST_SHARE = 0.95

T = TypeVar("T")
Answer = tuple[str, ...]
"""Tokens, as text."""


@attrs.frozen
class Question:
    prompt: tuple[int, ...]
    answer: Answer


@attrs.define
class Tally:
    """What happened."""

    kills: int = 0
    early: int = 0
    """Of these, before the server was ready."""
    checked: int = 0
    wrong: list[str] = attrs.field(factory=list)
    stored: int = 0
    """Blocks that /health reported before a kill, all kills together,"""
    found: int = 0
    """and of these after it."""
    fresh: int = 0
    """Tokens of prompts whose blocks the load that a kill ended had stored,"""
    hit: int = 0
    """and how many of these were not computed again for the same prompts."""
    temporary: int = 0
    """Files that a kill left half written."""
    torn: list[str] = attrs.field(factory=list)

    @property
    def share(self) -> float:
        return self.found / self.stored if self.stored else 1.0

    @property
    def hit_share(self) -> float:
        return self.hit / self.fresh if self.fresh else 1.0

    @property
    def good(self) -> bool:
        return not self.wrong and not self.torn and min(self.share, self.hit_share) >= LEAST_SHARE

    def __str__(self) -> str:
        return (
            f"{self.kills} kills ({self.early} before it was ready), {self.checked} answers "
            "checked, "
            f"{len(self.wrong)} wrong; {self.found} of {self.stored} stored blocks found "
            f"({self.share:.1%}), "
            f"{self.hit} of {self.fresh} tokens of the last load hit ({self.hit_share:.1%}); "
            f"{self.temporary} temporary files left and swept, {len(self.torn)} torn files"
        )


class Server:
    """A process, and what it says."""

    def __init__(self, log: Path, *flags: str) -> None:
        environment = {"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    RUN,
                    "serve",
                    "--port",
                    "0",
                    "--janitor-interval-s",
                    "0.5",
                    "--block-size",
                    str(BLOCK),
                    *flags,
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )
        self._log, self._port = log, 0

    def ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "is ready at" in line, f"it does not start: {self._log.read_text()[-3000:]}"
        self._port = int(line.rsplit(":", 1)[1].split("/")[0])

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def health(self) -> dict[str, Any]:
        return dict(self._call("GET", "/health"))

    def ask(self, prompt: Sequence[int], salt: str, top: int = 0) -> dict[str, Any]:
        """The log-probabilities of an answer, and how many tokens of the prompt were cached. Raises
        `OSError` or `HTTPException` if the server is killed meanwhile."""
        wish = {"prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        said = self._call("POST", "/v1/completions", wish | {"logprobs": top, "cache_salt": salt})
        cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        return {**said["choices"][0]["logprobs"], "cached_tokens": cached}

    def _call(self, method: str, path: str, body: object = None) -> Any:
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)) as connection:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            with connection.getresponse() as response:
                content = response.read()
            assert response.status == 200, content
            return json.loads(content)


@contextmanager
def serving(log: Path, *flags: str) -> Iterator[Server]:
    server = Server(log, *flags)
    try:
        server.ready()
        yield server
    finally:
        server.kill()


def questions(log: Path, dice: Random, lengths: Sequence[int] = BLOCKS) -> list[Question]:
    """Phrases that repeat, whose continuation the model is sure of, and what it says when nothing
    is kept anywhere."""
    found: list[Question] = []
    with serving(log, "--cache-memory", "0", "--no-ssd") as server:
        for count, blocks in enumerate(lengths, 1):
            while len(found) < count:
                phrase = dice.sample(range(1000, 20_000), dice.randrange(5, 12))
                prompt = tuple((phrase * BLOCK * blocks)[: BLOCK * blocks + 2])
                said = server.ask(prompt, "", top=2)
                if all(gap(step) > CERTAIN for step in said["top_logprobs"]):
                    found.append(Question(prompt, tuple(said["tokens"])))
    return found


def gap(step: dict[str, float]) -> float:
    """Two tokens may have the same text: then there is one entry, and nobody knows."""
    best = sorted(step.values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else 0.0


class Loop:
    """Rounds on one directory."""

    def __init__(self, place: Path, known: Sequence[Question], dice: Random, tally: Tally) -> None:
        self._directory, self._log = place / "cache", place / "log"
        self._known, self._dice, self._tally = known, dice, tally
        self._salts = 0
        """Rounds so far, each with a salt of its own."""
        self._before = 0
        """Blocks that were stored when the last kill came,"""
        self._settled = 0
        """and before that load."""
        self._known_keys: set[bytes] = set()
        """Of blocks that were there before that load, and of what they continue: a salt has a
        beginning of its own, and the last blocks of the one before may be written late."""
        self._temporary: list[Path] = []

    def round(self) -> None:
        """Up to a kill. What it left is looked at by the next one, or by `end`."""
        if self._dice.random() < EARLY:
            self._kill_early()
        with serving(self._log, "--ssd-cache-dir", str(self._directory)) as server:
            self._check(server)
            self._load(server)

    def end(self) -> None:
        with serving(self._log, "--ssd-cache-dir", str(self._directory)) as server:
            self._check(server)

    def _kill_early(self) -> None:
        server = Server(self._log, "--ssd-cache-dir", str(self._directory))
        time.sleep(self._dice.uniform(0, START_S))
        server.kill()
        self._tally.kills += 1
        self._tally.early += 1
        self._look_at_files()

    def _load(self, server: Server) -> None:
        """New work, and an end to it."""
        self._salts += 1
        order = self._dice.sample(self._known, len(self._known))
        self._known_keys = {
            key
            for run in self._runs()
            for key in (run.parent, *(piece.key for piece in run.blocks))
        }
        after_a_store, in_a_write = (
            self._dice.random() < AFTER_A_STORE,
            self._dice.random() < IN_A_WRITE,
        )
        kill_after_s = self._dice.uniform(0.2, STORED_S if after_a_store else LOAD_S)
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(self._compare, server, question) for question in order]
            if after_a_store:
                until(
                    lambda: server.health()["directory"],
                    lambda directory: directory["blocks"] > self._settled,
                )
            time.sleep(kill_after_s)
            self._before = server.health()["directory"]["blocks"]
            if in_a_write:
                wait_for_a_write(self._directory)
            server.kill()
            self._tally.kills += 1
            for one in asked:
                if not isinstance(one.exception(), OSError | HTTPException | None):
                    one.result()
        self._tally.stored += self._before
        self._look_at_files()

    def _check(self, server: Server) -> None:
        """After a kill, or on an empty directory."""
        found = until(lambda: server.health()["directory"], is_known)
        self._tally.found += min(found["blocks"], self._before)
        until(lambda: [path for path in self._temporary if path.exists()], lambda left: not left)
        if not self._salts:
            return
        # By the time of the answer the scheduler has heard what lies on disk.
        server.ask([1, 2], "")
        lie = self._stored_tokens()
        # One at a time: what reading costs beside other work is another question.
        for question in self._known:
            cached = self._compare(server, question)
            self._tally.fresh += lie[question]
            self._tally.hit += min(cached, lie[question])
        wanted = self._salts * sum(len(question.prompt) // BLOCK for question in self._known)
        stored = until(
            lambda: server.health()["directory"], lambda directory: directory["blocks"] >= wanted
        )
        self._settled = stored["blocks"]

    def _stored_tokens(self) -> dict[Question, int]:
        """How much of each prompt lies on disk since the last load, but for its last token, which
        is always computed."""
        following: dict[bytes, list[tuple[bytes, tuple[int, ...]]]] = {}
        keys = set[bytes]()
        for run in self._runs():
            for parent, piece in zip(
                [run.parent, *(one.key for one in run.blocks)], run.blocks, strict=False
            ):
                if piece.key not in self._known_keys:
                    keys.add(piece.key)
                    tokens = tuple(np.frombuffer(piece.tokens, ">i4").tolist())
                    following.setdefault(parent, []).append((piece.key, tokens))
        roots = following.keys() - keys - self._known_keys
        return {
            question: max(
                (shared(following, root, question.prompt[:-1]) for root in roots), default=0
            )
            for question in self._known
        }

    def _runs(self) -> Iterator[RunInfo]:
        for path, _ in cache_inspection.runs(self._directory) if self._directory.is_dir() else ():
            with run_reading.open_run(cache_inspection.DISK, path) as run:
                yield run.header.info

    def _compare(self, server: Server, question: Question) -> int:
        """Tokens of the prompt that were not computed."""
        answer = server.ask(question.prompt, f"round {self._salts}")
        said = tuple(answer["tokens"])
        self._tally.checked += 1
        if said != question.answer:
            self._tally.wrong.append(
                f"round {self._salts}: {len(question.prompt)} tokens: {said}, {question.answer}"
            )
        return int(answer["cached_tokens"])

    # -- the directory without a server ----------------------------------------------------------

    def _look_at_files(self) -> None:
        """Nothing is torn under its final name. What is half written looks old to the next server,
        which sweeps it."""
        if not self._directory.is_dir():
            return
        found = set(self._directory.rglob("*" + TEMPORARY_SUFFIX)).difference(self._temporary)
        self._tally.temporary += len(found)
        planted = self._directory / f"planted-{self._tally.kills}{TEMPORARY_SUFFIX}"
        planted.touch()
        self._temporary += [*found, planted]
        for path in self._temporary:
            if path.exists():
                os.utime(path, (time.time() - OLD_S,) * 2)
        self._tally.torn += map(str, torn(self._directory))


def wait_for_a_write(directory: Path) -> None:
    """One takes a few milliseconds, so that moments by chance hardly ever meet one. It may be that
    none comes."""
    end = time.monotonic() + WRITE_S
    while time.monotonic() < end and not any(directory.glob("*/*" + TEMPORARY_SUFFIX)):
        pass


def torn(directory: Path) -> Iterator[Path]:
    """Files that are not whole, under their final names."""
    tag = directory / TAG
    if tag.exists() and tag.read_bytes() != TAG_TEXT:
        yield tag
    if tag.exists():
        yield from (
            one.path
            for one in cache_inspection.verify(cache_inspection.runs(directory))
            if one.problem is not None
        )


def shared(
    following: dict[bytes, list[tuple[bytes, tuple[int, ...]]]], key: bytes, prompt: tuple[int, ...]
) -> int:
    """Tokens of a prompt that lie in blocks behind this one."""
    best = 0
    for child, tokens in following.get(key, ()):
        same = next(
            (n for n, (a, b) in enumerate(zip(tokens, prompt, strict=False)) if a != b),
            min(len(tokens), len(prompt)),
        )
        whole = same == len(tokens)
        best = max(best, same + (shared(following, child, prompt[same:]) if whole else 0))
    return best


def is_known(directory: dict[str, Any]) -> bool:
    """It was looked through, from end to end."""
    return bool(directory["attached"] and (directory["inspected"] or not directory["files"]))


def until(look: Callable[[], T], good: Callable[[T], bool]) -> T:
    """Look again and again. A process announces its states only in /health."""
    end = time.monotonic() + PATIENCE_S
    while not good(seen := look()):
        assert time.monotonic() < end, f"it did not happen in time: {seen}"
        time.sleep(0.02)
    return seen


def kill_loop(
    kills: int, seed: int, place: Path, lengths: Sequence[int] = BLOCKS, *, quiet: bool = True
) -> Tally:
    """At least so many kills. `lengths`: of the prompts, in blocks."""
    # What the rounds do depends on the seed alone, not on how many phrases the questions took.
    known, dice, tally = questions(place / "log", Random(seed), lengths), Random(seed), Tally()
    began, number = time.perf_counter(), 0
    while tally.kills < kills:
        with TemporaryDirectory(dir=place) as directory:
            loop = Loop(Path(directory), known, dice, tally)
            for _ in range(ROUNDS_A_DIRECTORY):
                if tally.kills >= kills:
                    break
                loop.round()
                number += 1
                if not quiet:
                    print(f"{time.perf_counter() - began:6.1f} s: {tally}", flush=True)
            loop.end()
    return tally


def main(kills: int = 10, seed: int = 0) -> int:
    with TemporaryDirectory() as place:
        tally = kill_loop(kills, seed, Path(place), quiet=False)
    print(tally)
    for what in (*tally.wrong, *tally.torn):
        print(what)
    return not tally.good


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
