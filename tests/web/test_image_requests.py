"""Images for a model that takes them, through every dialect, over real sockets."""

from __future__ import annotations

import json
from base64 import b64encode
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import trio

from tests.fake_images import SeeingEngine, png_file, shown
from tests.fakes import ints
from tests.web.batching import ended, output, request, started, strict
from tests.web.serving import Served, ask, exchange, get, pace, post, serving
from tests.web.test_batches import using
from trouper.web.http.image_source import MAX_IMAGES
from trouper.web.openai.other_servers import PLACEHOLDER

Json = dict[str, Any]
SMALL, WIDE = png_file(20, 10), png_file(50, 20, seed=1)
IN_SMALL, IN_WIDE = shown(20, 10), shown(50, 20)
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{b64encode(data).decode()}"


def in_chat(data: bytes) -> Json:
    return {"type": "image_url", "image_url": {"url": url(data)}}


def in_messages(data: bytes) -> Json:
    source = {"type": "base64", "media_type": "image/png", "data": b64encode(data).decode()}
    return {"type": "image", "source": source}


def in_input(data: bytes) -> Json:
    return {"type": "input_image", "image_url": url(data)}


def seeing() -> SeeingEngine:
    return SeeingEngine(before_step=pace)


def prompts(served: Served) -> list[tuple[int, ...]]:
    """Tokens of the prompts that the engine got."""
    return [ints(admit.prompt) for plan in served.engine.plans_seen for admit in plan.admit]


def tokens(*pieces: str | tuple[int, ...]) -> tuple[int, ...]:
    """Tokens of a prompt up to the answer."""
    answer = [piece.encode() if isinstance(piece, str) else piece for piece in (*pieces, END)]
    return tuple(token for piece in answer for token in piece)


END = "<assistant>"
TEXT: dict[str, str] = {CHAT: "text", MESSAGES: "text", RESPONSES: "input_text"}


def asking(path: str, *content: Any, **more: Any) -> Json:
    """A question of texts and images (bytes)."""
    make = {CHAT: in_chat, MESSAGES: in_messages, RESPONSES: in_input}[path]
    sent = [
        {"type": TEXT[path], "text": part} if isinstance(part, str) else make(part)
        for part in content
    ]
    name, limit = (
        ("input", "max_output_tokens") if path == RESPONSES else ("messages", "max_tokens")
    )
    return {name: [{"role": "user", "content": sent}], limit: 2} | more


COUNTS = {
    CHAT: ("/tokenize", "count"),
    MESSAGES: ("/v1/messages/count_tokens", "input_tokens"),
    RESPONSES: ("/v1/responses/input_tokens", "input_tokens"),
}


def input_tokens(body: Json) -> int:
    usage = body["usage"]
    return int(usage.get("prompt_tokens", usage.get("input_tokens")))


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_images_are_in_the_prompt(path: str) -> None:
    """The k-th image is in the place of the k-th part, and counts beforehand as it does then."""
    question = asking(path, "See ", SMALL, " and ", WIDE, ": <image>?")
    expected = tokens("<user>See ", IN_SMALL, " and ", IN_WIDE, ": <image>?")
    async with serving(seeing()) as served:
        status, headers, data = await exchange(served, post(path, question))
        assert (status, headers.get("x-trouper-ignored")) == (200, None)
        assert prompts(served) == [expected]
        assert input_tokens(json.loads(data)) == len(expected)
        status, _, data = await exchange(served, post(path, question | {"stream": True}))
        assert (status, prompts(served)[1]) == (200, expected), data
        counting, name = COUNTS[path]
        body = {key: question[key] for key in ("messages", "input") if key in question}
        status, counted = await ask(served, body, counting)
    assert (status, counted[name]) == (200, len(expected))


RESULTS: list[tuple[str, Json]] = [
    (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": "see"},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": [in_chat(SMALL)]},
            ]
        },
    ),
    (
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": "see"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [in_messages(SMALL)],
                        }
                    ],
                },
            ]
        },
    ),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "see"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [in_input(SMALL)]},
            ]
        },
    ),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "see"},
                {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": ""},
                {"type": "custom_tool_call_output", "call_id": "c", "output": [in_input(SMALL)]},
            ]
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), RESULTS)
async def test_images_of_results_are_in_the_prompt(path: str, body: Json) -> None:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    async with serving(seeing()) as served:
        status, answer = await ask(served, body | {limit: 2}, path)
        assert status == 200, answer
        assert prompts(served) == [tokens("<user>see<assistant><tool>", IN_SMALL)]


async def test_a_history_with_images_is_cached() -> None:
    turns: list[Json] = [{"role": "user", "content": [in_chat(WIDE), in_chat(SMALL)]}]
    later = [*turns, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    async with serving(seeing()) as served:
        await ask(served, {"messages": turns, "max_tokens": 2}, CHAT)
        status, _ = await ask(served, {"messages": later, "max_tokens": 2}, CHAT)
        assert status == 200
        assert prompts(served)[1] == tokens("<user>", IN_WIDE, IN_SMALL, "<assistant>b<user>c")


async def test_a_response_continues_a_conversation_with_images() -> None:
    question = asking(RESPONSES, "a", SMALL, SMALL)
    async with serving(seeing()) as served:
        _, made = await ask(served, question, RESPONSES)
        continued = {"previous_response_id": made["id"], "input": "b", "max_output_tokens": 2}
        status, _ = await ask(served, continued, RESPONSES)
        assert status == 200
        first, second = prompts(served)
        assert second[: len(first)] == first
        counted = await ask(served, continued, "/v1/responses/input_tokens")
        assert counted == (200, {"object": "response.input_tokens", "input_tokens": len(second)})
        _, _, data = await exchange(served, get(f"/v1/responses/{made['id']}/input_items"))
    [item] = json.loads(data)["data"]
    assert [part.get("image_url") for part in item["content"]] == [None, url(SMALL), url(SMALL)]


def part_of(path: str, **image: Any) -> Json:
    if path == RESPONSES:
        return {"type": "input_image", **image}
    return {"type": "image_url", "image_url": image} if path == CHAT else {"type": "image", **image}


REFUSED: list[tuple[str, Json, str]] = [
    (CHAT, part_of(CHAT, url="https://example.com/secret.png"), "remote_media_disabled"),
    (CHAT, part_of(CHAT, url="HTTP://example.com/secret.png"), "remote_media_disabled"),
    (CHAT, part_of(CHAT, url="file:///secret.png"), "media_not_allowed"),
    (CHAT, part_of(CHAT, url="/secret.png"), "media_not_allowed"),
    (CHAT, {"type": "image_url", "image_url": "secret.png"}, "media_not_allowed"),
    (CHAT, {"type": "image_url"}, "invalid_type"),
    (CHAT, part_of(CHAT, url=3), "invalid_type"),
    (CHAT, part_of(CHAT, url="data:image/png;base64,secret!"), "image_damaged"),
    (CHAT, part_of(CHAT, url="data:image/png;base64,AAA=AAAA"), "image_damaged"),
    (CHAT, part_of(CHAT, url="data:image/png;base64,AAA"), "image_damaged"),
    (CHAT, part_of(CHAT, url="data:image/png;base64,AAAA !!!AAAA"), "image_damaged"),
    (CHAT, part_of(CHAT, url="data:image/png;base64,"), "image_damaged"),
    (CHAT, part_of(CHAT, url="data:image/png,AAAA"), "image_damaged"),
    (CHAT, part_of(CHAT, url="data:" + "a" * 999), "image_damaged"),
    (CHAT, part_of(CHAT, url="data:image/png;base64,AAAA"), "image_format"),
    (CHAT, part_of(CHAT, url="data:image/svg+xml;base64,AAAA"), "image_format"),
    (CHAT, part_of(CHAT, url="data:application/pdf;base64,AAAA"), "image_format"),
    # The type counts, whatever the content.
    (CHAT, part_of(CHAT, url=url(SMALL, "svg+xml")), "image_format"),
    (CHAT, part_of(CHAT, url=url(SMALL).replace("image/png", "application/pdf")), "image_format"),
    (CHAT, part_of(CHAT, url=url(SMALL), detail="huge"), "invalid_value"),
    (CHAT, part_of(CHAT, url=url(SMALL[:20])), "image_damaged"),
    (CHAT, part_of(CHAT, url=url(png_file(2000, 2))), "image_too_large"),
    (CHAT, part_of(CHAT, file_id="file-none"), "file_not_found"),
    (
        MESSAGES,
        part_of(MESSAGES, source={"type": "url", "url": "https://a"}),
        "remote_media_disabled",
    ),
    (MESSAGES, part_of(MESSAGES, source={"type": "base64", "data": "secret!"}), "image_damaged"),
    (MESSAGES, part_of(MESSAGES, source={"type": "file", "file_id": "x"}), "file_not_found"),
    (MESSAGES, part_of(MESSAGES, source="secret.png"), "media_not_allowed"),
    (MESSAGES, part_of(MESSAGES), "invalid_type"),
    (RESPONSES, part_of(RESPONSES, image_url="https://a"), "remote_media_disabled"),
    (RESPONSES, part_of(RESPONSES, file_id="x"), "file_not_found"),
    (RESPONSES, part_of(RESPONSES), "invalid_type"),
]


async def test_what_is_no_image_is_refused_by_its_path() -> None:
    async with serving(seeing()) as served:
        for path, part, code in REFUSED:
            body = asking(path, "a")
            name = "input" if path == RESPONSES else "messages"
            body[name][0]["content"].append(part)
            status, answer = await ask(served, body, path)
            text = json.dumps(answer)
            at = f"{name}.0.content.1"
            assert (status, code == "file_not_found") in ((400, False), (404, True)), (part, answer)
            assert path == MESSAGES or answer["error"]["code"] == code, (part, answer)
            assert at in text and "secret" not in text, (part, answer)
        assert prompts(served) == []


async def test_the_number_of_images_is_bounded() -> None:
    async with serving(seeing()) as served:
        status, _ = await ask(served, asking(CHAT, *[SMALL] * MAX_IMAGES), CHAT)
        assert status == 200
        status, answer = await ask(served, asking(CHAT, *[SMALL] * (MAX_IMAGES + 1)), CHAT)
    assert (status, answer["error"]["code"]) == (400, "too_many_images")
    assert answer["error"]["param"] == f"messages.0.content.{MAX_IMAGES}"


async def test_details_and_the_operator_bound_the_tokens() -> None:
    low = asking(CHAT, WIDE)
    low["messages"][0]["content"][0]["image_url"]["detail"] = "low"
    async with serving(seeing()) as served:
        await ask(served, low, CHAT)
        assert len(prompts(served)[0]) == len(tokens("<user>")) + 2
    async with serving(seeing(), {"max_image_tokens": 4}) as served:
        await ask(served, asking(CHAT, WIDE), CHAT)
        assert len(prompts(served)[0]) <= len(tokens("<user>")) + 4


async def test_images_count_in_the_context() -> None:
    async with serving(seeing(), {"max_prompt_tokens": len(tokens("<user>")) + 5}) as served:
        status, _ = await ask(served, asking(CHAT, SMALL), CHAT)
        assert status == 200
        status, answer = await ask(served, asking(CHAT, WIDE), CHAT)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_roles_without_images_have_placeholders() -> None:
    """Instructions never hold images; results do not if the template cannot write them there."""
    engine = SeeingEngine(before_step=pace, image_roles=("user",))
    _, body = RESULTS[0]
    instruction = {"role": "system", "content": [in_chat(WIDE)]}
    async with serving(engine) as served:
        sent = post(CHAT, {"messages": [instruction, *body["messages"]], "max_tokens": 2})
        status, headers, _ = await exchange(served, sent)
        assert (status, headers["x-trouper-ignored"]) == (200, "image_url")
        assert prompts(served) == [
            tokens(f"<system>{PLACEHOLDER}<user>see<assistant><tool>{PLACEHOLDER}")
        ]


async def test_stored_placeholders_of_instructions() -> None:
    instruction = {"role": "developer", "content": [in_input(WIDE)]}
    body = asking(RESPONSES, SMALL)
    body["input"].insert(0, instruction)
    async with serving(seeing()) as served:
        _, made = await ask(served, body, RESPONSES)
        _, _, data = await exchange(served, get(f"/v1/responses/{made['id']}/input_items"))
    user, developer = json.loads(data)["data"]
    assert developer["content"] == [{"type": "input_text", "text": PLACEHOLDER}]
    assert user["content"][0]["image_url"] == url(SMALL)


async def test_an_uploaded_image() -> None:
    def use(client: openai.OpenAI) -> None:
        file = client.files.create(file=("a.png", SMALL), purpose="vision")
        assert file.purpose == "vision"
        lines = client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        response = client.responses.create(
            model="fake",
            max_output_tokens=2,
            input=[
                {
                    "role": "user",
                    "content": [{"type": "input_image", "file_id": file.id, "detail": "auto"}],
                }
            ],
        )
        again = client.responses.create(
            model="fake", max_output_tokens=2, input="b", previous_response_id=response.id
        )
        assert again.status == "incomplete"
        with pytest.raises(openai.BadRequestError, match=r"input\.0\.content\.0: the purpose"):
            client.responses.create(
                model="fake",
                input=[
                    {
                        "role": "user",
                        "content": [{"type": "input_image", "file_id": lines.id, "detail": "auto"}],
                    }
                ],
            )

    async with serving(seeing()) as served:
        client = openai.OpenAI(base_url=served.base_url, api_key="none", max_retries=0)
        await trio.to_thread.run_sync(use, client)
        client.close()
        assert prompts(served)[0] == tokens("<user>", IN_SMALL)
        source = {"type": "file", "file_id": "file-of-others"}
        body = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
        status, answer = await ask(served, body | {"max_tokens": 2}, MESSAGES)
        assert (status, answer["error"]["type"]) == (404, "not_found_error")


async def test_a_batch_with_images(tmp_path: Path) -> None:
    def use(client: openai.OpenAI) -> None:
        lines = [request("good", asking(CHAT, SMALL)), request("bad", asking(CHAT, b"no image"))]
        batch = ended(client, started(client, lines, CHAT))
        assert output(client, batch.output_file_id).keys() == {"good"}
        [line] = output(client, batch.error_file_id).values()
        assert line["response"]["body"]["error"]["param"] == "messages.0.content.0"

    async with serving(seeing(), batch_dir=tmp_path) as served:
        await using(served, use)
        assert prompts(served) == [tokens("<user>", IN_SMALL)]


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("endpoint", ["content", "image"])
async def test_content_that_cannot_be_read_is_named(
    tmp_path: Path, endpoint: str, is_there: bool
) -> None:
    """Of a file that is gone at once: lines of a batch try a 503 again until the batch expires."""
    async with serving(seeing(), batch_dir=tmp_path) as served:
        with strict(served.base_url) as client:
            upload = partial(client.files.create, file=("a.png", SMALL), purpose="vision")
            file = await trio.to_thread.run_sync(upload)
        path = tmp_path / "files" / file.id
        path.unlink()
        if is_there:
            path.symlink_to(path)
        if endpoint == "content":
            status, _, answer = await exchange(served, get(f"/v1/files/{file.id}/content"))
            error = json.loads(answer)["error"]
        else:
            body = {"messages": [{"role": "user", "content": [part_of(CHAT, file_id=file.id)]}]}
            status, answer = await ask(served, body, CHAT)
            error = answer["error"]
    if is_there:
        assert (status, error["code"]) == (503, "batches_unavailable")
        assert "cannot be read: Too many levels of symbolic links" in error["message"]
    else:
        assert (status, error["code"]) == (404, "file_not_found")


async def test_without_files_an_upload_is_refused() -> None:
    async with serving(seeing(), no_batches=True) as served:
        body = asking(CHAT, SMALL)
        body["messages"][0]["content"].append(part_of(CHAT, file_id="x"))
        status, answer = await ask(served, body, CHAT)
    assert (status, answer["error"]["code"]) == (400, "files_not_supported")


async def test_images_in_the_forms_of_other_dialects() -> None:
    content = [in_input(SMALL), in_messages(SMALL), {"type": "image", "image": url(SMALL)}]
    async with serving(seeing()) as served:
        for part in content:
            body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
            status, answer = await ask(served, body, CHAT)
            assert status == 200, answer
        for part in [in_chat(SMALL), *content[1:]]:
            body = {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 2}
            status, answer = await ask(served, body, RESPONSES)
            assert status == 200, answer
        assert {*prompts(served)} == {tokens("<user>", IN_SMALL)}


async def test_a_body_may_be_larger_for_a_model_that_takes_images() -> None:
    big = b'{"prompt": "a", "max_tokens": 1, "user": "' + b"x" * (33 * 2**20) + b'"}'
    async with serving(seeing()) as served:
        assert (await ask(served, big))[0] == 200
    async with serving() as served:
        status, answer = await ask(served, big)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert "--max-body-bytes" in answer["error"]["message"]


async def test_what_a_model_reads_is_listed() -> None:
    async with serving(seeing()) as served:
        _, _, listed = await exchange(served, get("/v1/models/fake"))
        _, _, health = await exchange(served, get("/health"))
    body = json.loads(listed)
    assert body["input_modalities"] == body["architecture"]["input_modalities"] == ["text", "image"]
    assert json.loads(health)["images"] == {"roles": ["tool", "user"], "reason": ""}
    async with serving() as served:
        _, _, listed = await exchange(served, get("/v1/models/fake"))
    assert json.loads(listed)["input_modalities"] == ["text"]


async def test_the_anthropic_package_sends_images() -> None:
    def use(client: anthropic.Anthropic) -> None:
        content: Any = [in_messages(SMALL), {"type": "text", "text": "what?"}]
        messages: Any = [{"role": "user", "content": content}]
        counted = client.messages.count_tokens(model="fake", messages=messages)
        message = client.messages.create(model="fake", messages=messages, max_tokens=2)
        assert message.usage.input_tokens == counted.input_tokens
        with client.messages.stream(model="fake", messages=messages, max_tokens=2) as stream:
            assert stream.get_final_message().usage.input_tokens <= counted.input_tokens

    async with serving(seeing()) as served:
        url = f"http://127.0.0.1:{served.port}"
        with anthropic.Anthropic(
            base_url=url, api_key="-", _strict_response_validation=True
        ) as client:
            await trio.to_thread.run_sync(use, client)
        assert {*prompts(served)} == {tokens("<user>", IN_SMALL, "what?")}
