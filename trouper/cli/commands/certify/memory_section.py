"""Section about the bound of memory: requests that all fit when they enter, and outgrow the limit
while they are answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import attrs

from trouper.cli.commands.certify.answers import Comparison, ProbeAnswer, ProbeQuestion, compared
from trouper.cli.commands.certify.cache_sections import require_cache
from trouper.cli.commands.certify.section_run import NotApplicable, NothingShown, SectionRun
from trouper.cli.commands.certify.server_runs import ServerRun, probe_question
from trouper.protocol.kv import KvLayout

SAMPLE_S = 0.05
MAX_PROMPT_TOKENS, PROMPT_STEP = 4096, 16
MIN_ROOM = 32
"""The limit exceeds what the rows hold when they enter by this part at least: a row enters only if
a 64th of the limit stays free."""
MAX_TRIES = 3
"""Number of times that the requests are sent until a row was preempted: on a fast device one may
end before another arrives."""
PREEMPTIONS = "vllm:num_preemptions_total"


@attrs.frozen(kw_only=True)
class GrowingRows:
    """Requests of one length: all of their rows fit the limit when they enter, and not half of an
    answer later."""

    count: int
    prompt_tokens: int
    answer_tokens: int
    limit_bytes: int


def growing_rows(
    kv: KvLayout, context_tokens: int, count: int, answer_tokens: int
) -> GrowingRows | None:
    """Find the shortest prompts whose rows outgrow a limit. Buffers of rows grow in steps, so most
    lengths would not do. None: rows of this model hold nearly the same bytes whatever their
    length."""
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
    """Bytes of rows and cached blocks, looked at while requests run."""

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
    """Requests that outgrow a limit, on a server with that limit: its bytes, preempted rows, and
    the answers."""
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
        preempted = _preemptions(server)
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
    """Send all at once, again with another salt if no row was preempted. Drafts would make bytes of
    rows depend on what they guess."""
    answers: list[ProbeAnswer] = []
    for number in range(MAX_TRIES):
        bodies = [question.body(f"limit {number}", speculation="off") for question in requests]
        answers += [ProbeAnswer.of(body) for body in server.complete_all(bodies)]
        if _preemptions(server):
            break
    return answers


def _preemptions(server: ServerRun) -> int:
    """Number of rows that were preempted since the start of the server, as Prometheus would read
    it."""
    lines = [line for line in server.text("/metrics").splitlines() if line.startswith(PREEMPTIONS)]
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


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


def _thinned(points: list[tuple[float, float]], count: int = 150) -> list[tuple[float, float]]:
    """Return at most about so many points, the highest of each stretch."""
    step = max(1, len(points) // count)
    return [
        max(points[index : index + step], key=lambda point: point[1])
        for index in range(0, len(points), step)
    ]
