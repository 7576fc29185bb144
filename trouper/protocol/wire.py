"""Messages between ranks as bytes: a length, then msgpack of the message's kind and its fields. No pickle (D14).

What a class is made of is read from its annotations, so a new field is on the wire the moment it exists. Fields with their
default's value do not travel: both ends have the same classes, or their `VERSION` differs.
"""

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
MOST_BYTES = 2**28
"""Of one message. More is not from a rank."""
KINDS: tuple[type, ...] = get_args(Message)


class NotUnderstood(Exception):
    """Bytes that are no message."""


def classes(kinds: tuple[type, ...]) -> list[type[attrs.AttrsInstance]]:
    """These and all that their fields are made of."""
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
    """Every class that can be in a message, with its fields and their types."""
    return "\n".join(
        sorted(
            f"{cls.__name__}({', '.join(f'{field.name}: {field.type} = {field.default}' for field in attrs.fields(cls))})"
            for cls in map(attrs.resolve_types, classes(kinds))
        )
    )


VERSION = xxhash.xxh3_64_hexdigest(described(KINDS).encode())
"""Of the classes: ranks of different versions do not talk."""


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(omit_if_default=True, detailed_validation=False)
    converter.register_structure_hook(bytes, lambda value, _: value)
    converter.register_structure_hook(bytes | memoryview, lambda value, _: value)
    converter.register_unstructure_hook(bytes | memoryview, bytes)
    return converter


_CONVERTER = _converter()
_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()


def encode(message: Message) -> bytes:
    """The whole frame."""
    kind = KINDS.index(type(message))
    body = _ENCODER.encode((kind, _CONVERTER.unstructure(message)))
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """A frame without its length. Raises `NotUnderstood`."""
    try:
        kind, fields = _DECODER.decode(body)
        return cast(Message, _CONVERTER.structure(fields, KINDS[kind]))
    except Exception as error:  # msgspec and cattrs raise what they like, TypeErrors and IndexErrors among it.
        raise NotUnderstood(f"{len(body)} bytes are no message: {type(error).__name__}: {error}") from error


def body_length(prefix: bytes) -> int:
    """Raises `NotUnderstood`."""
    length: int = LENGTH.unpack(prefix)[0]
    if length > MOST_BYTES:
        raise NotUnderstood(f"a message of {length} bytes")
    return length
