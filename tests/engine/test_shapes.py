"""Shapes of passes: pure, but for the question what the device likes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trouper.engine.passes.pass_shapes import (
    ACCELERATED,
    EXACT,
    LONE_WIDTHS,
    NO_CUDNN,
    ROUNDED,
    Shapes,
)

KINDS = (EXACT, ACCELERATED, ROUNDED)
counts_of_rows = st.lists(st.one_of(st.just(0), st.integers(1, 3000)), max_size=8)


@given(st.integers(1, 200_000), st.sampled_from([(ROUNDED.width, 8), (ROUNDED.capacity, 256)]))
@example(2041, (ROUNDED.capacity, 256))
def test_few_sizes_that_waste_little(size: int, rounding: tuple[Callable[[int], int], int]) -> None:
    rounds, step = rounding
    rounded = rounds(size)
    assert size <= rounded < size + NO_CUDNN + max(step, (size + NO_CUDNN) / 4 + 1)
    assert rounds(rounded) == rounded


def test_how_many_sizes_there_are() -> None:
    """Each is prepared once."""
    assert len({ROUNDED.width(size) for size in range(2, 2049)}) <= 32
    assert len({ROUNDED.capacity(size) for size in range(1, 131_073)}) <= 32


@pytest.mark.parametrize("shapes", KINDS)
def test_what_is_looked_at_is_there(shapes: Shapes) -> None:
    sizes = range(1, 5000, 7)
    assert all(size <= shapes.keys(size) <= shapes.capacity(size) for size in sizes)
    assert all(shapes.capacity(a) <= shapes.capacity(b) for a, b in pairwise(sizes))


@pytest.mark.parametrize("shapes", KINDS)
def test_decoding_is_not_padded(shapes: Shapes) -> None:
    assert shapes.width(1) == 1
    assert all(tokens <= shapes.width(tokens) for tokens in range(1, 300))


def test_each_lone_prompt_has_a_width_that_was_prepared() -> None:
    compiled = attrs.evolve(ROUNDED, length_kernel=True)
    for tokens in range(2, compiled.lone_tokens + 1):
        width = compiled.lone_width(tokens)
        assert width in LONE_WIDTHS
        assert tokens <= width < tokens + 64
    assert compiled.lone_width(1) == 1
    beyond = compiled.lone_tokens + 1
    assert compiled.lone_width(beyond) == compiled.width(beyond)
    assert all(ROUNDED.lone_width(tokens) == ROUNDED.width(tokens) for tokens in (1, 33, 500))


@given(st.sampled_from(KINDS), counts_of_rows)
def test_groups_are_the_cheapest(shapes: Shapes, counts: list[int]) -> None:
    groups = shapes.groups(counts)
    covered = [place for group in groups for place in group]
    assert covered == sorted(set(covered))
    assert {place for place, count in enumerate(counts) if count} <= set(covered)
    assert all(counts[group.start] and counts[group.stop - 1] for group in groups)
    assert price(shapes, counts, groups) == min(
        (price(shapes, counts, some) for some in partitions(counts)), default=0
    )


def price(shapes: Shapes, counts: Sequence[int], groups: Sequence[range]) -> int:
    return sum(
        shapes.pass_tokens + len(group) * shapes.width(max(counts[place] for place in group))
        for group in groups
    )


def partitions(counts: Sequence[int]) -> list[list[range]]:
    """All ways to cut the places that have tokens into runs."""
    places = [place for place, count in enumerate(counts) if count]
    found: list[list[range]] = []
    for cuts in range(1 << max(len(places) - 1, 0)):
        ends = [n + 1 for n in range(len(places) - 1) if cuts >> n & 1]
        bounds = pairwise([0, *ends, len(places)])
        found.append([range(places[a], places[b - 1] + 1) for a, b in bounds if b > a])
    return found


@pytest.mark.parametrize(
    ("counts", "groups"),
    [
        ([50, 51, 49, 53], [range(4)]),
        ([0, 20, 20, 2000, 20], [range(1, 3), range(3, 4), range(4, 5)]),
        ([0, 0], []),
    ],
)
def test_prompts_alike_share_a_pass_and_a_long_one_has_its_own(
    counts: list[int], groups: list[range]
) -> None:
    assert EXACT.groups(counts) == groups
