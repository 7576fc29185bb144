"""`python -m tests.image_session [--turns 30]`: an agent's session with a screenshot a turn.

A real server with the model of examples/shapes. Each turn sends all earlier screenshots again, as
agents do. Printed for each turn: tokens of the prompt, those from the cache, and how many images
were decoded and encoded. Then the server starts again on the same directory and gets the last turn
once more. The exit status is 1 unless each image was decoded and encoded once, 99 % of the earlier
tokens came from memory each time, and after the restart none of the images was encoded again.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

import attrs

from tests.pictures import Picture, screenshot
from tests.vision_model.asking import CHAT, TextAnswer, read_answer, request
from tests.vision_model.files import DIRECTORY
from tests.vision_model.questions import IMAGE, Message, text_of

PATIENCE_S = 300.0
MIN_SHARE = 0.99
BLOCK = 32
QUESTION = "How many shapes do you see?"


@attrs.frozen
class Server:
    url: str

    @classmethod
    @contextmanager
    def running(cls, cache: Path, log: Path, also: Sequence[Path] = ()) -> Iterator[Server]:
        """A process, stopped at the end as a user stops it. `also`: further models."""
        command = [sys.executable, "-m", "trouper", "serve", "--port", "0", "--no-batches"]
        command += ["--model", str(DIRECTORY), "--ssd-cache-dir", str(cache)]
        command += ["--block-size", str(BLOCK), *map(str, also)]
        with log.open("a") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "is ready at" in line, f"it does not start: {log.read_text()[-3000:]}"
            yield cls("http://127.0.0.1:" + line.rsplit(":", 1)[1].split("/")[0])
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE_S)

    def ask(self, messages: Sequence[Message], pictures: Sequence[Picture]) -> TextAnswer:
        body = json.dumps(request(CHAT, messages, pictures)).encode()
        headers = {"Content-Type": "application/json"}
        return read_answer(CHAT, json.loads(self._read(Request(self.url + CHAT, body, headers))))

    def counts(self) -> tuple[int, int]:
        """Images that were decoded, and encoded."""
        text = self._read(Request(self.url + "/metrics")).decode()
        decoded, encoded = (
            re.search(rf"^trouper_images_{what}_total\S* (\S+)$", text, re.MULTILINE)
            for what in ("decoded", "encoded")
        )
        assert decoded and encoded, "the server has no metrics of images"
        return int(float(decoded[1])), int(float(encoded[1]))

    def wait_for_blocks(self, tokens: int) -> None:
        """Until so many tokens lie on the disk."""
        deadline = time.monotonic() + PATIENCE_S
        while self._stored_tokens() < tokens:
            assert time.monotonic() < deadline, "blocks are not written"
            time.sleep(0.1)

    def _stored_tokens(self) -> int:
        health: dict[str, Any] = json.loads(self._read(Request(self.url + "/health")))
        return int(health["directory"]["blocks"]) * BLOCK

    def _read(self, request: Request) -> bytes:
        with urlopen(request, timeout=PATIENCE_S) as response:
            return bytes(response.read())


def turn(number: int) -> list[Message]:
    """A screenshot as a tool's result, or as the user's."""
    if number % 2:
        return [{"role": "user", "content": [text_of(QUESTION), IMAGE]}]
    call = {"function": {"name": "screenshot", "arguments": {"page": number}}}
    return [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": [IMAGE]},
    ]


@attrs.define
class Session:
    width: int
    height: int
    messages: list[Message] = attrs.field(factory=list)
    pictures: list[Picture] = attrs.field(factory=list)
    faults: list[str] = attrs.field(factory=list)

    def play(self, server: Server, turns: int) -> None:
        earlier = 0
        for number in range(1, turns + 1):
            self.messages += turn(number)
            self.pictures.append(screenshot(number, self.width, self.height))
            answer = self._ask(server, f"turn {number}")
            self.messages.append({"role": "assistant", "content": answer.text})
            if answer.cached_tokens < MIN_SHARE * earlier:
                self.faults.append(f"turn {number}: {answer.cached_tokens} of {earlier} cached")
            if server.counts() != (number, number):
                self.faults.append(f"turn {number}: decoded, encoded: {server.counts()}")
            earlier = answer.prompt_tokens
        self.messages.pop()  # The last turn is asked again.
        server.wait_for_blocks(earlier - BLOCK)

    def play_again(self, server: Server) -> None:
        answer = self._ask(server, "again, after a restart")
        if server.counts()[1] > 1:
            self.faults.append(f"after a restart, decoded, encoded: {server.counts()}")
        if answer.cached_tokens < MIN_SHARE * answer.prompt_tokens:
            share = f"{answer.cached_tokens} of {answer.prompt_tokens}"
            self.faults.append(f"after a restart: {share} from disk")

    def _ask(self, server: Server, name: str) -> TextAnswer:
        began = time.monotonic()
        answer = server.ask(self.messages, self.pictures)
        seconds = time.monotonic() - began
        decoded, encoded = server.counts()
        print(
            f"{name}: {answer.prompt_tokens} tokens, {answer.cached_tokens} cached, "
            f"{decoded} decoded, {encoded} encoded, {seconds:.2f} s",
            flush=True,
        )
        return answer


def main(turns: int, width: int, height: int) -> int:
    session = Session(width, height)
    with TemporaryDirectory() as directory:
        cache, log = Path(directory) / "cache", Path(directory) / "log"
        with Server.running(cache, log) as server:
            session.play(server, turns)
        with Server.running(cache, log) as server:
            session.play_again(server)
    for fault in session.faults:
        print(f"fault: {fault}")
    return bool(session.faults)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=800)
    options = parser.parse_args()
    sys.exit(main(options.turns, options.width, options.height))
