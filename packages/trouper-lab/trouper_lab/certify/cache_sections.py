"""Sections about the cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import attrs

from trouper.protocol.kv import KvLayout
from trouper.storage import cache_inspection
from trouper_lab.certify.section_run import (
    Comparison,
    NotApplicable,
    NothingShown,
    ProbeAnswer,
    ProbeQuestion,
    SectionRun,
    compared,
    probe_question,
    questions,
)
from trouper_lab.certify.server_runs import ServerRun
from trouper_lab.load import random_words

POLL_S, REST_S = 0.05, 3.0
"""Interval of /health, and duration that counts as rest."""
KILL_AFTER_S = (1.5, 0.6)
"""By round."""


def restoring(run: SectionRun) -> None:
    """First token of a long prompt: computed, from memory, and from disk after a restart."""
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
            until_written(server)
        run.show(0.6, "the same from disk, after a restart")
        with run.starter.trouper(*disk) as server:
            until_attached(server)
            _timed(server, probe_question(server, rounds + 1, tokens, 1))
            for prompt in prompts:
                found["from disk"].append(_timed(server, prompt))
            run.result.figures["read_from_disk_bytes"] = server.health()["directory"]["read_bytes"]
    finally:
        _report_restoring(run, {name: timed for name, timed in found.items() if timed})


def _timed(server: ServerRun, question: ProbeQuestion) -> tuple[float, ProbeAnswer]:
    body = question.body("restoring")
    began = time.perf_counter()
    answer = server.complete(body)
    return time.perf_counter() - began, ProbeAnswer.of(answer)


def _report_restoring(run: SectionRun, found: dict[str, list[tuple[float, ProbeAnswer]]]) -> None:
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
    """Kill a server amid answers and writes; the next answers equally, from stored blocks."""
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
            until_attached(server)
            if not alone:
                run.show(0.05, "answers that are known, and stored")
                alone = [
                    ProbeAnswer.of(server.complete(question.body("known"))) for question in known
                ]
                until_written(server)
            run.show((number + 0.5) / (rounds + 1), f"kill -9, {number + 1} of {rounds}")
            bodies = [question.body(f"load {number}") for question in questions(6, 64)]
            server.kill_amid(server.complete, bodies, KILL_AFTER_S[number])
        torn += _torn_files(directory)
    run.show(rounds / (rounds + 1), "the same answers again, after kill -9")
    with run.starter.trouper(*flags) as server:
        until_attached(server)
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


def require_cache(run: SectionRun) -> None:
    if not run.model["cached"] or not run.model["token_bytes"]:
        raise NotApplicable("keys and values of this model are not cached")


def until_attached(server: ServerRun) -> None:
    while not (found := server.health()["directory"])["attached"] or (
        found["files"] and not found["inspected"]
    ):
        time.sleep(POLL_S)


def until_written(server: ServerRun) -> None:
    """Wait until written bytes rest: no last write is announced."""
    before, since = -1, time.monotonic()
    while time.monotonic() - since < REST_S:
        written = server.health()["directory"]["written_bytes"]
        if written != before:
            before, since = written, time.monotonic()
        time.sleep(POLL_S)


SAMPLE_S, MAX_POINTS = 0.05, 150
MAX_PROMPT_TOKENS, PROMPT_STEP = 4096, 16
MIN_ROOM = 32
"""A row enters only if a 64th of the limit stays free."""
MAX_TRIES = 3
"""Fast requests may not overlap."""
PREEMPTIONS = "vllm:num_preemptions_total"


@attrs.frozen(kw_only=True)
class GrowingRows:
    """Requests whose rows enter, but outgrow the limit by half of an answer."""

    count: int
    prompt_tokens: int
    answer_tokens: int
    limit_bytes: int


def growing_rows(
    kv: KvLayout, context_tokens: int, count: int, answer_tokens: int
) -> GrowingRows | None:
    """The shortest prompts whose rows outgrow a limit. None: rows hardly grow."""
    longest = min(MAX_PROMPT_TOKENS, context_tokens - answer_tokens)
    for tokens in range(PROMPT_STEP, longest + 1, PROMPT_STEP):
        begin = kv.batch_bytes([(tokens, tokens + 1)] * count)
        grown = tokens + answer_tokens // 2
        limit = begin + (kv.batch_bytes([(grown, grown + 1)] * count) - begin) // 4
        alone = kv.max_tokens(limit)
        if limit >= begin + begin // MIN_ROOM and (
            alone is None or alone >= tokens + answer_tokens
        ):
            return GrowingRows(
                count=count, prompt_tokens=tokens, answer_tokens=answer_tokens, limit_bytes=limit
            )
    return None


@attrs.define
class MemorySamples:
    seconds: list[float] = attrs.field(factory=list)
    held_bytes: list[int] = attrs.field(factory=list)

    def look(self, server: ServerRun, began: float) -> None:
        health = server.health()
        self.seconds.append(time.monotonic() - began)
        self.held_bytes.append(health["memory"]["kv_row_bytes"] + health["cache"]["bytes"])


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


def memory(run: SectionRun) -> None:
    """Requests beyond the server's limit: bytes, preempted rows, and answers."""
    require_cache(run)
    count, tokens = (3, 48) if run.quick else (4, 64)
    rows = growing_rows(run.kv, run.model["context_tokens"], count, tokens)
    if rows is None:
        raise NotApplicable(
            "rows of this model hold nearly the same bytes whatever their length: none outgrows a "
            "limit"
        )
    run.show(0.05, "start of a server with a limit")
    with run.starter.trouper("--no-ssd", "--kv-memory", str(rows.limit_bytes)) as server:
        requests = [
            probe_question(server, index, rows.prompt_tokens, rows.answer_tokens)
            for index in range(count)
        ]
        alone = []
        for index, question in enumerate(requests):
            run.show(0.2 + 0.4 * index / count, "each request alone")
            alone.append(ProbeAnswer.of(server.complete(question.body("alone", speculation="off"))))
        run.show(0.6, "all at once, with a limit that they outgrow")
        with _sampled(server) as samples:
            together = _until_preempted(server, requests)
        preempted = server.metric(PREEMPTIONS)
        found = server.health()["memory"]
    comparison = compared(alone * (len(together) // len(alone)), together)
    _report(run, rows, samples, comparison)
    run.result.figures |= {"preemptions": preempted, "active_bytes": found["active_bytes"]}
    text = f"{comparison.text(run.near_tie)}; rows were preempted {preempted} times"
    run.result.promise(
        "answers of rows that were preempted are those of the row alone",
        comparison.within(run.near_tie),
        text,
    )
    if not preempted:
        limits = (
            f"under --kv-memory {rows.limit_bytes}, where the server's own limit was "
            f"{found['kv_limit_bytes']} bytes"
        )
        raise NothingShown(f"no row was preempted {limits}, so nothing is shown of preemptions")


def _until_preempted(server: ServerRun, requests: list[ProbeQuestion]) -> list[ProbeAnswer]:
    """Send all at once, with new salts until a preemption."""
    answers: list[ProbeAnswer] = []
    for number in range(MAX_TRIES):
        bodies = [question.body(f"limit {number}", speculation="off") for question in requests]
        answers += [ProbeAnswer.of(body) for body in server.complete_all(bodies)]
        if server.metric(PREEMPTIONS):
            break
    return answers


def _report(
    run: SectionRun, rows: GrowingRows, samples: MemorySamples, comparison: Comparison
) -> None:
    result, held, limit = run.result, max(samples.held_bytes), rows.limit_bytes
    result.promise(
        "rows and cached blocks stay within --kv-memory",
        held <= limit,
        f"at most {held / limit:.1%} of {limit / 1e6:.1f} MB, by {len(samples.held_bytes)} looks "
        "at /health",
    )
    result.notes.append(
        f"{comparison.answers} requests of {rows.prompt_tokens} tokens, {rows.count} at a time, "
        f"with answers of {rows.answer_tokens} tokens: "
        "their rows fit the limit when they enter, and not half of an answer later"
    )
    result.figures |= {"limit_bytes": limit, "held_bytes": held}
    megabytes = [
        (second, value / 1e6)
        for second, value in zip(samples.seconds, samples.held_bytes, strict=True)
    ]
    bound = [(samples.seconds[0], limit / 1e6), (samples.seconds[-1], limit / 1e6)]
    result.lines(
        "Bytes of rows and cached blocks",
        {"held": _thinned(megabytes), "limit": bound},
        "seconds",
        "MB",
    )


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """About MAX_POINTS, the highest of each stretch."""
    step = max(1, len(points) // MAX_POINTS)
    return [
        max(points[index : index + step], key=lambda point: point[1])
        for index in range(0, len(points), step)
    ]
