"""Section about speed: Trouper, mlx_lm.server and the bare loop, in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from statistics import median

import attrs
import httpx2
import trio

from trouper.cli.client import Where
from trouper.cli.streamed_answer import AnswerFailed
from trouper_lab.certify.certificate import Json
from trouper_lab.certify.processes import ProgramFailed
from trouper_lab.certify.section_run import MARGIN_S, SectionRun, first_line
from trouper_lab.certify.server_runs import ServerFailed, ServerRun
from trouper_lab.load import Question, Stream, decode_rate, percentiles, random_words, run_streams

TROUPER = "Trouper"
WORDS = 40
WARM_UP_TOKENS = 8
ALONGSIDE = 0.25
"""Part of memory for weights up to which two servers run at once."""
COPY_BYTES = 4_000_000_000
"""Largest model copied for mlx_lm.server on a CPU."""


@attrs.define
class ServerRates:
    decode: list[float] = attrs.field(factory=list)
    gaps: list[float] = attrs.field(factory=list)
    first: list[float] = attrs.field(factory=list)

    def add(self, streams: list[Stream]) -> None:
        if rate := decode_rate(streams):  # 0: one answer had ended before another began.
            self.decode.append(rate)
        self.gaps += [gap for stream in streams for gap in stream.gaps_s]
        self.first += [stream.ttft_s for stream in streams]


def throughput(run: SectionRun) -> None:
    counts, tokens, rounds = (
        ([1, 2], 64, 2) if run.quick else ([1, 4, 8], 32, 2) if run.on_cpu else ([1, 8, 32], 192, 3)
    )
    found: dict[str, dict[int, ServerRates]] = {TROUPER: {}, "mlx_lm.server": {}}
    bare = {row["streams"]: row for row in _bare(run, counts, tokens, rounds)}
    fits = run.model["weights_bytes"] <= ALONGSIDE * run.device["memory_bytes"]
    try:
        for names in [tuple(found)] if fits else [(name,) for name in found]:
            with ExitStack() as stack:
                servers: dict[str, ServerRun] = {}
                for name in names:
                    _start(run, stack, servers, name, max(counts))
                _measure(run, servers, found, counts=counts, tokens=tokens, rounds=rounds)
    finally:
        _report(run, found, {count: row["tokens_per_s"] for count, row in bare.items()}, tokens)


def _bare(run: SectionRun, counts: list[int], tokens: int, rounds: int) -> Iterator[Json]:
    run.show(0.05, "the bare loop")
    given = {"model": run.starter.model, "streams": counts, "steps": tokens, "rounds": rounds}
    yield from run.rows("bare", given, part=0.4, rest="the bare loop at further numbers of streams")


def _start(
    run: SectionRun, stack: ExitStack, servers: dict[str, ServerRun], name: str, streams: int
) -> None:
    if name == TROUPER:
        run.show(0.15, "start of Trouper")
        flags = ("--no-ssd", "--speculation", "off", "--completion-batch-size", str(streams))
        servers[name] = stack.enter_context(run.starter.trouper(*flags))
        return
    run.show(0.2, "start of mlx_lm.server")
    try:
        servers[name] = stack.enter_context(
            run.starter.mlx_lm(_for_mlx_lm(run), streams, 0.6 * run.left_s)
        )
    except (ServerFailed, ProgramFailed) as failed:
        run.starter.children.check()
        run.result.notes.append(f"without mlx_lm.server: {failed}")


def _for_mlx_lm(run: SectionRun) -> str:
    """On a CPU a copy in float32, as Trouper computes."""
    if not run.on_cpu:
        return run.starter.directory
    if run.model["weights_bytes"] > COPY_BYTES:
        raise ServerFailed("a copy of so large a model in float32 was not made")
    target = run.scratch / "float32"
    if not target.exists():
        for _ in run.rows("copy", {"model": run.starter.model, "target": str(target)}, part=0.5):
            pass
    if not (target / "config.json").exists():
        raise ServerFailed("the copy in float32 took too long")
    run.result.notes.append(
        "mlx_lm.server was given the same weights in float32, which is what Trouper computes with "
        "on a CPU"
    )
    return str(target)


def _measure(
    run: SectionRun,
    servers: dict[str, ServerRun],
    found: dict[str, dict[int, ServerRates]],
    *,
    counts: list[int],
    tokens: int,
    rounds: int,
) -> None:
    """Measure in turns. First answers (compilation) and rounds beyond the time are left out."""
    for name, server in [*servers.items()]:
        try:
            for streams in counts:
                run.show(0.3, f"{name}, {streams} at once, warming up")
                _stream(server, streams, WARM_UP_TOKENS)
        except* (httpx2.HTTPError, AnswerFailed) as failed:
            run.starter.children.check()
            if name == TROUPER:
                raise
            del servers[name]
            run.result.notes.append(
                f"without {name}, which did not answer: {_reason(server, failed)}"
            )
    longest_s = 0.0
    for number, streams in product(range(rounds), counts):
        if number and longest_s > run.left_s - MARGIN_S:
            run.not_reached.append(f"round {number + 1} of {rounds} at {streams} streams")
            continue
        began = time.monotonic()
        for name, server in servers.items():
            done = (number + counts.index(streams) / len(counts)) / rounds
            run.show(0.3 + 0.7 * done, f"{name}, {streams} at once, round {number + 1} of {rounds}")
            found[name].setdefault(streams, ServerRates()).add(_stream(server, streams, tokens))
        longest_s = max(longest_s, time.monotonic() - began)


def _reason(server: ServerRun, failed: BaseException) -> str:
    line = server.last_line()
    return first_line(failed) + (f"; it wrote: {line}" if line else "")


def _stream(server: ServerRun, streams: int, tokens: int) -> list[Stream]:
    load = [Question(random_words(WORDS) + ". Tell a long story.", tokens) for _ in range(streams)]
    return trio.run(run_streams, Where(server.url), load)


def _report(
    run: SectionRun, found: dict[str, dict[int, ServerRates]], bare: dict[int, float], tokens: int
) -> None:
    result, rows, rates = (
        run.result,
        [],
        {"bare loop": [(float(count), rate) for count, rate in bare.items()]},
    )
    for name, by_count in found.items():
        for count in [count for count, rate in by_count.items() if not rate.decode]:
            result.notes.append(
                f"{name}, {count} streams: no two answers were made at the same time"
            )
            del by_count[count]
        rates[name] = [(float(count), median(rate.decode)) for count, rate in by_count.items()]
        key = name.lower().replace(".", "_")
        for count, rate in by_count.items():
            gap, decode = percentiles(rate.gaps), median(rate.decode)
            part = f"{decode / bare[count]:.0%}" if bare.get(count) else ""
            rows.append(
                (
                    name,
                    count,
                    f"{decode:.1f}",
                    part,
                    *(f"{1000 * gap[p]:.1f}" for p in (50, 99, 100)),
                    f"{1000 * median(rate.first):.0f}",
                )
            )
            result.figures[f"{key}_{count}_streams_tokens_per_s"] = round(decode, 2)
            result.figures[f"{key}_{count}_streams_gap_p99_ms"] = round(1000 * gap[99], 2)
    for count, alone in bare.items():
        rows.append(("bare loop", count, f"{alone:.1f}", "100%", "", "", "", ""))
        result.figures[f"bare_{count}_streams_tokens_per_s"] = round(alone, 2)
    columns = (
        "subject",
        "streams",
        "tokens/s",
        "of the bare loop",
        "gap p50, ms",
        "p99",
        "longest",
        "first token, ms",
    )
    result.table(columns, rows)
    drawn = {name: points for name, points in rates.items() if points}
    result.lines("Tokens a second while all streams decode", drawn, "streams", "tokens/s")
    result.notes.append(
        f"prompts of {WORDS} words that share nothing, answers of {tokens} tokens, no drafts, "
        "medians of rounds"
    )
