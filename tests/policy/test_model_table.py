"""Which model is unloaded for another one, and which states follow each other
(trouper/actors/runtime/model_table.py)."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.runtime.model_table import (
    AWAY,
    COMING,
    TRANSITIONS,
    Load,
    LoadLimits,
    ModelRow,
    Refuse,
    State,
    Unload,
    loaded,
    next_for,
)

STATES = st.sampled_from(sorted(TRANSITIONS))
ROWS = st.builds(
    ModelRow,
    names=st.just(("model",)),
    state=st.just("ready") | STATES,
    weights_bytes=st.integers(1, 10),
    leases=st.integers(0, 1),
    used_at=st.integers(0, 5),
    pinned=st.booleans(),
    ttl_s=st.sampled_from([0.0, 3.0]),
)
LIMITS = st.builds(LoadLimits, st.integers(1, 25), st.none() | st.integers(1, 4))
NEW = st.builds(
    ModelRow, names=st.just(("new",)), state=st.just("waiting"), weights_bytes=st.integers(1, 10)
)


def fits(rows: list[ModelRow], new: ModelRow, limits: LoadLimits) -> bool:
    held = loaded(rows)
    if limits.max_models is not None and len(held) >= limits.max_models:
        return False
    nbytes = sum(row.weights_bytes for row in held)
    return not held or nbytes + new.weights_bytes <= limits.weights_bytes


@given(st.lists(ROWS, max_size=6), NEW, LIMITS)
def test_idle_models_go_until_it_fits(
    rows: list[ModelRow], new: ModelRow, limits: LoadLimits
) -> None:
    """Only idle ones go, least recently used first, and none for nothing."""
    removed: list[ModelRow] = []
    while isinstance(step := next_for([*rows, new], new, limits), Unload):
        assert step.model.state == "ready" and not step.model.leases and not step.model.pinned
        removed.append(step.model)
        step.model.enter("unloading")
        step.model.leave()
    assert removed == sorted(removed, key=lambda row: row.used_at)
    assert isinstance(step, Load) == fits(rows, new, limits)
    assert not removed or isinstance(step, Load)


@given(st.lists(ROWS, max_size=6), NEW, LIMITS)
def test_a_wait_ends_when_nobody_uses_a_model(
    rows: list[ModelRow], new: ModelRow, limits: LoadLimits
) -> None:
    """Refused is what pinned models leave no room for, and nothing else."""
    step = next_for([*rows, new], new, limits)
    pinned = [row for row in rows if row.state == "ready" and row.pinned]
    assert isinstance(step, Refuse) == (not fits(pinned, new, limits))
    for row in rows:
        row.leases = 0
        if row.state in ("silent", "unloading", "ending"):
            row.leave()
    assert next_for([*rows, new], new, limits) is not None


@given(STATES, st.lists(STATES, max_size=8))
def test_states_follow_the_table(first: State, wishes: list[State]) -> None:
    row = ModelRow(("model",), first)
    for wish in wishes:
        before = row.state
        if wish == before or wish in TRANSITIONS[before]:
            row.enter(wish)
        else:
            with pytest.raises(AssertionError, match="cannot be"):
                row.enter(wish)
            assert row.state == before
    assert row.has_weights == (row.state not in (*AWAY, *COMING) or row.state == "silent")


@given(ROWS)
def test_only_an_idle_model_sleeps(row: ModelRow) -> None:
    is_idle = row.state == "ready" and not row.leases and not row.pinned
    assert row.sleeps_at == (row.used_at + 3.0 if is_idle and row.ttl_s else inf)


def test_a_model_that_crashes_is_unloaded() -> None:
    row = ModelRow(("model",), "ready")
    row.enter("unloading")
    row.away_as = "asleep"
    row.leave()
    assert (row.state, row.away_as) == ("asleep", "unloaded")
    row.enter("waiting")
    row.enter("loading")
    row.enter("ready")
    row.leave()
    assert row.state == "unloaded"
