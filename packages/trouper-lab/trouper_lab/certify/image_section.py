"""Section about images: answers alone, in company, after hits, from disk and after kill -9."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import attrs

from trouper_lab.certify.cache_sections import require_cache, until_attached, until_written
from trouper_lab.certify.certificate import Json
from trouper_lab.certify.section_run import NotApplicable, ProbeAnswer, SectionRun, compared
from trouper_lab.certify.server_runs import ServerRun

CHAT = "/v1/chat/completions"
ENCODED = "trouper_images_encoded_total"
SIZES = ((96, 64), (128, 128), (64, 160), (200, 120))
"""Width and height of images in pixels."""
CELL = 16
"""Pixels of a square of one color."""
KILL_AFTER_S = 1.0
RGB_OF_8_BITS = b"\x08\x02\0\0\0"
"""End of a PNG header: depth, color type, compression, filter, interlace."""


@attrs.frozen
class ImageQuestion:
    """Greedy, about one or two images."""

    images: tuple[bytes, ...]
    text: str
    tokens: int

    def body(self, salt: str) -> Json:
        """A new `salt` starts cold."""
        urls = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in self.images]
        parts: list[Json] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        parts.append({"type": "text", "text": self.text})
        return {
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
            "cache_salt": salt,
            "temperature": 0,
        }


def images(run: SectionRun) -> None:
    """Requests with images alone, all at once, after hits, after a restart and after kill -9."""
    require_cache(run)
    questions = image_questions(3 if run.quick else 8, 8 if run.quick else 24)
    flags = ("--ssd-cache-dir", str(run.folder("images")))
    with run.starter.trouper(*flags) as server:
        support = server.health()["images"]
        if not support["roles"]:
            raise NotApplicable(f"this model reads no images: {support['reason']}")
        until_attached(server)
        run.show(0.1, "each request with images alone")
        alone = _one_by_one(server, questions)
        before = server.metric(ENCODED)
        run.show(0.3, "again, from memory")
        _promise(run, "from memory", alone, _one_by_one(server, questions))
        again = server.metric(ENCODED) - before
        run.result.promise(
            "an image in a cached prefix is not encoded again",
            not again,
            f"{before} images of {len(questions)} requests were encoded, {again} once more",
        )
        run.show(0.4, "all at once")
        with ThreadPoolExecutor(len(questions)) as pool:
            company = list(pool.map(lambda one: _answer(server, one, "company"), questions))
        _promise(run, "in company", alone, company)
        until_written(server)
    run.show(0.6, "from disk, after a restart")
    with run.starter.trouper(*flags) as server:
        until_attached(server)
        _promise(run, "from disk", alone, _one_by_one(server, questions))
        run.show(0.7, "kill -9 while images are encoded")
        bodies = [question.body("killed") for question in questions]
        server.kill_amid(partial(server.post, CHAT), bodies, KILL_AFTER_S)
    run.show(0.8, "the same answers again, after kill -9")
    with run.starter.trouper(*flags) as server:
        until_attached(server)
        _promise(run, "after kill -9", alone, _one_by_one(server, questions))
        damaged = server.health()["directory"]["damaged"]
    run.result.promise("no block is damaged by kill -9", not damaged, f"{damaged} were removed")
    run.result.figures |= {"requests": len(questions), "images_encoded": before}


def _promise(
    run: SectionRun, how: str, alone: Sequence[ProbeAnswer], others: Sequence[ProbeAnswer]
) -> None:
    comparison = compared(alone, others)
    cached = sum(answer.cached_tokens for answer in others)
    prompts = sum(answer.prompt_tokens for answer in others)
    run.result.promise(
        f"answers about images {how} are those alone",
        comparison.within(run.near_tie),
        f"{comparison.text(run.near_tie)}; {cached} of {prompts} prompt tokens were cached",
    )


def _one_by_one(server: ServerRun, questions: Sequence[ImageQuestion]) -> list[ProbeAnswer]:
    return [_answer(server, one, "alone") for one in questions]


def _answer(server: ServerRun, question: ImageQuestion, salt: str) -> ProbeAnswer:
    return ProbeAnswer.of_chat(server.post(CHAT, question.body(salt)))


def image_questions(count: int, tokens: int) -> list[ImageQuestion]:
    """Questions about one or two images, constant between runs. No two have the same image."""
    pictures = [png(*SIZES[number % len(SIZES)], seed=number) for number in range(2 * count)]
    return [
        ImageQuestion(
            tuple(pictures[2 * index : 2 * index + 1 + index % 2]),
            f"{index}. What color is the shape in the last image?",
            tokens,
        )
        for index in range(count)
    ]


def png(width: int, height: int, *, seed: int) -> bytes:
    """A PNG file of squares of random colors."""
    dice = random.Random(seed)
    columns, rows = -(-width // CELL), -(-height // CELL)
    colors = [[dice.randbytes(3) * CELL for _ in range(columns)] for _ in range(rows)]
    lines = [b"".join(colors[y // CELL])[: 3 * width] for y in range(height)]
    header = struct.pack("!II", width, height) + RGB_OF_8_BITS
    data = zlib.compress(b"".join(b"\0" + line for line in lines))
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, *zip(*chunks, strict=True)))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))
