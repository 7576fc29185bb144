"""Clients: streams over raw sockets, so that the load costs as little as possible on the machine it
shares."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Sequence

import trio

from trouper_lab import load as bench
from trouper_lab.load import Stream

WORDS = tuple(bench.VOCABULARY[:16])
"""So many, so that figures compare with earlier ones."""


def prompt(seed: int, words: int) -> str:
    """Different from its first word on, so that no prefix cache helps."""
    return (
        " ".join(WORDS[(seed * 7 + k * (seed + 3)) % len(WORDS)] + str(seed) for k in range(words))
        + " Tell a long story."
    )


def _request(text: str, max_tokens: int, more: dict[str, object]) -> bytes:
    body = json.dumps(
        {
            "prompt": text,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "logit_bias": None,
        }
        | {"stream_options": {"include_usage": True}}
        | more
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def stream(port: int, text: str, max_tokens: int, stream: Stream, **more: object) -> Stream:
    """One streamed completion; every `data:` line with text is one moment."""
    connection = await trio.open_tcp_stream("127.0.0.1", port)
    async with connection:
        stream.sent = time.perf_counter()
        await connection.send_all(_request(text, max_tokens, more))
        rest = b""
        while data := await connection.receive_some(65536):
            *lines, rest = (rest + data).split(b"\n")
            _take(lines, stream, time.perf_counter())
    return stream


def read_afterwards(
    port: int, texts: Sequence[str], max_tokens: int, **more: object
) -> list[Stream]:
    """Streamed completions at a time, without tasks: while they run, bytes and their times are
    kept, and JSON is read once all have ended. So a client takes little of the cores that it shares
    with the server."""
    streams, arrived = [Stream() for _ in texts], [list[tuple[float, bytes]]() for _ in texts]
    with selectors.DefaultSelector() as selector:
        for k, text in enumerate(texts):
            connection = socket.create_connection(("127.0.0.1", port))
            streams[k].sent = time.perf_counter()
            connection.sendall(_request(text, max_tokens, more))
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, (connection, arrived[k]))
        while selector.get_map():
            for key, _ in selector.select():
                connection, pieces = key.data
                if data := connection.recv(65536):
                    pieces.append((time.perf_counter(), data))
                else:
                    selector.unregister(connection)
                    connection.close()
    for one, pieces in zip(streams, arrived, strict=True):
        rest = b""
        for at, data in pieces:
            *lines, rest = (rest + data).split(b"\n")
            _take(lines, one, at)
    return streams


def _take(lines: list[bytes], stream: Stream, now: float) -> None:
    for line in lines:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RuntimeError(chunk["error"])
        if chunk.get("usage"):
            stream.tokens = chunk["usage"]["completion_tokens"]
            stream.prompt_tokens = chunk["usage"]["prompt_tokens"]
        if chunk["choices"] and chunk["choices"][0].get("text"):
            stream.times.append(now)


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def decode_rate(streams: list[Stream]) -> float:
    """Tokens a second while all streams decode: from the last first token to the first last one."""
    begin, end = max(s.times[0] for s in streams), min(s.times[-1] for s in streams)
    moments = sum(sum(begin < t <= end for t in s.times) * s.tokens / len(s.times) for s in streams)
    return moments / (end - begin) if end > begin else float("nan")


def throughput(streams: list[Stream]) -> float:
    """Tokens a second from the first request to the last token, prefill included."""
    return sum(s.tokens for s in streams) / (
        max(s.times[-1] for s in streams) - min(s.sent for s in streams)
    )
