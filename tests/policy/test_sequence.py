"""When an answer ends, and what is said last."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.actors.bench import Replies, generate, heard
from tests.fakes import EOS, ByteTokenizer
from tests.policy.reference import reference
from trouper import Settings
from trouper.actors.runtime.submission import open_submission
from trouper.actors.scheduling.crash_attribution import Standing, digests
from trouper.actors.scheduling.sequence import (
    QUEUED,
    TRANSITIONS,
    IllegalTransitionError,
    Sequence,
    State,
)
from trouper.actors.scheduling.tree_node import Chain, Node, token_bytes
from trouper.protocol.plans import RowId
from trouper.protocol.problems import Problem
from trouper.protocol.replies import Delta, Failed, Finished, TokenLogprobs


def a_row(
    max_tokens: int = 100, *, stream_interval: int = 1, **more: Any
) -> tuple[Sequence, Replies]:
    submission, answer = open_submission(generate(max_tokens=max_tokens, **more), Settings())
    chain = Chain(Node(b"", None, b"", 0), token_bytes((1, 2, 3)), 16)
    prepared = attrs.evolve(submission, prompt=(1, 2, 3), max_tokens=max_tokens)
    standing = Standing(*digests(prepared, b""))
    sequence = Sequence.of(
        prepared, standing, ByteTokenizer(), chain, stream_interval=stream_interval
    )
    sequence.enter(RowId(0))
    return sequence, answer


def take(row: Sequence, tokens: list[int]) -> Finished | None:
    for token in tokens:
        if (finished := row.append_token(token, None)) is not None:
            return finished
    return None


def spoken(answer: Replies) -> list[Delta]:
    deltas = [reply for reply in heard(answer) if isinstance(reply, Delta)]
    answer.close()
    return deltas


def test_f16_eos_is_known_by_its_id_whatever_its_text() -> None:
    row, answer = a_row()
    assert take(row, [*b"<eos>", EOS]) == Finished("stop", 6)
    assert "".join(delta.text for delta in spoken(answer)) == "<eos>"


def test_f16_ignore_eos_goes_on() -> None:
    row, answer = a_row(max_tokens=3, ignore_eos=True)
    assert take(row, [EOS, EOS, 97]) == Finished("length", 3)
    assert [delta.text for delta in spoken(answer)] == ["", "", "a"]


def test_a_stop_token_is_named_and_not_shown() -> None:
    row, answer = a_row(stop_token_ids=(98,))
    assert take(row, [97, 98]) == Finished("stop", 2, 98)
    assert [(delta.text, delta.tokens) for delta in spoken(answer)] == [("a", (97,)), ("", (98,))]


def test_a_stop_that_completes_with_the_last_token_is_no_length() -> None:
    row, answer = a_row(max_tokens=3, stop=("bc",))
    assert take(row, list(b"abc")) == Finished("stop", 3, "bc")
    assert "".join(delta.text for delta in spoken(answer)) == "a"


def test_f4_what_is_held_back_is_said_before_the_end() -> None:
    for last, finished in ((EOS, Finished("stop", 3)), (98, Finished("length", 3))):
        row, answer = a_row(max_tokens=3, stop=("abx", "bby"))
        assert take(row, [97, 98, last]) == finished
        deltas = spoken(answer)
        assert "".join(delta.text for delta in deltas) == "ab" + ("" if last == EOS else "b")
        assert [delta.tokens for delta in deltas] == [(97,), (98,), (last,)]


def test_a_torn_character_at_the_end_may_be_a_stop() -> None:
    row, _ = a_row(max_tokens=1, stop=("\ufffd",))
    assert take(row, [0xF0]) == Finished("stop", 1, "\ufffd")


def test_a_stop_string_ends_nothing_before_min_tokens() -> None:
    """It may complete with the token after them; before, it is text."""
    for least, produced in ((0, 2), (1, 2), (2, 4), (3, 4), (4, 6)):
        row, answer = a_row(stop=("ab",), min_tokens=least)
        assert take(row, list(b"abababab")) == Finished("stop", produced, "ab")
        assert "".join(delta.text for delta in spoken(answer)) == "ab" * (produced // 2 - 1)
    row, answer = a_row(max_tokens=4, stop=("ab",), min_tokens=4)
    assert take(row, list(b"abababab")) == Finished("length", 4)
    assert "".join(delta.text for delta in spoken(answer)) == "abab"


def test_kv_is_what_plans_have_run() -> None:
    """A prompt chunk by chunk, then one token less than were planned: the newest was not fed
    yet."""
    row, _ = a_row()
    seen = [row.num_computed_tokens]
    for chunk in (1, 2):
        row.schedule_chunk(chunk)
        seen.append(row.num_computed_tokens)
    for _ in range(3):
        row.schedule_token()
        seen.append(row.num_computed_tokens)
    assert seen == [0, 1, 3, 4, 5, 6]


def in_state(state: State) -> Sequence:
    row, _ = a_row()
    row.state = state
    return row


@pytest.mark.parametrize("before", State)
@pytest.mark.parametrize("after", State)
def test_a_transition_that_the_table_does_not_have_raises(before: State, after: State) -> None:
    row = in_state(before)
    if after in TRANSITIONS[before]:
        row.enter_state(after)
        assert row.state is after
    else:
        with pytest.raises(IllegalTransitionError, match=f"from {before.value} to {after.value}"):
            row.enter_state(after)
        assert row.state is before


def test_every_state_can_be_reached_and_left_for_the_end() -> None:
    assert set(TRANSITIONS) == set(State) == QUEUED.union(*TRANSITIONS.values())
    assert [state for state in State if State.FINISHED not in TRANSITIONS[state]] == [
        State.FINISHED
    ]


def test_what_a_preempted_sequence_has_to_compute_again() -> None:
    row, _ = a_row(max_tokens=5)
    row.schedule_chunk(3)
    for token in b"ab":
        row.append_token(token, None)
        row.schedule_token()
    row.preempt()
    row.enter(RowId(7))
    assert (row.num_unscheduled_tokens, row.num_resumed_tokens, row.num_computed_tokens) == (
        5,
        2,
        0,
    )
    row.schedule_chunk(5)
    assert (row.state, row.num_scheduled_tokens, row.room) == (State.DECODING, 3, 1)
    row.schedule_token()
    row.schedule_token()
    assert row.state is State.LAST_TOKEN_SCHEDULED


def test_logprobs_travel_with_their_token() -> None:
    row, answer = a_row()
    for token in (97, 98, EOS):
        row.append_token(token, TokenLogprobs(token, -0.5))
    assert [[one.token for one in delta.logprobs] for delta in spoken(answer)] == [[97], [98], []]


@given(
    tokens=st.lists(st.sampled_from([*"ab✂".encode(), EOS, 0xF0]), min_size=1, max_size=30),
    stops=st.lists(st.text("ab✂", min_size=1, max_size=4), max_size=2),
    max_tokens=st.integers(1, 20),
    stop_ids=st.sampled_from([(), (98,)]),
)
def test_f4_f16_one_end_with_the_right_text_and_count(
    tokens: list[int], stops: list[str], max_tokens: int, stop_ids: tuple[int, ...]
) -> None:
    row, answer = a_row(max_tokens=max_tokens, stop=tuple(stops), stop_token_ids=stop_ids)
    tokens += [EOS]
    finished = take(row, tokens)
    assert finished is not None
    used = tokens[:max_tokens]
    ended = next((n for n, token in enumerate(used) if token in (EOS, *stop_ids)), None)
    pieces = [bytes([token]) for token in used[:ended]] + ([b""] if ended is not None else [])
    text, stop, count = reference(pieces, stops)
    deltas = spoken(answer)
    assert "".join(delta.text for delta in deltas) == text
    assert finished.completion_tokens == count == sum(len(delta.tokens) for delta in deltas)
    assert finished.reason == ("stop" if stop is not None or ended is not None else "length")
    assert not isinstance(finished.matched_stop, str) or finished.matched_stop == stop
    assert len(deltas) <= max_tokens, "the reply channel has room for one Delta a token"


# -- --stream-interval ---------------------------------------------------------------------------


def test_a_delta_has_as_many_tokens_as_the_interval() -> None:
    """The first has one, so that the time to the first token is what it was; the last has what is
    left."""
    row, answer = a_row(max_tokens=9, stream_interval=3)
    assert take(row, [*b"abcdefghi"]) == Finished("length", 9)
    assert [delta.text for delta in spoken(answer)] == ["a", "bcd", "efg", "hi"]


@given(
    st.integers(1, 5),
    st.binary(min_size=1, max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
)
def test_an_interval_changes_neither_text_nor_tokens_nor_logprobs(
    size: int, data: bytes, stops: list[str]
) -> None:
    """An answer that ends by a stop string, by its length, or by the end of its text."""
    answers: list[object] = []
    for interval in (1, size):
        row, answer = a_row(max_tokens=15, stream_interval=interval, stop=tuple(stops), logprobs=0)
        finished = None
        for token in [*data, EOS]:
            if (finished := row.append_token(token, TokenLogprobs(token, -0.5))) is not None:
                break
        deltas = spoken(answer)
        assert all(len(delta.tokens) <= interval for delta in deltas)
        text = "".join(delta.text for delta in deltas)
        tokens = [token for delta in deltas for token in delta.tokens]
        logprobs = [seen for delta in deltas for seen in delta.logprobs]
        answers.append((finished, text, tokens, logprobs))
    assert answers[0] == answers[1]


def test_tokens_that_wait_for_their_delta_are_progress() -> None:
    """The limit between tokens counts from each token, not from the last Delta."""
    row, answer = a_row(stream_interval=50)
    row.append_token(97, None, 1.0)
    row.append_token(98, None, 2.5)
    # The client is a Submission.
    assert row.client.progress.latest.at == 2.5  # type: ignore[attr-defined]
    answer.close()


def test_an_error_comes_after_the_tokens_that_wait() -> None:
    row, answer = a_row(stream_interval=50)
    take(row, [*b"abc"])
    row.fail(Problem(500, "the engine stopped", "server_error"))
    *deltas, last = heard(answer)
    assert "".join(delta.text for delta in deltas if isinstance(delta, Delta)) == "abc"
    assert isinstance(last, Failed)
    answer.close()
