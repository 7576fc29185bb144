"""Pictures in questions of `trouper chat`: a pasted path becomes the picture."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote
from urllib.parse import quote as escaped
from urllib.parse import unquote, urlparse

import attrs
import httpx2

from trouper.actors.runtime.image_headers import ImageRefused, read_size
from trouper.cli.client import problem_of, read_as_trouper
from trouper.cli.conversation import CommandRefused, Content, Part
from trouper.protocol.media import ImageSize
from trouper.protocol.paths import expanded

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".avif")
WORD = re.compile(r"""'[^']+'|"[^"]+"|(?:\\.|[^\s'"\\])+""")
"""A word as a shell reads it: in quotes, or with escaped blanks."""
PUNCTUATION = "?!.,:;)"
"""What may stand behind a name at its end"""
MAX_BYTES = 20 * 2**20
"""As the server's bound on an image."""


@attrs.frozen(eq=False)
class Picture:
    name: str
    size: ImageSize
    part: Part

    @property
    def described(self) -> str:
        return f"{self.name}: {self.size.width} x {self.size.height}"


def parted(line: str) -> tuple[str, list[Path]]:
    """Return a line's text and the paths of pictures in it."""
    paths: list[Path] = []
    text = "".join(_without_paths(line, paths))
    return (text.strip(), paths) if paths else (line, [])


def _without_paths(line: str, paths: list[Path]) -> Iterator[str]:
    behind = 0
    for begin, end, name in _names(line):
        path = _file_at(name) if name.lower().endswith(ENDINGS) else None
        if path is not None:
            yield line[behind:begin]
            behind = end
            paths.append(path)
    yield line[behind:]


def _names(line: str) -> Iterator[tuple[int, int, str]]:
    """Begin, end and meaning of each word."""
    for word in WORD.finditer(line):
        typed = word[0] if word[0][0] in "'\"" else word[0].rstrip(PUNCTUATION)
        name = typed[1:-1] if typed[:1] in ("'", '"') else re.sub(r"\\(.)", r"\1", typed)
        if name.lower().startswith("file://"):
            with suppress(ValueError):  # Such as half of an IPv6 address, which names no file.
                name = unquote(urlparse(name).path)
        yield word.start(), word.start() + len(typed), name


def _file_at(name: str) -> Path | None:
    try:
        path = expanded(name)
        return path if path.is_file() else None
    except (OSError, ValueError, RuntimeError):
        return None


def unattached(question: str) -> Iterator[str]:
    """Say which files of a question go along as words only. Of several lines, as a pipe or a paste
    has them, nothing is said: they may name many."""
    if "\n" in question:
        return
    for _, _, name in _names(question):
        path, is_picture = _file_at(name), name.lower().endswith(ENDINGS)
        if is_picture and path is None:
            yield f"{name} is not attached: there is no such file"
        elif not is_picture and "." in name and path is not None:
            yield (
                f"{name} is not attached: pictures end in {', '.join(ENDINGS)}; a text goes along "
                f'by "$(cat {quote(name)})", or by /file in a conversation'
            )


def read_picture(path: Path) -> Picture:
    """Raises `CommandRefused`."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CommandRefused(f"{path.name} is larger than {MAX_BYTES // 2**20} MiB")
        data = path.read_bytes()
        size = read_size(data)
    except OSError as error:
        raise CommandRefused(f"{path}: {error.strerror}") from error
    except ImageRefused as refused:
        raise CommandRefused(f"{path.name}: {refused.reason}") from refused
    url = f"data:image/{size.format};base64,{b64encode(data).decode()}"
    return Picture(path.name, size, {"type": "image_url", "image_url": {"url": url}})


def content_of(text: str, pictures: list[Part]) -> Content:
    return [*pictures, {"type": "text", "text": text}] if pictures else text


def reads_images(client: httpx2.Client, model: str) -> bool:
    """Raises `NotTrouper`, or httpx2's errors."""
    answer = client.get(f"/v1/models/{escaped(model)}").raise_for_status()
    with read_as_trouper(client):
        return "image" in answer.json().get("input_modalities", ("image",))


def count_tokens(client: httpx2.Client, model: str | None, picture: Picture) -> int:
    """Tokens of the picture in a prompt. Raises `CommandRefused` for a picture that the server
    refuses, `NotTrouper`, or httpx2's errors."""
    counts = [_count(client, model, content) for content in ([picture.part], "")]
    return counts[0] - counts[1]


def _count(client: httpx2.Client, model: str | None, content: Content) -> int:
    named = {} if model is None else {"model": model}
    body = named | {"messages": [{"role": "user", "content": content}]}
    answer = client.post("/tokenize", json=body)
    if answer.is_error:
        raise CommandRefused(problem_of(answer))
    with read_as_trouper(client):
        return int(answer.json()["count"])
