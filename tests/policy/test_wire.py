"""D14: what ranks send each other is msgpack of plain classes, and comes back as it went."""

from __future__ import annotations

from typing import Any, get_args

import attrs
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from trouper.protocol.blocks import Tensor
from trouper.protocol.link import Leave, Message
from trouper.protocol.media import ImageLayout
from trouper.protocol.plans import BlockId, Load, Plan
from trouper.protocol.wire import (
    KINDS,
    LENGTH,
    MAX_BYTES,
    NotUnderstood,
    body_length,
    decode,
    described,
    encode,
)

st.register_type_strategy(
    Tensor,
    st.builds(Tensor, st.sampled_from(["F32", "U8"]), st.tuples(st.integers(0, 9)), st.binary()),
)
st.register_type_strategy(ImageLayout, st.none())  # Several ranks take no images.
INT64 = st.integers(-(2**63), 2**64 - 1)
st.register_type_strategy(int, INT64)
st.register_type_strategy(float, st.floats(allow_nan=False))  # Not equal to itself.


def plain(value: object) -> Any:
    """Tensors are not equal by their content; everything else is."""
    return attrs.asdict(value, recurse=True) if attrs.has(type(value)) else value  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_every_message_comes_back_as_it_went(kind: type) -> None:
    """Every field of every class, with values of its type: a new one is tried as soon as it
    exists."""

    @settings(
        max_examples=20, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow]
    )
    @given(st.from_type(kind))
    def there_and_back(message: Any) -> None:
        frame = encode(message)
        assert body_length(frame[:4]) == len(frame) - 4
        back = decode(frame[4:])
        assert type(back) is kind
        assert plain(back) == plain(message)
        assert encode(back) == frame

    there_and_back()


def test_memory_travels_as_bytes() -> None:
    load = Load(BlockId(3), (Tensor("U8", (2,), memoryview(b"ab")),))
    back = decode(encode(Plan(1, load=(load,)))[4:])
    assert isinstance(back, Plan)
    assert back.load[0].payload[0].data == b"ab"


def test_the_kinds_are_the_messages() -> None:
    assert set(KINDS) == set(get_args(Message))
    assert {"Sampling", "Grammar", "ThinkingLimit", "Restore", "Digest"} <= {
        line.split("(")[0] for line in described(KINDS).splitlines()
    }


def test_no_message_has_a_set() -> None:
    """A set's order differs from process to process: equal messages would have other bytes."""
    assert [line for line in described(KINDS).splitlines() if "set[" in line] == []


def test_a_new_field_is_another_version() -> None:
    @attrs.frozen
    class Old:
        step: int

    @attrs.frozen
    class New:
        step: int
        more: int = 0

    New.__name__ = "Old"
    assert described((Old,)) != described((New,))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        b"\x92\x00\x90",
        b"\x92\x63\x90",
        b"\x93\x01\x02",
        encode(Leave())[4:-1],
        b"\x80\x04K\x01.",
    ],
)
def test_what_is_no_message_is_not_understood(body: bytes) -> None:
    """The last one is a pickle."""
    with pytest.raises(NotUnderstood):
        decode(body)


def test_a_message_is_not_larger_than_a_rank_would_send() -> None:
    with pytest.raises(NotUnderstood, match="a message of"):
        body_length(LENGTH.pack(MAX_BYTES + 1))
