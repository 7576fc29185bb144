"""Images of stored responses: each once per key, however often its client sends it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from hashlib import sha256
from sqlite3 import Connection

import msgspec

from trouper.web.output.dialect import Json

PREFIX = "sha256:"
"""Beginning of what stands for a data URL in a stored item."""


def take_out(item: Json) -> tuple[Json, dict[str, str]]:
    """Return an item with digests in place of images, and the data URLs by digest."""
    urls: dict[str, str] = {}

    def digest_of(url: str) -> str:
        if not url.startswith("data:"):
            return url
        digest = sha256(url.encode()).hexdigest()
        urls[digest] = url
        return PREFIX + digest

    return _changed(item, digest_of), urls


def _changed(item: Json, change: Callable[[str], str]) -> Json:
    name = "content" if item.get("type") == "message" else "output"
    content = item.get(name)
    if not isinstance(content, list) or not any(map(_has_image, content)):
        return item
    return item | {
        name: [
            part | {"image_url": change(part["image_url"])} if _has_image(part) else part
            for part in content
        ]
    }


def _has_image(part: Json) -> bool:
    return part.get("type") == "input_image" and isinstance(part.get("image_url"), str)


def insert(connection: Connection, response_id: str, owner: str, urls: Mapping[str, str]) -> None:
    connection.executemany(
        "INSERT OR IGNORE INTO images (owner, digest, size, url) VALUES (?, ?, ?, ?)",
        [(owner, digest, len(url), url) for digest, url in urls.items()],
    )
    connection.executemany(
        "INSERT INTO response_images (response, owner, digest) VALUES (?, ?, ?)",
        [(response_id, owner, digest) for digest in urls],
    )


def read_items(connection: Connection, rows: Iterable[tuple[bytes, str]]) -> list[Json]:
    """Return the items of rows (item, owner), with their images."""
    urls: dict[tuple[str, str], str] = {}

    def url_of(owner: str, text: str) -> str:
        if not text.startswith(PREFIX):
            return text
        key = (owner, text.removeprefix(PREFIX))
        if key not in urls:
            select = "SELECT url FROM images WHERE owner = ? AND digest = ?"
            [urls[key]] = connection.execute(select, key).fetchone()
        return urls[key]

    return [_changed(msgspec.json.decode(item), partial(url_of, owner)) for item, owner in rows]


def remove_unneeded(connection: Connection) -> None:
    connection.execute(
        "DELETE FROM images WHERE NOT EXISTS (SELECT 1 FROM response_images AS needed "
        "WHERE needed.owner = images.owner AND needed.digest = images.digest)"
    )
