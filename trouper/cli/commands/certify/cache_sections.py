"""Sections about the cache: what it saves, and what is left of it after kill -9."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import httpx2

from trouper.cli.commands.bench.load import random_words
from trouper.cli.commands.certify.answers import ProbeAnswer, ProbeQuestion, compared, questions
from trouper.cli.commands.certify.section_run import NotApplicable, SectionRun
from trouper.cli.commands.certify.server_runs import ServerFailed, ServerRun, probe_question
from trouper.storage import cache_inspection

POLL_S, REST_S = 0.05, 3.0
"""Interval of looks at /health; what has not changed for so long rests."""
KILL_AFTER_S = (1.5, 0.6)
"""Seconds after which a server is killed, by round."""


def restoring(run: SectionRun) -> None:
    """Time to the first token of a long prompt: computed, from memory, and from disk after a
    restart."""
    require_cache(run)
    tokens = min(80 if run.quick else 600 if run.on_cpu else 8000, run.model["context_tokens"] // 2)
    rounds = 1 if run.quick else 3
    found: dict[str, list[tuple[float, ProbeAnswer]]] = {
        "computed": [],
        "from memory": [],
        "from disk": [],
        "a few tokens": [],
    }
    disk = ("--ssd-cache-dir", str(run.folder("restoring")))
    try:
        with run.starter.trouper(*disk) as server:
            first, *prompts = [
                probe_question(server, index, tokens, 1) for index in range(rounds + 1)
            ]
            _timed(server, first)
            for index, prompt in enumerate(prompts):
                run.show(0.1 + 0.4 * index / rounds, "a long prompt, cold and from memory")
                found["computed"].append(_timed(server, prompt))
                found["from memory"].append(_timed(server, prompt))
                found["a few tokens"].append(_timed(server, ProbeQuestion(f"{index}", 1)))
            run.show(0.5, "until all is written")
            _until_written(server)
        run.show(0.6, "the same from disk, after a restart")
        with run.starter.trouper(*disk) as server:
            _until_attached(server)
            _timed(server, probe_question(server, rounds + 1, tokens, 1))
            for prompt in prompts:
                found["from disk"].append(_timed(server, prompt))
            run.result.figures["read_from_disk_bytes"] = server.health()["directory"]["read_bytes"]
    finally:
        _report_restoring(run, {name: timed for name, timed in found.items() if timed})


def _timed(server: ServerRun, question: ProbeQuestion) -> tuple[float, ProbeAnswer]:
    """Return the seconds of an answer of one token."""
    body = question.body("restoring")
    began = time.perf_counter()
    answer = server.complete(body)
    return time.perf_counter() - began, ProbeAnswer.of(answer)


def _report_restoring(run: SectionRun, found: dict[str, list[tuple[float, ProbeAnswer]]]) -> None:
    """Report what was reached."""
    result = run.result
    if "from memory" not in found:
        return
    answers = {name: [answer for _, answer in timed] for name, timed in found.items()}
    for name in [name for name in answers if name.startswith("from")]:
        comparison = compared(answers["computed"][: len(answers[name])], answers[name])
        result.promise(
            f"an answer {name} is the computed one",
            comparison.within(run.near_tie),
            comparison.text(run.near_tie),
        )
    seconds = {name: median(s for s, _ in timed) for name, timed in found.items()}
    tokens = answers["computed"][0].prompt_tokens
    rows = []
    for name, value in seconds.items():
        cached = round(median(answer.cached_tokens for answer in answers[name]))
        rows.append((name, answers[name][0].prompt_tokens, cached, f"{1000 * value:.0f}"))
        result.figures[f"first_token_{name.replace(' ', '_')}_ms"] = round(1000 * value, 1)
    result.figures["prompt_tokens"] = tokens
    for name in [name for name in seconds if name != "a few tokens"]:
        beyond = seconds[name] - seconds.get("a few tokens", 0.0)
        if beyond > 0:
            result.figures[f"{name.replace(' ', '_')}_tokens_per_s"] = round(tokens / beyond)
    result.table(("prompt", "tokens", "of them cached", "first token, ms"), rows)
    result.bars(
        f"First token of a prompt of {tokens} tokens",
        {name: 1000 * value for name, value in seconds.items()},
        "ms",
    )
    result.notes.append(
        "rates are prompt tokens over the time beyond that of a prompt of a few tokens, through "
        "HTTP; there is none where it takes no longer"
    )


def killing(run: SectionRun) -> None:
    """A server with an SSD tier is killed while it answers and writes; the next one answers the
    same, and finds what was stored."""
    require_cache(run)
    directory = run.folder("killing")
    count, rounds = (2, 1) if run.quick else (4, 2)
    known = [
        attrs.evolve(question, prompt=f"{question.prompt} {random_words(120)}")
        for question in questions(count, 8)
    ]
    flags = ("--ssd-cache-dir", str(directory))
    alone: list[ProbeAnswer] = []
    torn: list[str] = []
    for number in range(rounds):
        with run.starter.trouper(*flags) as server:
            _until_attached(server)
            if not alone:
                run.show(0.05, "answers that are known, and stored")
                alone = [
                    ProbeAnswer.of(server.complete(question.body("known"))) for question in known
                ]
                _until_written(server)
            run.show((number + 0.5) / (rounds + 1), f"kill -9, {number + 1} of {rounds}")
            _killed_at_work(server, number)
        torn += _torn_files(directory)
    run.show(rounds / (rounds + 1), "the same answers again, after kill -9")
    with run.starter.trouper(*flags) as server:
        _until_attached(server)
        again = [ProbeAnswer.of(server.complete(question.body("known"))) for question in known]
        damaged = server.health()["directory"]["damaged"]
    comparison = compared(alone, again)
    cached, prompts = (
        sum(answer.cached_tokens for answer in again),
        sum(answer.prompt_tokens for answer in again),
    )
    run.result.promise(
        "answers after kill -9 and a restart are the ones before",
        comparison.within(run.near_tie),
        f"{comparison.text(run.near_tie)}; {rounds} kills; {cached} of {prompts} prompt tokens "
        "came from disk",
    )
    run.result.promise(
        "no file is torn after kill -9",
        not torn and not damaged,
        f"{len(torn)} torn files, {damaged} removed as damaged",
    )
    run.result.figures |= {"kills": rounds, "restored_tokens": cached, "prompt_tokens": prompts}


def _torn_files(directory: Path) -> list[str]:
    checks = cache_inspection.verify(cache_inspection.runs(directory))
    return [Path(check.path).name for check in checks if check.problem]


def _killed_at_work(server: ServerRun, number: int) -> None:
    bodies = [question.body(f"load {number}") for question in questions(6, 64)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        running = [pool.submit(server.complete, body) for body in bodies]
        time.sleep(KILL_AFTER_S[number % len(KILL_AFTER_S)])
        server.kill()
        for each in running:
            error: Any = each.exception()
            if error is not None and not isinstance(error, httpx2.HTTPError | ServerFailed):
                raise error


def require_cache(run: SectionRun) -> None:
    if not run.model["cached"] or not run.model["token_bytes"]:
        raise NotApplicable("keys and values of this model are not cached")


def _until_attached(server: ServerRun) -> None:
    """Wait until the directory was looked through. A server announces its states only in
    /health."""
    while not (found := server.health()["directory"])["attached"] or (
        found["files"] and not found["inspected"]
    ):
        time.sleep(POLL_S)


def _until_written(server: ServerRun) -> None:
    """Wait until the written bytes rest. Nothing says that all is written; a server that writes
    does so within a second or two."""
    before, since = -1, time.monotonic()
    while time.monotonic() - since < REST_S:
        written = server.health()["directory"]["written_bytes"]
        if written != before:
            before, since = written, time.monotonic()
        time.sleep(POLL_S)
