"""Traces as JSON Lines: one request a line, with when it came and what its prompt shares with
others.

Read are

- Mooncake's traces (`timestamp` in ms, `input_length`, `output_length`, `hash_ids` of blocks of 512
  tokens; github.com/kvcache-ai/Mooncake, FAST25-release/traces), with the fields that AIPerf and
  Dynamo add: `session_id`, whose rows are turns of which each waits for the one before, and
  `delay`, ms between the end of a turn and the next. `input_tokens`, `output_tokens`,
  `created_time` and `delay_ms` are other names.
- Lines with a text: `prompt` as in vLLM's `--dataset-name custom`, `text_input`, or `messages`,
  which are a whole conversation. The other fields are as above; without `timestamp` requests come
  at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import attrs

BLOCK_TOKENS = 512
"""Tokens of a block of Mooncake's traces."""
NAMES = {
    "timestamp": ("timestamp", "created_time"),
    "input": ("input_length", "input_tokens"),
    "output": ("output_length", "output_tokens", "max_tokens"),
    "delay": ("delay", "delay_ms"),
    "text": ("prompt", "text_input", "input_text"),
}
LENGTH = 64
"""Output tokens of a line that names none."""
TOKENS = (1000, 20_000)
"""Ids that prompts of lengths are made of: ordinary tokens of most vocabularies."""


@attrs.frozen
class Request:
    """One request. `prompt` is a text, token ids or messages; `session` None: it is alone. Times
    are in seconds."""

    prompt: str | list[int] | list[dict[str, Any]]
    max_tokens: int
    at_s: float = 0.0
    delay_s: float = 0.0
    session: str | None = None
    known_tokens: int | None = None
    """Tokens of the prompt that requests before it had, by the trace's blocks; None: the trace does
    not say."""


@attrs.frozen
class Scale:
    """How a trace is made to fit a machine: `lengths` multiplies those of prompts, blocks and
    answers, `time` divides the time between requests."""

    lengths: float = 1.0
    time: float = 1.0
    block_tokens: int = BLOCK_TOKENS
    tokens: tuple[int, int] = TOKENS

    def of(self, tokens: int) -> int:
        return max(1, round(tokens * self.lengths))


def read(file: Path, scale: Scale, limit: int | None = None) -> list[Request]:
    """The first `limit` requests. Raises `ValueError` that names the line."""
    found, seen = list[Request](), set[int]()
    with file.open() as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(found) == limit:
                break
            try:
                found.append(_request(json.loads(line), scale, seen))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{file}, line {number}: {error}") from None
    return found


def _request(row: dict[str, Any], scale: Scale, seen: set[int]) -> Request:
    if not isinstance(row, dict):
        raise TypeError("it is no object")
    known = None
    prompt = row.get("messages") or _named(row, "text")
    if prompt is None:
        length, blocks = _named(row, "input"), row.get("hash_ids")
        if length is None:
            raise ValueError("it has neither messages, a prompt nor an input_length")
        block_tokens = scale.of(scale.block_tokens)
        tokens = scale.of(int(length))
        if blocks is None:  # A prompt of its own.
            blocks = [-1 - len(seen) - place for place in range(-(-tokens // block_tokens))]
        known = _known(blocks, seen, block_tokens, tokens)
        prompt = tokens_of(blocks, tokens, block_tokens, scale.tokens)
    seconds = [float(_named(row, name) or 0) / 1000 / scale.time for name in ("timestamp", "delay")]
    session = row.get("session_id")
    return Request(  # type: ignore[call-arg]
        prompt,
        scale.of(int(_named(row, "output") or LENGTH)),
        *seconds,  # type: ignore[arg-type]
        None if session is None else str(session),
        known,
    )


def _named(row: dict[str, Any], name: str) -> Any:
    return next((row[key] for key in NAMES[name] if row.get(key) is not None), None)


def _known(blocks: Sequence[int], seen: set[int], block_tokens: int, tokens: int) -> int:
    """Tokens of the leading blocks that are known. Ids are those of a block and all before it, so
    that one set is enough."""
    known = next((place for place, block in enumerate(blocks) if block not in seen), len(blocks))
    seen.update(blocks)
    return min(known * block_tokens, tokens)


def tokens_of(
    blocks: Sequence[int], count: int, block_tokens: int, among: tuple[int, int]
) -> list[int]:
    """`count` tokens: those of each block follow from its id, so that equal blocks are equal in
    every run."""
    found: list[int] = []
    for block in blocks:
        found += Random(f"block {block}").choices(range(*among), k=block_tokens)
    while len(found) < count:
        found += Random(f"rest {len(found)} {list(blocks)[-1:]}").choices(
            range(*among), k=block_tokens
        )
    return found[:count]


def turns(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Requests by session, in the order in which sessions begin; one without a session is a session
    of its own."""
    sessions: dict[str, list[Request]] = {}
    for number, request in enumerate(requests):
        sessions.setdefault(
            f"alone {number}" if request.session is None else f"of {request.session}", []
        ).append(request)
    yield from sorted(sessions.values(), key=lambda turns: turns[0].at_s)
