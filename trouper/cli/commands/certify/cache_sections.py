"""Sections about the cache: what it saves, its bound in memory, and what is left of it after kill -9."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import httpx2

from trouper.cli.commands.bench.load import random_words
from trouper.cli.commands.certify.answers import ProbeAnswer, ProbeQuestion, compared, questions
from trouper.cli.commands.certify.section_run import NotApplicable, SectionRun, until
from trouper.cli.commands.certify.server_runs import ServerFailed, ServerRun
from trouper.storage import cache_inspection

WRITTEN_S = 60.0
"""Longest wait until the cache directory rests."""
SAMPLE_S = 0.05
KILL_AFTER_S = (1.5, 0.6)
"""Seconds after which a server is killed, by round."""
LIMIT_ROWS = 3.0
"""The limit of the bounded run, in rows of the longest question."""
MAX_TRIES = 20
"""Number of times that the requests are sent until one of their rows was seen."""


def restoring(run: SectionRun) -> None:
    """Time to the first token of a long prompt: computed, from memory, and from disk after a restart."""
    _require_cache(run)
    words = 60 if run.quick else int(min(600 if run.on_cpu else 6000, run.model["context_tokens"] / 4))
    rounds = 1 if run.quick else 3
    prompts = [f"{index} {random_words(words)}" for index in range(rounds)]
    found: dict[str, list[tuple[float, ProbeAnswer]]] = {
        "computed": [],
        "from memory": [],
        "from disk": [],
        "a few tokens": [],
    }
    disk = ("--ssd-cache-dir", str(run.folder("restoring")))
    with run.starter.trouper(*disk) as server:
        _timed(server, random_words(words))
        for index, prompt in enumerate(prompts):
            run.show(0.1 + 0.4 * index / rounds, "a long prompt, cold and from memory")
            found["computed"].append(_timed(server, prompt))
            found["from memory"].append(_timed(server, prompt))
            found["a few tokens"].append(_timed(server, f"{index}"))
        run.show(0.5, "until all is written")
        _until_written(server)
    with run.starter.trouper(*disk) as server:
        _until_attached(server)
        _timed(server, random_words(words))
        for index, prompt in enumerate(prompts):
            run.show(0.7 + 0.3 * index / rounds, "the same from disk, after a restart")
            found["from disk"].append(_timed(server, prompt))
        read = server.health()["directory"]["read_bytes"]
    _report_restoring(run, found, read)


def _timed(server: ServerRun, prompt: str) -> tuple[float, ProbeAnswer]:
    """Return the seconds of an answer of one token."""
    body = ProbeQuestion(prompt, 1).body("restoring")
    began = time.perf_counter()
    answer = server.complete(body)
    return time.perf_counter() - began, ProbeAnswer.of(answer)


def _report_restoring(run: SectionRun, found: dict[str, list[tuple[float, ProbeAnswer]]], read_bytes: int) -> None:
    result = run.result
    answers = {name: [answer for _, answer in timed] for name, timed in found.items()}
    for name in ("from memory", "from disk"):
        comparison = compared(answers["computed"], answers[name])
        result.promise(
            f"an answer {name} is the computed one", comparison.within(run.near_tie), comparison.text(run.near_tie)
        )
    seconds = {name: median(s for s, _ in timed) for name, timed in found.items()}
    tokens = answers["computed"][0].prompt_tokens
    rows = []
    for name, value in seconds.items():
        cached = round(median(answer.cached_tokens for answer in answers[name]))
        rows.append((name, answers[name][0].prompt_tokens, cached, f"{1000 * value:.0f}"))
        result.figures[f"first_token_{name.replace(' ', '_')}_ms"] = round(1000 * value, 1)
    result.figures["prompt_tokens"] = tokens
    for name in ("computed", "from memory", "from disk"):
        beyond = seconds[name] - seconds["a few tokens"]
        if beyond > 0:
            result.figures[f"{name.replace(' ', '_')}_tokens_per_s"] = round(tokens / beyond)
    result.figures["read_from_disk_bytes"] = read_bytes
    result.table(("prompt", "tokens", "of them cached", "first token, ms"), rows)
    result.bars(
        f"First token of a prompt of {tokens} tokens", {name: 1000 * value for name, value in seconds.items()}, "ms"
    )
    result.notes.append(
        "rates are prompt tokens over the time beyond that of a prompt of a few tokens, through HTTP; there is none where it takes no longer"
    )


@attrs.define
class MemorySamples:
    """Bytes of rows and cached blocks, looked at while requests run."""

    seconds: list[float] = attrs.field(factory=list)
    held_bytes: list[int] = attrs.field(factory=list)
    limit_bytes: int = 0
    preemptions: int = 0

    def look(self, server: ServerRun, began: float) -> None:
        health = server.health()
        memory = health["memory"]
        self.seconds.append(time.monotonic() - began)
        self.held_bytes.append(memory["kv_row_bytes"] + health["cache"]["bytes"])
        self.limit_bytes, self.preemptions = memory["kv_limit_bytes"], memory["preemptions"]


@contextmanager
def _sampled(server: ServerRun) -> Iterator[MemorySamples]:
    samples, ended, began = MemorySamples(), threading.Event(), time.monotonic()

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            samples.look(server, began)

    with ThreadPoolExecutor(1) as pool:
        sampling = pool.submit(sample)
        try:
            yield samples
        finally:
            ended.set()
        sampling.result()
    samples.look(server, began)


def _each_alone(run: SectionRun, requests: Sequence[ProbeQuestion]) -> tuple[list[ProbeAnswer], int]:
    """Answers without a limit, and the bytes of the longest row. A small model may answer between two looks at them, so the requests are
    sent until one was seen."""
    with run.starter.trouper("--no-ssd", "--cache-memory", "0") as server:
        for _ in range(MAX_TRIES):
            alone = []
            with _sampled(server) as samples:
                for index, question in enumerate(requests):
                    run.show(0.1 + 0.4 * index / len(requests), "each request alone, without a limit")
                    alone.append(ProbeAnswer.of(server.complete(question.body(""))))
            if longest := max(samples.held_bytes):
                return alone, longest
    raise ServerFailed("its rows were gone at each look at /health, so no limit can be chosen")


def memory(run: SectionRun) -> None:
    """Requests that would hold several times a limit, on a server with that limit: its bytes, and the answers."""
    _require_cache(run)
    count, tokens = (4, 16) if run.quick else (8, 32) if run.on_cpu else (12, 128)
    requests = [attrs.evolve(question, prompt=f"{question.prompt} and so on") for question in questions(count, tokens)]
    alone, longest = _each_alone(run, requests)
    limit = int(LIMIT_ROWS * longest)
    run.show(0.6, "all at once, with a limit")
    with run.starter.trouper("--no-ssd", "--kv-memory", str(limit)) as server:
        with _sampled(server) as limited:
            together = [
                ProbeAnswer.of(body) for body in server.complete_all([question.body("") for question in requests])
            ]
        active = server.health()["memory"]["active_bytes"]
    held, comparison, result = max(limited.held_bytes), compared(alone, together), run.result
    result.promise(
        "rows and cached blocks stay within --kv-memory", held <= limit,
        f"at most {held / limit:.1%} of {limit / 1e6:.1f} MB, by {len(limited.held_bytes)} looks at /health",
    )  # fmt: skip
    result.promise(
        "answers under memory pressure are those of the row alone", comparison.within(run.near_tie),
        f"{comparison.text(run.near_tie)}; rows were preempted {limited.preemptions} times",
    )  # fmt: skip
    result.figures |= {
        "limit_bytes": limit,
        "held_bytes": held,
        "preemptions": limited.preemptions,
        "active_bytes": active,
    }
    megabytes = [(second, value / 1e6) for second, value in zip(limited.seconds, limited.held_bytes, strict=True)]
    bound = [(limited.seconds[0], limit / 1e6), (limited.seconds[-1], limit / 1e6)]
    result.lines("Bytes of rows and cached blocks", {"held": _thinned(megabytes), "limit": bound}, "seconds", "MB")


def _thinned(points: list[tuple[float, float]], count: int = 150) -> list[tuple[float, float]]:
    """Return at most about so many points, the highest of each stretch."""
    step = max(1, len(points) // count)
    return [max(points[index : index + step], key=lambda point: point[1]) for index in range(0, len(points), step)]


def killing(run: SectionRun) -> None:
    """A server with an SSD tier is killed while it answers and writes; the next one answers the same, and finds what was stored."""
    _require_cache(run)
    directory = run.folder("killing")
    count, rounds = (2, 1) if run.quick else (4, 2)
    known = [
        attrs.evolve(question, prompt=f"{question.prompt} {random_words(120)}") for question in questions(count, 8)
    ]
    flags = ("--ssd-cache-dir", str(directory))
    with run.starter.trouper(*flags) as server:
        run.show(0.05, "answers that are known, and stored")
        alone = [ProbeAnswer.of(server.complete(question.body("known"))) for question in known]
        _until_written(server)
    torn: list[str] = []
    for number in range(rounds):
        run.show((number + 0.3) / rounds, f"kill -9, {number + 1} of {rounds}")
        with run.starter.trouper(*flags) as server:
            _killed_at_work(server, number)
        torn += [
            Path(check.path).name
            for check in cache_inspection.verify(cache_inspection.runs(directory))
            if check.problem
        ]
    run.show(0.9, "the same answers again")
    with run.starter.trouper(*flags) as server:
        _until_attached(server)
        again = [ProbeAnswer.of(server.complete(question.body("known"))) for question in known]
        damaged = server.health()["directory"]["damaged"]
    comparison = compared(alone, again)
    cached, prompts = sum(answer.cached_tokens for answer in again), sum(answer.prompt_tokens for answer in again)
    run.result.promise(
        "answers after kill -9 and a restart are the ones before", comparison.within(run.near_tie),
        f"{comparison.text(run.near_tie)}; {rounds} kills; {cached} of {prompts} prompt tokens came from disk",
    )  # fmt: skip
    run.result.promise(
        "no file is torn after kill -9",
        not torn and not damaged,
        f"{len(torn)} torn files, {damaged} removed as damaged",
    )
    run.result.figures |= {"kills": rounds, "restored_tokens": cached, "prompt_tokens": prompts}


def _killed_at_work(server: ServerRun, number: int) -> None:
    _until_attached(server)
    bodies = [question.body(f"load {number}") for question in questions(6, 64)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        running = [pool.submit(server.complete, body) for body in bodies]
        time.sleep(KILL_AFTER_S[number % len(KILL_AFTER_S)])
        server.kill()
        for each in running:
            error: Any = each.exception()
            if error is not None and not isinstance(error, httpx2.HTTPError | ServerFailed):
                raise error


def _require_cache(run: SectionRun) -> None:
    if not run.model["cached"] or not run.model["token_bytes"]:
        raise NotApplicable("keys and values of this model are not cached")


def _until_attached(server: ServerRun) -> None:
    """Wait until the directory was looked through."""
    until(
        lambda: (found := server.health()["directory"])["attached"] and (found["inspected"] or not found["files"]),
        WRITTEN_S,
    )


def _until_written(server: ServerRun) -> None:
    """Wait until the written bytes rest. Nothing says that all is written; a server that writes does so within a second or two."""
    end, before, since = time.monotonic() + WRITTEN_S, -1, time.monotonic()
    while time.monotonic() < end:
        written = server.health()["directory"]["written_bytes"]
        if written != before:
            before, since = written, time.monotonic()
        elif time.monotonic() - since > 3.0:
            return
        time.sleep(0.1)
