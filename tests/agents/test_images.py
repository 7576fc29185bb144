"""A picture in an agent's request reaches the scripted engine; `just agents-images` runs the agents
themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.agents.image_task import HEIGHT, PATH, READS, WIDTH, step_of, write_picture
from tests.agents.images import CLIENTS
from tests.agents.programs import AGENTS
from tests.agents.sent_images import SentImage, looks_as, pixels_digest, sent_images
from tests.pictures import Picture, one, png
from tests.scripted.conversation import Conversation
from tests.scripted.engine import ScriptedEngine
from tests.scripted.families import EVERY_FAMILY, SEEING_FAMILIES
from tests.vision_model.asking import CHAT, MESSAGES, PATHS, RESPONSES, request
from tests.vision_model.questions import IMAGE
from tests.web.serving import ask, serving
from trouper.protocol.media import Pixels

PICTURE = one("circle", "red", WIDTH, HEIGHT)
READ: list[dict[str, Any]] = [
    {"role": "user", "content": "What is in it?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "read", "arguments": {"path": "picture.png"}}}],
    },
    {"role": "tool", "content": [IMAGE]},
]
GIVEN: list[dict[str, Any]] = [{"role": "user", "content": [IMAGE]}]


def places(conversation: Conversation) -> str:
    """The roles whose messages have an image."""
    return " ".join(
        message["role"]
        for message in conversation.messages
        for part in message["content"] or ()
        if isinstance(part, dict) and part["type"] == "image"
    )


async def answered(
    family: str, path: str, messages: list[dict[str, Any]], directory: Path
) -> tuple[str, list[Pixels]]:
    """The answer, which names the roles of images, and the images that the engine got."""
    seen: list[Pixels] = []
    engine = ScriptedEngine.of(places, EVERY_FAMILY[family], directory, look=seen.append)
    async with serving(engine) as served:
        status, body = await ask(served, request(path, messages, [PICTURE]), path)
    assert status == 200, body
    return json.dumps(body), seen


@pytest.mark.parametrize("family", sorted(SEEING_FAMILIES))
@pytest.mark.parametrize(("messages", "role"), [(READ, "tool"), (GIVEN, "user")])
@pytest.mark.parametrize("path", PATHS)
async def test_the_engine_gets_the_files_pixels(
    family: str, path: str, messages: list[dict[str, Any]], role: str, tmp_path: Path
) -> None:
    answer, [pixels] = await answered(family, path, messages, tmp_path)
    assert f'"{role}"' in answer
    assert (pixels.width, pixels.height) == (WIDTH, HEIGHT)
    digest = sha256(pixels.rgb).hexdigest()
    assert digest == pixels_digest(png(PICTURE))
    assert digest != pixels_digest(png(one("circle", "blue", WIDTH, HEIGHT)))


async def test_a_family_without_images_gets_none(tmp_path: Path) -> None:
    answer, seen = await answered("qwen3", CHAT, READ, tmp_path)
    assert seen == [] and '"tool"' not in answer


@pytest.mark.parametrize(
    ("path", "location"),
    [
        (CHAT, "chat: tool message, image_url"),
        (MESSAGES, "messages: tool_result, image"),
        (RESPONSES, "responses: function_call_output, input_image"),
    ],
)
def test_the_location_of_a_sent_image(path: str, location: str, tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    body = json.dumps(request(path, READ, [PICTURE]))
    record.write_text(json.dumps({"kind": "http", "path": path, "body": body}) + "\n")
    assert sent_images(record) == [SentImage(location, png(PICTURE))]


def written(picture: Picture, kind: str) -> bytes:
    file = BytesIO()
    Image.fromarray(picture).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "same"),
    [
        (lambda: written(PICTURE, "jpeg"), True),
        (lambda: written(one("square", "red", WIDTH, HEIGHT), "png"), False),
        (lambda: written(one("circle", "red", HEIGHT, HEIGHT), "png"), False),
    ],
)
def test_another_file_shows_the_picture_or_not(data: Callable[[], bytes], same: bool) -> None:
    assert looks_as(data(), png(PICTURE)) == same


def test_each_step_names_the_file(tmp_path: Path) -> None:
    write_picture(tmp_path)
    for agent in READS:
        _, arguments = json.loads(step_of(agent, tmp_path))
        assert str(tmp_path / "picture.png") in json.dumps(arguments)
        assert PATH not in json.dumps(arguments)
    assert set(READS) <= set(AGENTS) < set(CLIENTS)
