"""A recorded session or a published trace is replayed against a server: hit rate, first-token
percentiles, errors.

just bench-replay benchmarks/traces/agents.jsonl
just bench-replay toolagent_trace.jsonl --requests 200 --lengths 0.05 --time 4

The file is JSON Lines, in Mooncake's format or with texts (`benchmarks/traces/format.py`). A
request comes at its time, whatever became of others (an open loop); a turn of a session comes not
before its time, nor before the one before it has been answered and its delay is over. The server is
one process with --model, or the embedded model, with flags after `--`; or the one at --url. On a
smaller machine --lengths scales prompts and answers, --time the time between requests.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import attrs
import httpx2
import trio

from benchmarks.load import quantile
from benchmarks.servers import embedded, trouper
from benchmarks.traces.format import BLOCK_TOKENS, TOKENS, Request, Scale, read, turns

PATIENCE_S = 3600.0
SHARES = (0.5, 0.9, 0.99)


@attrs.define
class Played:
    """What became of one request. Times in seconds; `first_s`: to its first text; `late_s`: sent so
    much after its time."""

    turn: int
    late_s: float = 0.0
    first_s: float | None = None
    whole_s: float = 0.0
    gaps_s: list[float] = attrs.field(factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    known_tokens: int | None = None
    error: str = ""


def body_of(request: Request, model: str | None) -> tuple[str, dict[str, Any]]:
    """Path and body of a streamed request of exactly the recorded length."""
    body: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    body |= {"stream_options": {"include_usage": True}} | ({"model": model} if model else {})
    if isinstance(request.prompt, list) and request.prompt and isinstance(request.prompt[0], dict):
        return "/v1/chat/completions", body | {"messages": request.prompt}
    return "/v1/completions", body | {"prompt": request.prompt}


async def ask(
    client: httpx2.AsyncClient, request: Request, played: Played, model: str | None
) -> None:
    """One request, to the end of its stream."""
    path, body = body_of(request, model)
    began, times = time.perf_counter(), list[float]()
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                problem = json.loads(await response.aread())
                played.error = str(problem.get("error", {}).get("code") or response.status_code)
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _take(json.loads(line.removeprefix("data: ")), played, times)
    except (httpx2.HTTPError, ValueError) as error:
        played.error = type(error).__name__
    played.whole_s = time.perf_counter() - began
    played.first_s = times[0] - began if times else None
    played.gaps_s = [after - before for before, after in pairwise(times)]


def _take(event: dict[str, Any], played: Played, times: list[float]) -> None:
    if "error" in event:
        played.error = str(event["error"].get("code"))
    if usage := event.get("usage"):
        played.prompt_tokens, played.output_tokens = (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
        played.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if any(_text(choice) for choice in event.get("choices", ())):
        times.append(time.perf_counter())


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta", {})
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""


async def replay(url: str, requests: Sequence[Request], model: str | None = None) -> list[Played]:
    """All requests at their times; the answers in the order in which they were sent."""
    played: list[Played] = []
    began = trio.current_time()
    limits = httpx2.Limits(max_connections=None)

    async def session(asked: Sequence[Request], client: httpx2.AsyncClient) -> None:
        for number, request in enumerate(asked):
            due = began + request.at_s
            # Its time is the earliest: the answer before it may take longer here than where it was
            # recorded.
            if number:
                due = max(due, trio.current_time() + request.delay_s)
            await trio.sleep_until(due)
            one = Played(number, trio.current_time() - due, known_tokens=request.known_tokens)
            played.append(one)
            await ask(client, request, one, model)

    async with (
        httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client,
        trio.open_nursery() as nursery,
    ):
        for asked in turns(requests):
            nursery.start_soon(session, asked, client)
    return played


def summary(played: Sequence[Played], seconds: float) -> dict[str, Any]:
    """Figures of all requests; percentiles of first tokens also for first turns and for later
    ones."""
    answered = [one for one in played if not one.error]
    prompts = sum(one.prompt_tokens for one in answered)
    known = [one for one in answered if one.known_tokens is not None]
    return {
        "requests": len(played),
        "errors": dict(Counter(one.error for one in played if one.error)),
        "seconds": round(seconds, 3),
        "sent late, p99 s": _quantiles([one.late_s for one in played])[-1],
        "prompt tokens": prompts,
        "output tokens": sum(one.output_tokens for one in answered),
        "output tokens a second": round(sum(one.output_tokens for one in answered) / seconds, 2),
        "hit rate": _part(sum(one.cached_tokens for one in answered), prompts),
        "hit rate, at most": _part(
            sum(one.known_tokens or 0 for one in known), sum(one.prompt_tokens for one in known)
        ),
        "first token, s": _quantiles([one.first_s for one in answered]),
        "first token of first turns, s": _quantiles(
            [one.first_s for one in answered if not one.turn]
        ),
        "first token of later turns, s": _quantiles([one.first_s for one in answered if one.turn]),
        "between texts, s": _quantiles([gap for one in answered for gap in one.gaps_s]),
        "whole answer, s": _quantiles([one.whole_s for one in answered]),
    }


def _part(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _quantiles(values: Sequence[float | None]) -> list[float | None]:
    """p50, p90 and p99."""
    known = [value for value in values if value is not None]
    return [round(quantile(known, share), 4) if known else None for share in SHARES]


@contextmanager
def server(options: argparse.Namespace) -> Iterator[str]:
    """The URL of the server that is asked; its cache begins empty, unless it is another's."""
    if options.url:
        parts = urlsplit(options.url)
        yield f"{parts.scheme}://{parts.netloc}"
        return
    with TemporaryDirectory() as disk:
        model = Path(options.model) if options.model else embedded()
        with trouper(model, *options.flags, disk=Path(disk)) as served:
            yield f"http://127.0.0.1:{served.port}"


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """What follows `--` are flags of the server that is started."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="just bench-replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--url", help="a server that runs; else one is started")
    parser.add_argument(
        "--model", help="directory of the server that is started, or the name to ask for at --url"
    )
    parser.add_argument("--requests", type=int, help="only so many")
    parser.add_argument(
        "--lengths",
        type=float,
        default=1.0,
        help="scale of prompts, blocks and answers that have lengths",
    )
    parser.add_argument("--time", type=float, default=1.0, help="how much faster requests come")
    parser.add_argument(
        "--block-tokens", type=int, default=BLOCK_TOKENS, help="tokens of one of the trace's blocks"
    )
    parser.add_argument("--out", type=Path, help="also as JSON")
    return parser.parse_args(arguments[:end], argparse.Namespace(flags=tuple(arguments[end + 1 :])))


def main() -> int:
    options = parsed(sys.argv[1:])
    requests = read(
        options.file,
        Scale(options.lengths, options.time, options.block_tokens, TOKENS),
        options.requests,
    )
    with server(options) as url:
        began = time.perf_counter()
        played = trio.run(replay, url, requests, options.model if options.url else None)
        found = summary(played, time.perf_counter() - began)
    for name, value in found.items():
        shown = (
            "   ".join("-" if one is None else f"{one:.3f}" for one in value)
            if isinstance(value, list)
            else value
        )
        print(f"{name:32} {shown}{'   (p50, p90, p99)' if isinstance(value, list) else ''}")
    if options.out:
        options.out.write_text(
            json.dumps({"file": str(options.file), "command": sys.argv[1:]} | found, indent=2)
            + "\n"
        )
    return int(bool(found["errors"]))


if __name__ == "__main__":
    sys.exit(main())
