"""The model that sees (examples/shapes) answers by content, through every API, over real sockets.

A wrong place, order or digest of an image is a wrong answer here: the model itself answers all of
these questions rightly.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anthropic
import openai
import pytest
import trio

from tests.pictures import Picture, one
from tests.sim.world import Eager
from tests.vision_model.asking import (
    CHAT,
    MESSAGES,
    PATHS,
    RESPONSES,
    TextAnswer,
    read_answer,
    read_stream,
    request,
)
from tests.vision_model.files import DIRECTORY
from tests.vision_model.questions import (
    IMAGE,
    NO_IMAGE,
    Message,
    draw,
    fresh,
    text_of,
    which_of_two,
)
from tests.web.serving import Served, ask, exchange, get, post
from trouper import Runtime, ServerSettings, Settings, run_runtime
from trouper.actors.scheduling import core
from trouper.engine.host import MlxEngine
from trouper.web.server import serve_http

QUESTIONS = 200 if os.environ.get("TROUPER_LONG_TESTS") else 20
AT_A_TIME = 6
RED, BLUE = one("circle", "red"), one("circle", "blue")
GREEN, SEVEN = one("cross", "green", 160, 128), one("7", "yellow", 128, 192)


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Served]:
    shutdown = trio.Event()
    usual: dict[str, Any] = {"no_ssd": True, "gather_ms": 0, "block_size": 16}
    chosen = Settings(model=str(DIRECTORY), **(usual | settings))
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(
            partial(run_runtime, chosen, engine=MlxEngine(chosen))
        )
        [url] = await nursery.start(
            partial(serve_http, runtime, ServerSettings(port=0, no_batches=True), shutdown=shutdown)
        )
        yield Served(int(url.rsplit(":", 1)[1]), runtime, None, shutdown)  # type: ignore[arg-type]
        await runtime.drain(5)
        shutdown.set()


def user(*content: str | Message) -> Message:
    shown = [text_of(part) if isinstance(part, str) else part for part in content]
    return {"role": "user", "content": shown}


def tool(*content: str | Message) -> list[Message]:
    """A call, and its result."""
    call = {"function": {"name": "view_image", "arguments": {"path": "/tmp/a.png"}}}
    result = {**user(*content), "role": "tool"}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, result]


async def answer_to(
    served: Served, path: str, messages: Sequence[Message], *pictures: Picture
) -> TextAnswer:
    status, body = await ask(served, request(path, messages, pictures), path)
    assert status == 200, body
    return read_answer(path, body)


async def streamed(
    served: Served, path: str, messages: Sequence[Message], *pictures: Picture
) -> str:
    body = request(path, messages, pictures) | {"stream": True}
    status, _, data = await exchange(served, post(path, body))
    assert status == 200, data
    return read_stream(path, data)


async def counted(served: Served) -> dict[str, int]:
    """How many images were decoded and encoded."""
    _, _, data = await exchange(served, get("/metrics"))
    names = ("trouper_images_decoded_total", "trouper_images_encoded_total")
    lines = [line.split() for line in data.decode().splitlines() if line.startswith(names)]
    return {line[0].split("_")[2]: int(float(line[1])) for line in lines}


ONE = [user(IMAGE, "What color is the circle?")]
TWO = [user(IMAGE, IMAGE, "What color is the circle in the second image?")]
WHICH = [user(IMAGE, IMAGE, "Which image shows the red circle?")]


@pytest.mark.parametrize("path", PATHS)
async def test_answers_are_about_the_images(path: str) -> None:
    async with serving() as served:
        for ask_one in (streamed, lambda *request: _text(answer_to(*request))):
            assert await ask_one(served, path, ONE, RED) == "It is red."
            assert await ask_one(served, path, ONE, BLUE) == "It is blue."
            assert await ask_one(served, path, TWO, RED, BLUE) == "It is blue."
            assert await ask_one(served, path, TWO, BLUE, RED) == "It is red."
            assert await ask_one(served, path, WHICH, RED, BLUE) == "It is the first."
            assert await ask_one(served, path, WHICH, BLUE, RED) == "It is the second."


async def _text(answer: Any) -> str:
    return str((await answer).text)


@pytest.mark.parametrize("path", PATHS)
async def test_a_tools_image_is_seen(path: str) -> None:
    question = user("What shape is it?")
    async with serving() as served:
        for picture, answer in ((GREEN, "It is a cross."), (RED, "It is a circle.")):
            messages = [question, *tool(IMAGE)]
            assert (await answer_to(served, path, messages, picture)).text == answer
            assert await streamed(served, path, messages, picture) == answer
        later = [question, *tool(IMAGE), {"role": "assistant", "content": "It is a cross."}]
        later.append(user("What color is it?"))
        assert (await answer_to(served, path, later, GREEN)).text == "It is green."


def ask_by_packages(port: int, messages: Sequence[Message], picture: Picture) -> list[str]:
    """Answers to `openai` (chat and responses) and to `anthropic`, each whole and streamed."""
    bodies: list[Any] = [{"model": "any", **request(path, messages, [picture])} for path in PATHS]
    chat, message, response = bodies
    url = f"http://127.0.0.1:{port}"
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as first,
        anthropic.Anthropic(base_url=url, api_key="-", max_retries=0) as second,
    ):
        # The package of 2026 has no parameter of this name.
        message["extra_body"] = {"temperature": message.pop("temperature")}
        answer = second.messages.create(**message)
        with (
            first.chat.completions.stream(**chat) as chat_stream,
            first.responses.stream(**response) as response_stream,
            second.messages.stream(**message) as message_stream,
        ):
            return [
                str(first.chat.completions.create(**chat).choices[0].message.content),
                str(chat_stream.get_final_completion().choices[0].message.content),
                first.responses.create(**response).output_text,
                response_stream.get_final_response().output_text,
                *(block.text for block in answer.content if block.type == "text"),
                message_stream.get_final_text(),
            ]


async def test_packages_of_openai_and_anthropic_show_images() -> None:
    question = user("What shape is it?")
    async with serving() as served:
        for picture, expected in ((GREEN, "It is a cross."), (RED, "It is a circle.")):
            for messages in ([user(IMAGE, "What shape is it?")], [question, *tool(IMAGE)]):
                answers = await trio.to_thread.run_sync(
                    ask_by_packages, served.port, messages, picture
                )
                assert answers == [expected] * 6


async def test_hits_answer_from_the_same_images() -> None:
    """Images of equal size and other content: a hit by place alone would answer wrongly."""
    async with serving() as served:
        first = await answer_to(served, CHAT, TWO, RED, BLUE)
        again = await answer_to(served, MESSAGES, TWO, RED, BLUE)
        assert (first.text, again.text) == ("It is blue.", "It is blue.")
        assert again.cached_tokens >= again.prompt_tokens - 16
        encoded = await counted(served)
        assert encoded == {"decoded": 2, "encoded": 2}
        other = await answer_to(served, RESPONSES, TWO, RED, GREEN)
        assert other.cached_tokens < again.cached_tokens
        swapped = await answer_to(served, CHAT, TWO, BLUE, RED)
        assert (swapped.text, swapped.cached_tokens < 9) == ("It is red.", True)
        # A word more behind the images: they are restored, not encoded.
        followed = [*TWO, {"role": "assistant", "content": "It is blue."}, user("Thanks!")]
        followed[-1] = user("What color is the circle in the first image?")
        before = await counted(served)
        assert (await answer_to(served, CHAT, followed, RED, BLUE)).text == "It is red."
        assert await counted(served) == before


async def test_no_image_is_seen_where_there_is_none() -> None:
    async with serving() as served:
        assert (await answer_to(served, CHAT, [user("What color is the circle?")])).text == NO_IMAGE
        marker = "<|vision_start|><|image_pad|><|vision_end|>"
        answer = await answer_to(served, CHAT, [user(f"{marker}What color is the circle?")])
    assert answer.text not in {f"It is {color}." for color in ("red", "blue", "green")}


async def test_a_draft_model_drafts_for_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is a model that sees: here the model itself, whose drafts are right."""
    monkeypatch.setattr(core, "Speculation", Eager)
    async with serving(draft_model=str(DIRECTORY), speculation="draft_model") as served:
        assert (await answer_to(served, CHAT, TWO, RED, BLUE)).text == "It is blue."
        assert not served.runtime.health().scheduler.speculation.by_proposer
        assert (await answer_to(served, CHAT, [user("What color is the circle?")])).text == NO_IMAGE
        drafts = served.runtime.health().scheduler.speculation.by_proposer["draft_model"]
        assert drafts.accepted == drafts.drafted > 0


async def test_rows_in_company_see_their_own_images() -> None:
    """Text rows beside them, and images of several sizes."""
    cases: list[tuple[list[Message], list[Picture], str]] = [
        (ONE, [RED], "It is red."),
        (ONE, [BLUE], "It is blue."),
        ([user("What color is the circle?")], [], NO_IMAGE),
        ([user(IMAGE, "Which digit do you see?")], [SEVEN], "It is a 7."),
        ([user(IMAGE, "What shape is it?")], [GREEN], "It is a cross."),
        (TWO, [BLUE, RED], "It is red."),
        (WHICH, [BLUE, RED], "It is the second."),
    ]
    async with serving() as served:
        for _ in range(2):
            answers: dict[int, str] = {}

            async def answer(at: int) -> None:
                messages, pictures, _ = cases[at]
                heard = await answer_to(served, PATHS[at % 3], messages, *pictures)
                answers[at] = heard.text  # noqa: B023 - awaited within the turn

            async with trio.open_nursery() as nursery:
                for at in range(len(cases)):
                    nursery.start_soon(answer, at)
            assert [answers[at] for at in range(len(cases))] == [right for *_, right in cases]


async def test_fresh_questions() -> None:
    """Each whole through one API and streamed through the next, which hits what the first cached;
    some at a time."""

    async def answer(served: Served, seed: int) -> list[str]:
        messages, scenes, right = fresh(seed, images=seed % 3 + 1)
        path, next_path = PATHS[seed % 3], PATHS[(seed + 1) % 3]
        pictures = [draw(scene) for scene in scenes]
        texts = [
            (await answer_to(served, path, messages, *pictures)).text,
            await streamed(served, next_path, messages, *pictures),
        ]
        return [f"question {seed}: {text!r}, not {right!r}" for text in texts if text != right]

    assert not await wrong_of(answer, range(QUESTIONS))


async def test_swapped_images_swap_the_answer() -> None:
    """Images of one size: a hit by place alone would answer wrongly."""

    async def answer(served: Served, seed: int) -> list[str]:
        messages, scenes, right, swapped = which_of_two(seed)
        first, second = map(draw, scenes)
        path = PATHS[seed % 3]
        texts = [
            (await answer_to(served, path, messages, first, second)).text,
            await streamed(served, path, messages, second, first),
        ]
        return [] if texts == [right, swapped] else [f"pair {seed}: {texts}, not {right!r} first"]

    assert not await wrong_of(answer, range(QUESTIONS))


async def wrong_of(
    answer: Callable[[Served, int], Awaitable[list[str]]], seeds: Iterable[int]
) -> list[str]:
    """Lines about wrong answers, `AT_A_TIME` questions together."""
    limiter, wrong = trio.CapacityLimiter(AT_A_TIME), list[str]()

    async def one_question(served: Served, seed: int) -> None:
        async with limiter:
            wrong.extend(await answer(served, seed))

    async with serving() as served, trio.open_nursery() as nursery:
        for seed in seeds:
            nursery.start_soon(one_question, served, seed)
    return wrong
