"""Messages between ranks as bytes: a length, then msgpack of kind and fields. No pickle (D14)."""

# Fields come from a class's annotations, hence new fields need no code here. Default values are not
# sent: the classes of both ends agree, or `VERSION` differs.

from __future__ import annotations

import struct
import types
from typing import Any, cast, get_args, get_origin, get_type_hints

import attrs
import cattrs
import msgspec
import xxhash

from trouper.protocol.link import Message

LENGTH = struct.Struct("!I")
# Maximum size of a message, never reached by ranks.
MAX_BYTES = 2**28
KINDS: tuple[type, ...] = get_args(Message)


class NotUnderstood(Exception):
    """Bytes that are no message."""


def classes(kinds: tuple[type, ...]) -> list[type[attrs.AttrsInstance]]:
    found: dict[type[attrs.AttrsInstance], None] = {}
    todo: list[Any] = list(kinds)
    while todo:
        hint = todo.pop()
        if get_origin(hint) is not None or isinstance(hint, types.UnionType):
            todo += get_args(hint)
        elif attrs.has(hint) and hint not in found:
            found[hint] = None
            todo += get_type_hints(hint).values()
    return list(found)


def described(kinds: tuple[type, ...]) -> str:
    """Description of each class in messages, with fields, types and defaults."""
    return "\n".join(
        sorted(
            f"{cls.__name__}({', '.join(map(_shape_of, attrs.fields(cls)))})"
            for cls in map(attrs.resolve_types, classes(kinds))
        )
    )


def _shape_of(field: attrs.Attribute[Any]) -> str:
    return f"{field.name}: {field.type} = {field.default}"


# Hash of the classes. Ranks of different versions refuse each other.
VERSION = xxhash.xxh3_64_hexdigest(described(KINDS).encode())


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(omit_if_default=True, detailed_validation=False)
    converter.register_structure_hook(bytes, lambda value, _: value)
    converter.register_structure_hook(bytes | memoryview, lambda value, _: value)
    converter.register_unstructure_hook(bytes | memoryview, bytes)
    return converter


_CONVERTER = _converter()
_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()


def encode(message: Message) -> bytes:
    kind = KINDS.index(type(message))
    body = _ENCODER.encode((kind, _CONVERTER.unstructure(message)))
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Decode a body. Raises `NotUnderstood`."""
    try:
        kind, fields = _DECODER.decode(body)
        return cast(Message, _CONVERTER.structure(fields, KINDS[kind]))
    except Exception as error:
        # Msgspec and cattrs raise many types, including TypeError and IndexError.
        raise NotUnderstood(
            f"{len(body)} bytes are no message: {type(error).__name__}: {error}"
        ) from error


def body_length(prefix: bytes) -> int:
    """Decode the length of a body. Raises `NotUnderstood` above `MAX_BYTES`."""
    length: int = LENGTH.unpack(prefix)[0]
    if length > MAX_BYTES:
        raise NotUnderstood(f"a message of {length} bytes")
    return length
