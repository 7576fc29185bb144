"""A group of ranks that is killed, and what it finds again: `python -m tests.ranks.restarts [RANKS]
[KILLS] [WORDS] [MODEL]`.

`trouper launch` starts it again each time. All ranks get SIGKILL while they have something to
write; then nothing on disk is torn, every prompt is answered as it was cold, and what all ranks had
written is not computed again.
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from random import Random
from typing import Any

import attrs
import psutil

from tests.kill_loop import torn, wait_for_a_write
from tests.ranks.losses import launched, ranks_of, ready
from tests.test_process import get, until
from trouper import Settings
from trouper.storage.cache_directory import TEMPORARY_SUFFIX
from trouper.system.ports import free_ports
from trouper_lab.load import VOCABULARY

PATIENCE_S = 300.0
PROMPTS = 3
LATE = 2 * PROMPTS
"""Ends of answers of the round before may be written late: so many blocks more are not this
round's."""
TOKENS = 4


@attrs.frozen
class Said:
    tokens: tuple[str, ...]
    prompt_tokens: int
    cached: int
    seconds: float


@attrs.define
class Tally:
    """What happened."""

    kills: int = 0
    temporary: int = 0
    """Files that were half written when the ranks were killed."""
    torn: list[str] = attrs.field(factory=list)
    checked: int = 0
    wrong: list[str] = attrs.field(factory=list)
    prompt_tokens: int = 0
    """Of prompts after a kill,"""
    cached: int = 0
    """and of these, those that were not computed again."""

    @property
    def good(self) -> bool:
        return not self.torn and not self.wrong


@attrs.define
class Group:
    """A launched server, and its directory."""

    port: int
    launcher: psutil.Process
    directory: Path
    tally: Tally = attrs.field(factory=Tally)

    def ask(self, prompt: str, salt: str = "") -> Said:
        body = {
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
        }
        began = time.perf_counter()
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as connection:
            connection.request(
                "POST",
                "/v1/completions",
                json.dumps(body | {"cache_salt": salt}),
                {"Content-Type": "application/json"},
            )
            with connection.getresponse() as response:
                told = json.loads(response.read())
        usage = told["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        tokens = tuple(told["choices"][0]["logprobs"]["tokens"])
        return Said(tokens, usage["prompt_tokens"], cached, time.perf_counter() - began)

    @property
    def health(self) -> dict[str, Any]:
        return dict(get(self.port, "/health")[1])

    def stored(self) -> int:
        """Blocks that the rank has that has fewest."""
        health = self.health
        others: list[int] = [
            rank["directory"]["blocks"] for rank in health["ranks"] if "directory" in rank
        ]
        return min([int(health["directory"]["blocks"]), *others])

    def kill(self) -> None:
        """All ranks at once."""
        ranks = ranks_of(self.launcher)
        for rank in ranks.values():
            rank.send_signal(signal.SIGKILL)
        psutil.wait_procs(ranks.values())
        self.tally.kills += 1
        self.tally.temporary += len(list(self.directory.rglob("*" + TEMPORARY_SUFFIX)))
        self.tally.torn += map(str, torn(self.directory))
        until(lambda: ready(self.port), PATIENCE_S)

    def kill_in_a_write(self, prompts: Sequence[str], salt: str) -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            before = self.stored()
            asked = [pool.submit(self.ask, prompt, salt) for prompt in prompts]
            until(lambda: self.stored() > before + LATE, PATIENCE_S)
            wait_for_a_write(self.directory)
            self.kill()
            for one in asked:
                with suppress(OSError, HTTPException, ValueError, KeyError):  # It was killed, too.
                    one.result()

    def check(self, prompts: Sequence[str], salt: str, wanted: Sequence[Said]) -> None:
        for prompt, cold in zip(prompts, wanted, strict=True):
            said = self.ask(prompt, salt)
            self.tally.checked += 1
            self.tally.prompt_tokens += said.prompt_tokens
            self.tally.cached += said.cached
            if said.tokens != cold.tokens:
                self.tally.wrong.append(f"{said} is not {cold}")


@contextmanager
def group(ranks: int, directory: Path, *flags: str) -> Iterator[Group]:
    """Ends with a drain."""
    [port] = free_ports(1)
    flags = ("--ssd-cache-dir", str(directory), "--ssd-keep-free", "0", *flags)
    with launched(port, *flags, ranks=ranks, patience_s=PATIENCE_S) as launcher:
        yield Group(port, launcher, directory)
        launcher.terminate()
        assert launcher.wait(PATIENCE_S) == 0


def texts(words: int, seed: int = 0) -> list[str]:
    chance = Random(seed)
    return [" ".join(chance.choices(VOCABULARY, k=words)) for _ in range(PROMPTS)]


def play(server: Group, kills: int, words: int) -> Tally:
    """Cold answers first; then each time new work, a kill in the middle of it, and the same work
    again."""
    prompts = texts(words)
    wanted = [server.ask(prompt, "cold") for prompt in prompts]
    blocks = sum(said.prompt_tokens // Settings().block_size for said in wanted)
    assert blocks // PROMPTS > LATE, "prompts are too short to tell"
    for number in range(kills):
        until(lambda settled=(number + 1) * blocks: server.stored() >= settled, PATIENCE_S)  # type: ignore[misc]
        server.kill_in_a_write(prompts, f"round {number}")
        server.check(prompts, f"round {number}", wanted)
    return server.tally


def figures(server: Group, words: int) -> Iterator[str]:
    """One prompt: cold, from memory, and from the disks of all ranks after all were killed."""
    [prompt, *_] = texts(words, seed=1)
    for when in ("cold", "again", "after a restart of all ranks"):
        said = server.ask(prompt)
        yield (
            f"{when}: {said.prompt_tokens} tokens, {said.cached} of them cached, "
            f"{said.seconds:.2f} s"
        )
        if when == "again":
            blocks = said.prompt_tokens // Settings().block_size
            until(lambda blocks=blocks: server.stored() >= blocks, PATIENCE_S)  # type: ignore[misc]
            server.kill()
    cache = server.health["cache"]
    yield (
        f"/health: hits_disk {cache['hits_disk']}, hits_block {cache['hits_block']}, misses "
        f"{cache['misses']}"
    )


def main(ranks: str = "3", kills: str = "3", words: str = "600", model: str = "") -> int:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "blocks"
        with group(int(ranks), directory, *(("--model", model) if model else ())) as server:
            for line in figures(server, int(words)):
                print(line, flush=True)
            tally = play(server, int(kills), int(words))
    print(tally)
    return not tally.good


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
