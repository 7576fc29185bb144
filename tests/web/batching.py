"""The official client in strict mode, and what a client of files and batches does, for tests."""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai
from openai.types import Batch

from tests.web.serving import PATIENCE_S
from trouper.web.serving.state_database import NAME

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def request(custom_id: str, body: dict[str, Any] | None = None, url: str = CHAT) -> dict[str, Any]:
    """A line of an input file."""
    body = (
        {"messages": [{"role": "user", "content": custom_id}], "max_tokens": 3}
        if body is None
        else body
    )
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def lines(requests: Iterable[Any]) -> bytes:
    return b"".join(
        one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in requests
    )


def strict(base_url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=base_url,
        api_key=key,
        max_retries=0,
        timeout=PATIENCE_S,
        _strict_response_validation=True,
    )


def started(
    client: openai.OpenAI, requests: Sequence[Any], endpoint: Any = CHAT, **more: Any
) -> Batch:
    file = client.files.create(file=("in.jsonl", lines(requests)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, **{"completion_window": "24h"} | more
    )


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    """Look until it has ended."""
    end = time.monotonic() + PATIENCE_S
    while (seen := client.batches.retrieve(batch.id)).status not in ENDED:
        assert time.monotonic() < end, seen
        time.sleep(0.01)
    return seen


def output(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of a file by `custom_id`, each there once."""
    if file_id is None:
        return {}
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    by_id = {line["custom_id"]: line for line in found}
    assert len(by_id) == len(found), "an answer is there twice"
    return by_id


@contextmanager
def state_copied(directory: Path) -> Iterator[sqlite3.Connection]:
    """A copy of the database of a server that has ended, however: the next one finds the original
    as it was left."""
    with TemporaryDirectory() as copies:
        for path in directory.glob(f"{NAME}*"):
            shutil.copy(path, copies)
        with closing(sqlite3.connect(Path(copies) / NAME)) as connection:
            yield connection


def stored_answers(directory: Path, batch_id: str) -> dict[int, str]:
    """The answers of a batch that has not ended: number of the request, and id of its line."""
    with state_copied(directory) as connection:
        rows = connection.execute(
            "SELECT number, output FROM lines WHERE batch = ? AND output IS NOT NULL", (batch_id,)
        )
        return {number: json.loads(answer)["id"] for number, answer in rows}
