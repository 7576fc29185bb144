"""Requests of every kind at two ranks and at one: all end, and answers are equal. `python -m
tests.ranks.campaign 500 [SEED [1 [1]]]`; with the first 1 rows draft whether it pays or not, with
the second the ranks are a pipeline.

Eight at a time: mixed lengths, stop strings, EOS, max_tokens, seeds, temperatures, penalties,
grammars, n, prompts that begin alike; some clients leave at a random moment, and some ask for more
than the server's time limits allow.
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import attrs
import trio

from tests.ranks.launching import environments
from tests.ranks.models import save
from tests.test_process import PATIENCE_S, get, until
from tests.web.serving import post
from trouper.system.ports import free_ports

AT_ONCE = 8
LIMIT_S = 8.0
"""For a request; half of it for the queue, and for a prompt."""
ENDLESS_TOKENS = 10**5
EXPECTED = {
    "answered",
    "left",
    "preparation_timeout",
    "queue_timeout",
    "first_token_timeout",
    "token_timeout",
    "request_timeout",
}
LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJ0123456789.,"


@attrs.frozen
class Wish:
    """What one client sends; `leaves_after_s`: then it is gone."""

    body: dict[str, Any]
    leaves_after_s: float | None = None


@attrs.frozen
class Heard:
    """The end of one answer."""

    said: str
    """As JSON, what must be equal; or an error's code; or that the client left."""

    @property
    def kind(self) -> str:
        return "answered" if self.said.startswith("[") else self.said


def wishes(count: int, seed: int) -> list[Wish]:
    chance = Random(seed)
    roots = ["".join(chance.choices(LETTERS, k=200)) for _ in range(4)]
    return [_wish(chance, roots) for _ in range(count)]


def _wish(chance: Random, roots: Sequence[str]) -> Wish:
    pick = chance.choice
    prompt = pick(roots)[: pick((0, 0, 30, 70, 150, 200))] + "".join(
        chance.choices(LETTERS, k=pick((1, 5, 40, 130)))
    )
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": pick((1, 3, 12, 40, 90)),
        "temperature": pick((0, 0, 0.5, 0.9)),
        "seed": chance.randrange(10**6),
        "ignore_eos": chance.random() < 0.5,
    }
    body |= pick(({}, {}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.1}))
    body |= pick(
        ({}, {}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.3}, {"logit_bias": {"40": 2}})
    )
    # So few tokens are left to it that it repeats itself, and drafts are right.
    if chance.random() < 0.4:
        body |= {"logit_bias": {str(token): 30 for token in chance.sample(range(300), 3)}}
    body |= pick(({}, {}, {}, {"stop": pick(("a", "e", "t", "X")) + pick(("", "", "b"))}))
    if chance.random() < 0.02:
        body |= {"max_tokens": ENDLESS_TOKENS, "ignore_eos": True, "stop": []}
    elif chance.random() < 0.06:
        body |= {"n": 2}
    elif chance.random() < 0.06:
        body |= {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "boolean"}},
            }
        }
    return Wish(body, chance.random() * 0.4 if chance.random() < 0.12 else None)


async def ask(port: int, wish: Wish) -> Heard:
    """On a connection of its own; who leaves closes it."""
    with trio.move_on_after(
        wish.leaves_after_s if wish.leaves_after_s is not None else float("inf")
    ):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(post("/v1/completions", wish.body, "Connection: close\r\n"))
            received = b""
            while data := await stream.receive_some():
                received += data
        answer = json.loads(received.partition(b"\r\n\r\n")[2])
        if "error" in answer:
            return Heard(str(answer["error"]["code"]))
        choices = [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]
        return Heard(json.dumps([choices, answer["usage"]["completion_tokens"]]))
    return Heard("left")


async def play(port: int, all_wishes: Sequence[Wish]) -> list[Heard]:
    """In order, eight at a time."""
    heard: dict[int, Heard] = {}
    todo = iter(enumerate(all_wishes))

    async def one_after_another() -> None:
        for number, wish in todo:
            heard[number] = await ask(port, wish)

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(one_after_another)
    return [heard[number] for number in range(len(all_wishes))]


@contextmanager
def served(
    model: Path, port: int, ranks: int, eager: bool, limit_s: float, *, flags: Sequence[str] = ()
) -> Iterator[None]:
    """Ends with a drain, and every rank with 0."""
    module = "tests.ranks.eager" if eager else "trouper"
    command = [
        sys.executable,
        "-m",
        module,
        "serve",
        "--model",
        str(model),
        "--port",
        str(port),
        "--no-ssd",
    ]
    command += ["--request-timeout-s", str(limit_s), "--completion-batch-size", str(AT_ONCE - 2)]
    command += ["--spec-ngram-min", "1", "--rank-timeout-s", "30"]  # A busy machine is no loss.
    command += flags
    command += ["--queue-timeout-s", str(limit_s / 2), "--first-token-timeout-s", str(limit_s / 2)]
    with tempfile.TemporaryFile("w+") as output, environments(ranks) as each:
        processes = [
            subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=output, text=True)
            for own in each
        ]
        try:
            assert processes[0].stdout is not None
            assert any("is ready at" in line for line in processes[0].stdout)
            yield
            assert _idle(port), get(port, "/health")[1]["cache_stats"]
            processes[0].send_signal(signal.SIGTERM)
            assert {process.wait(PATIENCE_S) for process in processes} == {0}, _tail(output)
        except BaseException:
            print(_tail(output))
            raise
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def _tail(output: Any) -> str:
    output.seek(0)
    return str(output.read()[-6000:])


def _idle(port: int) -> bool:
    until(
        lambda: (
            not (now := get(port, "/health")[1]["cache_stats"])["active_sequences"]
            + now["queued_requests"]
        )
    )
    return True


Difference = tuple[Wish, Heard, Heard]


@attrs.frozen
class Compared:
    """`differ`: answers that were whole at one rank and at two and are not equal, and errors that
    are no time limit."""

    differ: list[Difference]
    kinds: Counter[str]
    """What there was at two ranks."""
    drafted: int
    """Tokens that were accepted there, of those that were guessed."""


def compare(
    model: Path,
    count: int,
    seed: int,
    *,
    eager: bool,
    limit_s: float,
    flags: Sequence[str] = (),
) -> Compared:
    asked = wishes(count, seed)
    heard, drafted = [], 0
    for ranks in (1, 2):
        [port] = free_ports(1)
        with served(model, port, ranks, eager, limit_s, flags=flags):
            heard.append(trio.run(play, port, asked))
            drafted = get(port, "/health")[1]["speculation"]["accepted"]
    each = zip(asked, *heard, strict=True)
    differ = [(wish, one, two) for wish, one, two in each if _differ(one, two)]
    return Compared(differ, Counter(two.kind for two in heard[1]), drafted)


def _differ(one: Heard, two: Heard) -> bool:
    kinds = {one.kind, two.kind}
    return not kinds <= EXPECTED or (kinds == {"answered"} and one.said != two.said)


def main(count: int = 500, seed: int = 0, eager: int = 0, pipeline: int = 0) -> int:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        model = save("llama", Path(directory) / "llama")
        flags = ["--pipeline"] if pipeline else []
        told = compare(model, count, seed, eager=bool(eager), limit_s=LIMIT_S, flags=flags)
    print(", ".join(f"{number} {kind}" for kind, number in told.kinds.most_common()), end="; ")
    print(f"{told.drafted} drafted tokens accepted; {time.perf_counter() - began:.0f} s")
    for wish, one, two in told.differ[:5]:
        print(f"{wish}\n  one rank:  {one.said}\n  two ranks: {two.said}")
    print(f"seed {seed}: {len(told.differ)} differ from one rank's")
    return bool(told.differ)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
