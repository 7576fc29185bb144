"""Images in the content of messages: data URLs, base64, uploaded files, and addresses of servers
that `--allowed-media-domains` names.

No other address is read: a server that fetches what clients name reaches its own network
(CVE-2025-6242).
"""

from __future__ import annotations

import re
from base64 import b64encode
from binascii import a2b_base64
from collections.abc import Callable, Iterable
from typing import Annotated, Any, get_args

import attrs
from msgspec import Meta

from trouper.protocol.media import Detail, ImageFormat, ImageSource
from trouper.protocol.problems import RequestFailed, bad_request
from trouper.web.http.request_schema import Json

MAX_IMAGE_BYTES = 20 * 2**20
MAX_IMAGES = 64
"""Images of a request, those of earlier turns among them."""
IMAGE_TYPES = get_args(ImageFormat)
OTHER_NAMES = {"jpg": "jpeg", "pjpeg": "jpeg", "x-png": "png", "x-ms-bmp": "bmp", "x-bmp": "bmp"}
IMAGE_PART: Json = {"type": "image"}
"""Part of a message for the chat template."""
PIECE = 2**20
"""Characters decoded at a time: no other thread waits longer for the GIL."""
DATA_URL = re.compile(r"data:([^,;]{0,100})((?:;[^,;]{0,100}){0,4}),", re.IGNORECASE)
REMEDY = "send the image as a data URL (data:image/png;base64,...), or upload it by POST /v1/files"
ImageField = Annotated[
    Any,
    Meta(
        description="The image as a data URL, as an address of --allowed-media-domains, or as the "
        "id of an uploaded file. A model that reads text only gets a placeholder, whatever this is."
    ),
]
DETAILS: dict[str, Detail] = {name: name for name in get_args(Detail)} | {"original": "high"}
"""`original`: OpenAI's name for all pixels."""


@attrs.frozen
class UploadedImage:
    """A file of `/v1/files` that a client names."""

    file_id: str
    origin: str
    detail: Detail


@attrs.frozen
class RemoteImage:
    """A file of another server, at an address that may be fetched."""

    url: str = attrs.field(repr=False)
    origin: str
    detail: Detail


CheckAddress = Callable[[str, str], None]
"""Raises `RequestFailed` (400) for an address that is not fetched; the second argument is the path
of its part."""


class ImageParts:
    """Reads the image parts of one conversation, in order.

    `roles`: roles whose messages can hold images; of others, and of none for a model that reads
    text only, nothing is read or refused. `check_address`: None if no address is fetched."""

    def __init__(
        self, roles: Iterable[str] = (), check_address: CheckAddress | None = None
    ) -> None:
        self.roles = frozenset(roles)
        self.sources: list[ImageSource | UploadedImage | RemoteImage] = []
        self._check_address = check_address
        self._unread: dict[str, None] = {}

    @property
    def unread(self) -> tuple[str, ...]:
        """Types of parts that a placeholder replaces, by the API's name."""
        return tuple(self._unread)

    def takes(self, role: str, kind: str) -> bool:
        """Whether the role's images are read; else `kind` is noted."""
        if role in self.roles:
            return True
        self._unread[kind] = None
        return False

    def add(self, image: Json, path: str) -> Json:
        """Read an image, and return its part for the template. `image`: as of `fields_of`.
        `path`: of the part. Raises `RequestFailed` (400)."""
        if len(self.sources) == MAX_IMAGES:
            message = f"{path} is image {MAX_IMAGES + 1} of the request; there may be {MAX_IMAGES}"
            raise bad_request(f"{message}: leave the oldest out", path, "too_many_images")
        detail = _detail_of(image.get("detail"), path)
        data, url, file_id = image.get("data"), image.get("url"), image.get("file_id")
        if isinstance(data, str):
            check_type(str(image.get("media_type") or ""), path)
            self.sources.append(ImageSource(decoded_base64(data, 0, path), path, detail))
        elif isinstance(url, str) and self._check_address is not None and is_remote(url):
            self._check_address(url, path)
            self.sources.append(RemoteImage(url, path, detail))
        elif isinstance(url, str):
            self.sources.append(ImageSource(data_of(url, path), path, detail))
        elif isinstance(file_id, str):
            self.sources.append(UploadedImage(file_id, path, detail))
        else:
            raise bad_request(f"{path} has no image: {REMEDY}", path, "invalid_type")
        return IMAGE_PART


def _detail_of(name: object, path: str) -> Detail:
    if name is None:
        return "auto"
    if not isinstance(name, str) or name not in DETAILS:
        message = f"{path}: detail must be one of {', '.join(get_args(Detail))}"
        raise bad_request(message, path, "invalid_value")
    return DETAILS[name]


def is_remote(url: str) -> bool:
    return url[:6].lower().startswith(("http:", "https:"))


def data_of(url: str, path: str) -> bytes:
    """Raises `RequestFailed` (400)."""
    head = DATA_URL.match(url)
    if head is None:
        raise _not_read(url, path)
    check_type(head[1], path)
    if not head[2].lower().endswith(";base64"):
        raise bad_request(f"{path}: the data URL must be in base64", path, "image_damaged")
    return decoded_base64(url, head.end(), path)


def _not_read(url: str, path: str) -> RequestFailed:
    """The refusal of an address. Never repeats the address, which may be a secret."""
    if is_remote(url):
        message = (
            f"{path}: this server fetches no images from other servers (--allowed-media-domains); "
            f"{REMEDY}"
        )
        return bad_request(message, path, "remote_media_disabled")
    if url[:6].lower().startswith("data:"):
        message = f"{path}: the data URL has no comma behind its type, or a type beyond measure"
        return bad_request(message, path, "image_damaged")
    message = f"{path}: paths and other addresses are never read; {REMEDY}"
    return bad_request(message, path, "media_not_allowed")


def data_url(data: bytes) -> str:
    """Return a file as `data_of` reads it."""
    return f"data:application/octet-stream;base64,{b64encode(data).decode()}"


def check_type(media_type: str, path: str) -> None:
    """Refuse a type that is no image, or another. Raises `RequestFailed` (400)."""
    # The file's content decides between the kinds that are read.
    kind = media_type.strip().lower()
    name = kind.removeprefix("image/")
    if kind in ("", "application/octet-stream", "image/*"):
        return
    if name == kind or OTHER_NAMES.get(name, name) not in IMAGE_TYPES:
        types = ", ".join(IMAGE_TYPES)
        message = f"{path} is of type {media_type[:40]!r}; images may be {types}: convert it"
        raise bad_request(message, path, "image_format")


def decoded_base64(text: str, start: int, path: str) -> bytes:
    """Decode `text` from `start` on, strictly: no blanks, complete padding. Raises `RequestFailed`
    (400)."""
    size = len(text) - start
    if size // 4 * 3 > MAX_IMAGE_BYTES + 2:
        raise too_large(path)
    # Padding in the middle would end one of the pieces well.
    if size % 4 or text.find("=", start, len(text) - 2) >= 0:
        raise _no_base64(path)
    try:
        pieces = [
            a2b_base64(text[at : at + PIECE], strict_mode=True)
            for at in range(start, len(text), PIECE)
        ]
    except ValueError:
        raise _no_base64(path) from None
    data = b"".join(pieces)
    if not data:
        raise bad_request(f"{path}: the image is empty", path, "image_damaged")
    if len(data) > MAX_IMAGE_BYTES:
        raise too_large(path)
    return data


def _no_base64(path: str) -> RequestFailed:
    message = f"{path} is not valid base64: send it without blanks and with its padding"
    return bad_request(message, path, "image_damaged")


def too_large(path: str) -> RequestFailed:
    message = (
        f"{path} is larger than {MAX_IMAGE_BYTES // 2**20} MiB; send a smaller one, as models see "
        "few of its pixels"
    )
    return bad_request(message, path, "image_too_large")


def content_of(pieces: Iterable[str | Json], separator: str = "") -> str | list[Json]:
    """Content of a message for the template: text, or parts if there are images. Texts that are
    neighbours are joined with `separator`."""
    content = list[Json]()
    for piece in pieces:
        if not isinstance(piece, str):
            content.append(piece)
        elif content and content[-1]["type"] == "text":
            content[-1] = {"type": "text", "text": content[-1]["text"] + separator + piece}
        else:
            content.append({"type": "text", "text": piece})
    if all(part["type"] == "text" for part in content):
        return "".join(part["text"] for part in content)
    return [part for part in content if part["type"] != "text" or part["text"]]


def joined_content(
    first: str | list[Json], second: str | list[Json], separator: str
) -> str | list[Json]:
    return content_of((*_pieces(first), *_pieces(second)), separator)


def _pieces(content: str | list[Json]) -> list[str | Json]:
    if isinstance(content, str):
        return [content] if content else []
    return [part["text"] if part["type"] == "text" else part for part in content]


# -- parts of every dialect ----------------------------------------------------------------------


def fields_of(part: Json) -> Json:
    """Return `url`, `file_id`, or `data` (base64) with `media_type`, and `detail`, of an image part
    in the form of any dialect: OpenAI's `image_url` and `input_image`, Anthropic's `image`."""
    if "source" in part:
        return fields_of_source(part["source"])
    image = part.get("image_url", part.get("url", part.get("image")))
    fields = dict(image) if isinstance(image, dict) else {"url": image}
    return {
        "url": fields.get("url"),
        "file_id": part.get("file_id", fields.get("file_id")),
        "detail": fields.get("detail", part.get("detail")),
    }


def fields_of_source(source: Any) -> Json:
    """As `fields_of`, of Anthropic's `source`."""
    if not isinstance(source, dict):
        return {"url": source}
    match source.get("type"):
        case "base64":
            return {"data": source.get("data"), "media_type": source.get("media_type")}
        case "file":
            return {"file_id": source.get("file_id")}
    return {"url": source.get("url")}


def url_fields_of(part: Json) -> Json:
    """As `fields_of`, with base64 as a data URL."""
    fields = fields_of(part)
    if not isinstance(data := fields.get("data"), str):
        return fields
    kind = fields.get("media_type")
    return {"url": f"data:{kind if isinstance(kind, str) else ''};base64,{data}"}
