"""Records `agents.jsonl`: scripted agents that read this project's pages, and a burst of short
chats, against two layers with the embedded model's vocabulary.

python -m benchmarks.traces.record benchmarks/traces/agents.jsonl

What is recorded is what the agents sent, when, with the model's own answers in the conversations,
so that a replay needs no agent.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import trio

from benchmarks.servers import embedded, tiny_copy, trouper

AGENTS, TURNS, BURST = 4, 5, 8
BURST_AT_S = 12.0
TOOLS = (
    "read_file(path, first_line, last_line)",
    "list_directory(path)",
    "search(text)",
    "edit_file(path, old, new)",
    "run_tests(names)",
)
SYSTEM = (
    "You are a careful engineer who works in a repository with tools, one call at a time. The "
    "tools are:\n"
    + "\n".join(
        f"- {tool}: answers as text; an error begins with the word error. Say what you look for "
        "before you call it."
        for tool in TOOLS
    )
)
PAGES = ("docs/cache.md", "docs/operating.md", "docs/actors.md", "docs/long-contexts.md")
LINES = 12
ANSWER = 48


class Recorder:
    """Sends chats, and notes them."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self.client, self.began, self.rows = client, trio.current_time(), list[dict[str, Any]]()

    async def ask(
        self, session: str, messages: list[dict[str, str]], max_tokens: int, delay_s: float = 0.0
    ) -> str:
        row = {"timestamp": round(1000 * (trio.current_time() - self.began)), "session_id": session}
        row |= {
            "delay": round(1000 * delay_s),
            "output_length": max_tokens,
            "messages": list(messages),
        }
        self.rows.append(row)
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        answer = await self.client.post("/v1/chat/completions", json=body)
        return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])

    async def agent(self, number: int) -> None:
        chance = Random(number)
        lines = _lines(PAGES[number % len(PAGES)])
        messages = [{"role": "system", "content": SYSTEM}]
        messages.append(
            {
                "role": "user",
                "content": f"Find out what {PAGES[number % len(PAGES)]} promises, and check it.",
            }
        )
        await trio.sleep(chance.uniform(0, 3))
        delay_s = 0.0
        for turn in range(TURNS):
            said = await self.ask(f"agent {number}", messages, ANSWER, delay_s)
            part = "\n".join(lines[turn * LINES : (turn + 1) * LINES])
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": f"read_file answers:\n{part}"},
            ]
            delay_s = chance.uniform(0.1, 1.5)  # As long as its tool takes.
            await trio.sleep(delay_s)

    async def burst(self) -> None:
        await trio.sleep(BURST_AT_S)
        async with trio.open_nursery() as nursery:
            for number in range(BURST):
                messages = [
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": f"Name tool {number % 5}."},
                ]
                nursery.start_soon(self.ask, f"chat {number}", messages, 16)


def _lines(page: str) -> list[str]:
    return Path(page).read_text().splitlines()


async def record(url: str) -> list[dict[str, Any]]:
    async with httpx2.AsyncClient(base_url=url, timeout=600) as client:
        recorder = Recorder(client)
        async with trio.open_nursery() as nursery:
            for number in range(AGENTS):
                nursery.start_soon(recorder.agent, number)
            nursery.start_soon(recorder.burst)
    return sorted(recorder.rows, key=lambda row: row["timestamp"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    target = parser.parse_args().file
    with (
        TemporaryDirectory() as disk,
        trouper(tiny_copy(embedded()), "--self-check", "off", disk=Path(disk)) as served,
    ):
        rows = trio.run(record, f"http://127.0.0.1:{served.port}")
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
