"""TextStream against the naive reference: however tokens cut the bytes, the same text and the same
stop (F4)."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.policy.reference import reference, shown_so_far, stopped
from trouper.actors.scheduling.answer_output import TextStream

# Few letters, so that stops really occur; characters of one to four bytes, and one made of several.
ALPHABET = "abé✂🦜👩‍🚀"
TEXTS = st.text(ALPHABET, max_size=40)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=6), max_size=3).map(tuple)
TORN = st.one_of(
    TEXTS.map(str.encode),
    st.binary(max_size=40),
    st.lists(
        st.sampled_from(
            [b"a", b"b", b"\xc3", b"\xa9", b"\xf0\x9f", b"\xa6\x9c", b"\xe2\x9c\x82", b"\xff"]
        ),
        max_size=30,
    ).map(b"".join),
)


@st.composite
def cut(draw: st.DrawFn, data: st.SearchStrategy[bytes] = TORN) -> list[bytes]:
    """Bytes in pieces, some of them empty as those of special tokens are."""
    whole = draw(data)
    places = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=len(whole) + 3)))
    return [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]


def streamed(pieces: list[bytes], stops: tuple[str, ...]) -> tuple[list[str], str | None, int]:
    """(every text that was shown, the stop, how many pieces it took)."""
    stream, shown = TextStream(stops), []
    for used, piece in enumerate(pieces, 1):
        part = stream.push(piece)
        shown.append(part)
        if stream.stop is not None:
            return shown, stream.stop, used
    return [*shown, stream.flush()], stream.stop, len(pieces)


@given(cut(), STOPS)
@example([b"a", b"b"], ("ab", "b"))
@example([b"aab"], ("ab", "aab"))
@example([b"aab"], ("aab", "a"))
@example([b"aba"], ("aba", "b"))
@example([b"\xf0\x9f", b"\xa6\x9c"], ("🦜",))
@example([b"a\xf0\x9f"], ("\ufffd",))
def test_f4_equals_the_naive_reference(pieces: list[bytes], stops: tuple[str, ...]) -> None:
    shown, stop, used = streamed(pieces, stops)
    assert ("".join(shown), stop, used) == reference(pieces, stops)


@given(st.data(), TORN, STOPS)
def test_f4_the_cut_does_not_matter(
    data: st.DataObject, whole: bytes, stops: tuple[str, ...]
) -> None:
    """Streaming is any cut; not streaming is none."""
    pieces = data.draw(cut(st.just(whole)))
    one, other = streamed(pieces, stops), streamed([whole], stops)
    assert ("".join(one[0]), one[1]) == ("".join(other[0]), other[1])


@given(cut(), STOPS)
def test_f4_holds_back_no_more_than_it_must(pieces: list[bytes], stops: tuple[str, ...]) -> None:
    stream, data, shown = TextStream(stops), b"", ""
    for piece in pieces:
        data += piece
        part = stream.push(piece)
        if stream.stop is not None:
            return
        shown += part
        held = len(shown_so_far(data)) - len(shown)
        assert 0 <= held <= max((len(stop) - 1 for stop in stops), default=0)


@given(cut(), STOPS)
def test_f4_what_was_shown_stays_and_holds_no_stop(
    pieces: list[bytes], stops: tuple[str, ...]
) -> None:
    text = "".join(streamed(pieces, stops)[0])
    assert not any(stop in text for stop in stops)
    assert b"".join(pieces).decode("utf-8", "replace").startswith(text)


@given(cut(), STOPS, st.integers(0, 6))
@example([b"a", b"b"], ("ab",), 1)
@example([b"ab", b"x"], ("abc", "b"), 1)
def test_f4_what_may_not_stop_yet_is_text_and_what_completes_later_stops(
    pieces: list[bytes], stops: tuple[str, ...], free: int
) -> None:
    """The naive way: of all stops in the text the first that completes behind the free pieces,
    wherever it begins."""
    stream, shown = TextStream(stops), ""
    for place, piece in enumerate(pieces):
        shown += stream.push(piece, may_stop=place >= free)
        if stream.stop is not None:
            break
    else:
        shown += stream.flush()
    whole = b"".join(pieces).decode("utf-8", "replace")
    hit = stopped(whole, stops, len(shown_so_far(b"".join(pieces[:free])))) if stops else None
    assert (shown, stream.stop) == (hit if hit is not None else (whole, None))


@given(cut(TEXTS.map(str.encode)))
def test_no_piece_shows_half_a_character(pieces: list[bytes]) -> None:
    shown, _, _ = streamed(pieces, ())
    assert all("\ufffd" not in text for text in shown)
    assert "".join(shown) == b"".join(pieces).decode()


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop"),
    [
        ([b"Hello E", b"N", b"D more"], ("END",), "Hello ", "END"),
        ([b"Hello E", b"N", b"D"], ("ENDS",), "Hello END", None),
        (["caf\u00e9".encode()[:-1], "\u00e9!".encode()[1:]], ("é",), "caf", "é"),
        ([b"\xf0", b"\x9f", b"\xa6", b"\x9c!"], ("🦜",), "", "🦜"),
        (["👩‍".encode(), "🚀".encode()], ("👩‍🚀",), "", "👩‍🚀"),
        ([b"ab\xf0\x9f"], (), "ab\ufffd", None),
        ([b"ab\xf0\x9f", b"c"], ("c",), "ab\ufffd", "c"),
        ([b"aaab"], ("aab",), "a", "aab"),
        ([b"one\ntwo\n\nthree"], ("\n\n", "\n"), "one", "\n"),
    ],
)
def test_f4_by_example(
    pieces: list[bytes], stops: tuple[str, ...], text: str, stop: str | None
) -> None:
    shown, met, _ = streamed(pieces, stops)
    assert ("".join(shown), met) == (text, stop)
