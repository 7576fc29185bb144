"""The hashes by which ranks compare their states."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.protocol.ranks import (
    Digest,
    RankDiffers,
    compare,
    ids_of,
    joined,
    pairs,
    parted,
    sequence,
    set_hash,
)

IDS = st.lists(st.integers(0, 2**40), unique=True, max_size=40)


@given(IDS)
def test_a_set_has_one_hash_whatever_its_order_and_history(ids: list[int]) -> None:
    half = ids[: len(ids) // 2]
    assert set_hash(ids_of(ids)) == set_hash(ids_of(reversed(ids)))
    assert joined(joined(0, half), ids[len(half) :]) == set_hash(ids_of(ids))
    assert parted(set_hash(ids_of(ids)), half) == set_hash(ids_of(ids[len(half) :]))


@given(IDS.filter(bool), st.integers(0, 39))
def test_one_value_more_is_another_hash(ids: list[int], place: int) -> None:
    """Also where two rows' values only change places."""
    lengths = np.arange(len(ids))
    changed = lengths.copy()
    changed[place % len(ids)] += 1
    assert pairs(ids_of(ids), lengths) != pairs(ids_of(ids), changed)
    if len(ids) > 1:
        assert pairs(ids_of(ids), lengths) != pairs(ids_of(ids), lengths[::-1])
    assert pairs(ids_of(ids[::-1]), lengths[::-1]) == pairs(ids_of(ids), lengths)


def test_a_sequence_goes_on() -> None:
    assert sequence([1, 2]) != sequence([2, 1])
    assert sequence([2], sequence([1])) != sequence([2])


def test_f20_the_first_field_that_differs_is_named() -> None:
    expected = Digest(1, 2, 3, settled=4, order=5, tokens=6)
    compare(7, expected, Digest(1, 2, 3, settled=0, order=5, tokens=6))
    with pytest.raises(RankDiffers, match="step 7: its lengths differ") as caught:
        compare(7, expected, Digest(1, 9, 3, settled=4, order=0, tokens=6))
    assert (caught.value.field, caught.value.expected, caught.value.found) == ("lengths", 2, 9)
