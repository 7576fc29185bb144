"""What else the clients of a soak do: batches of known questions, a key with limits, models that
are put to sleep and woken."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import attrs
import trio

from tests.soak.client import CHAT, COMPLETIONS, LIMITED_KEY, Ask, Heard, answer_of
from tests.soak.wishes import Question
from tests.web.batching import ENDED

if TYPE_CHECKING:
    from tests.soak.load import Load, Target

LINES = 3
"""Requests of a batch."""
BUSY = (409, 503, 507)
"""Answers to an operation on a model that others use, or that has no room."""
Script = Callable[["Load", "Target", Random], Awaitable[None]]


async def batch(load: Load, target: Target, chance: Random) -> None:
    """A file of questions is uploaded and answered by a batch; each answer is compared, and both
    files are deleted."""
    path = chance.choice((CHAT, COMPLETIONS))
    asked = [
        chance.choice([one for one in target.questions if _fits(one, path)]) for _ in range(LINES)
    ]
    wishes = [(str(number), question.wish.body) for number, question in enumerate(asked)]
    lines = [
        {"custom_id": name, "method": "POST", "url": path, "body": body} for name, body in wishes
    ]
    if (file := await load.object_of(target, Ask("/v1/files", form=upload(lines)))) is None:
        return
    wish = Ask(
        "/v1/batches", {"input_file_id": file["id"], "endpoint": path, "completion_window": "24h"}
    )
    made = await load.object_of(target, wish)
    while made is not None and made["status"] not in ENDED:
        await trio.sleep(0.2)
        made = await load.object_of(target, Ask(f"/v1/batches/{made['id']}", method="GET"))
    if made is None:
        return
    output = made["output_file_id"]
    if output is None:
        load.tally.errors.append(
            f"{load.now():.0f} s: a batch without answers: {json.dumps(made)[:400]}"
        )
    else:
        heard = await load.answer(target, Ask(f"/v1/files/{output}/content", method="GET"))
        _compare(load, asked, heard)
        await load.answer(target, Ask(f"/v1/files/{output}", method="DELETE"))
    await load.answer(target, Ask(f"/v1/files/{file['id']}", method="DELETE"))


def _fits(question: Question, path: str) -> bool:
    """Whether a batch takes the question: it is not streamed, and its answer is no error."""
    body = question.wish.body or {}
    return (
        question.wish.path == path
        and not body.get("stream")
        and isinstance(question.answer[0], list)
    )


def upload(lines: Sequence[Any]) -> bytes:
    """The body of a form with a file of these lines; its boundary is `soak`."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    parts = (
        '--soak\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        (
            '--soak\r\nContent-Disposition: form-data; name="file"; filename="soak.jsonl"\r\n\r\n'
            f"{text}\r\n--soak--\r\n"
        ),
    )
    return "".join(parts).encode()


def _compare(load: Load, asked: Sequence[Question], heard: Heard) -> None:
    found = [json.loads(line) for line in heard.body.splitlines()] if heard.status == 200 else []
    answers = {line["custom_id"]: line["response"] for line in found if line.get("response")}
    for number, question in enumerate(asked):
        response = answers.get(str(number))
        said = (
            Heard(0)
            if response is None
            else Heard(response["status_code"], json.dumps(response["body"]).encode())
        )
        load.compare(question.wish, said, question.answer)
    if len(answers) != len(asked):
        load.tally.errors.append(
            f"{load.now():.0f} s: {len(answers)} of {len(asked)} answers of a batch"
        )


async def limited(load: Load, target: Target, chance: Random) -> None:
    """A key that may ask a few times a minute: it is answered right or refused by name, and sees
    what it used."""
    question = chance.choice(target.questions)
    wish = attrs.evolve(question.wish, key=LIMITED_KEY)
    heard = await load.heard(target, wish)
    if heard.status == 429:
        load.tally.asked["429"] += 1
        # Messages name their errors otherwise.
        if answer_of(wish, heard)[1] not in ("rate_limit_exceeded", None):
            load.tally.errors.append(
                f"{load.now():.0f} s: {wish.path} {heard.status} {heard.body[:200]!r}"
            )
    else:
        load.compare(wish, heard, question.answer)
    await load.answer(target, Ask("/v1/usage", method="GET", key=LIMITED_KEY))
    refused = await load.heard(target, attrs.evolve(question.wish, key="sk-nobody"))
    load.tally.checked += 1
    if refused.status != 401:
        load.tally.wrong.append(
            f"{load.now():.0f} s: {wish.path} {refused.status} for a key that is none"
        )


async def exchanged(load: Load, target: Target, chance: Random) -> None:
    """A model sleeps or is unloaded, and is loaded again, while others ask it."""
    assert target.exchanged
    for operation in (chance.choice(("sleep", "unload")), "load"):
        heard = await load.heard(
            target, Ask(f"/v1/models/{operation}", {"model": target.exchanged})
        )
        if heard.status in BUSY:
            load.tally.asked["a model in use"] += 1
        elif heard.status != 200 or (heard.json() or {}).get("id") != target.exchanged:
            load.tally.errors.append(
                f"{load.now():.0f} s: {operation} {heard.status} {heard.body[:200]!r}"
            )
        await trio.sleep(chance.uniform(0, 0.5))
