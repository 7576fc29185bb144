"""`just bench-connections`: what clients cost that are connected and do nothing, and clients that
never read.

200 streams of a model of two layers, in turns: all of them read; and 20 of them never do, beside
1,000 idle connections. The rate is that of the streams that read in both, so a ratio of 1 means
that the others cost them nothing. The server's CPU time for a token, of its event loop and of all
threads, says the same, and varies less on a busy machine. The clients run in a process of their
own.
"""

from __future__ import annotations

import argparse
import json
import resource
import select
import socket
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console

from benchmarks import load, paired, servers
from benchmarks.edge import thread_cpu_s

Row = dict[str, Any]
SMALL_BUFFER = 4096
"""Bytes that the socket of a client that never reads takes, so that the server's side is full
soon."""


def connect(port: int, buffer: int | None = None) -> socket.socket:
    one = socket.socket()
    if buffer is not None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    one.connect(("127.0.0.1", port))
    return one


def request(text: str, max_tokens: int) -> bytes:
    body = json.dumps(  # As those that are read: a row that draws its tokens costs the engine more.
        {
            "prompt": text,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@attrs.frozen
class Case:
    streams: int
    """Number of streams, those that are never read among them."""
    unread: int
    idle: int
    tokens: int


def client(port: int, seed: int, case: Case) -> None:
    """The process of all clients: prints a line once the server has its idle connections, and the
    rate of the streams that are read in every case. It waits for a line before the streams, and at
    the end."""
    with ExitStack() as stack:
        for _ in range(case.idle):
            stack.enter_context(connect(port))
        with connect(port) as last:  # Connections are accepted in their order.
            last.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            while last.recv(4096):
                pass
        print("connected", flush=True)
        sys.stdin.readline()
        for k in range(case.unread):
            one = stack.enter_context(connect(port, SMALL_BUFFER))
            one.sendall(request(load.prompt(seed + 500 + k, 12), case.tokens))
        texts = [load.prompt(seed + k, 12) for k in range(case.streams - case.unread)]
        done = load.read_afterwards(port, texts, case.tokens, ignore_eos=True)
        print(
            json.dumps(
                {"tokens_per_s": load.decode_rate(done[: case.streams - case.streams // 10])}
            ),
            flush=True,
        )
        sys.stdin.readline()


def measure(server: servers.Server, seed: int, case: Case) -> Row:
    numbers = (server.port, seed, *attrs.astuple(case))
    command = [sys.executable, "-m", "benchmarks.connections", "--client", *map(str, numbers)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    most, before = server.resident_bytes(), thread_cpu_s(server.process.pid)
    process.stdin.write("go\n")
    process.stdin.flush()
    while not select.select([process.stdout], [], [], 0.2)[0]:
        most = max(most, server.resident_bytes())
    row = dict(json.loads(process.stdout.readline()), resident_mb=most / 1e6)
    after, produced = thread_cpu_s(server.process.pid), case.streams * case.tokens
    process.communicate()
    used = {
        thread: (seconds - before.get(thread, 0.0)) / produced * 1e6
        for thread, seconds in after.items()
    }
    return row | {
        "loop_us_per_token": used[server.process.pid],
        "cpu_us_per_token": sum(used.values()),
    }


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if sys.argv[1:2] == ["--client"]:
        port, seed, *numbers = map(int, sys.argv[2:])
        client(port, seed, Case(*numbers))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    console, unread = Console(width=160), chosen.streams // 10
    connections = str(chosen.idle + 2 * chosen.streams)
    flags = (
        "--completion-batch-size",
        str(chosen.streams),
        "--max-connections",
        connections,
        "--header-timeout-s",
        "600",
    )
    cases = {
        "all read": Case(chosen.streams, 0, 0, chosen.tokens),
        "idle and unread": Case(chosen.streams, unread, chosen.idle, chosen.tokens),
    }
    made: dict[str, list[Row]] = {name: [] for name in cases}
    with servers.trouper(
        servers.tiny_copy(servers.embedded()), "--speculation", "off", *flags
    ) as server:
        measure(server, 1, Case(chosen.streams, 0, 0, 50))
        for turn in range(chosen.rounds):
            for k, name in enumerate(sorted(cases, reverse=bool(turn % 2))):
                row = measure(server, 10_000 * turn + 1000 * k, cases[name])
                made[name].append(row)
                console.print(name, {key: round(value, 1) for key, value in row.items()})
    pairs = list(zip(made["idle and unread"], made["all read"], strict=True))
    for key in ("tokens_per_s", "loop_us_per_token", "cpu_us_per_token"):
        console.print(
            f"{key} beside idle and unread connections: "
            f"{paired.interval([b[key] / a[key] for b, a in pairs])}"
        )
    for name, rows in made.items():
        console.print(
            name, {key: round(statistics.median(row[key] for row in rows), 1) for key in rows[0]}
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
