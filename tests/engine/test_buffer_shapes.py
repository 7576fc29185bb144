"""What a step knows of the shapes of buffers (trouper/engine/kv/slot_cache.py): if it were old,
tokens would be written behind a buffer's end."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.engine.test_decode_attention import (
    BY_LENGTH,
    ONE_BANK,
    PROMPTS,
    kernel,
    lone_prompts,
    two_rows,
)
from tests.engine.test_exactness import greedy_requests, model_of, play_randomly
from tests.family_configs import VOCABULARY
from trouper.engine.kv import slot_cache
from trouper.engine.kv.compiled_pass import Build, CompiledPasses, Pass, PromptPass
from trouper.engine.kv.full_slots import FullSlots
from trouper.engine.kv.slot_cache import NO_ROOM, BankCaches, HeldShapes, ShapeChanges, SlotCache
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.step import StepEngine
from trouper.protocol.plans import Plan

__all__ = ["kernel"]  # A fixture.


def now(bank: BankCaches) -> tuple[tuple[tuple[int, ...], ...], tuple[int, int]]:
    rooms = [leaf.room for leaf in bank.leaves]
    shapes = tuple(tuple(buffer.shape) for leaf in bank.leaves for buffer in leaf.buffers)
    return shapes, (min(slots for slots, _ in rooms), min(tokens for _, tokens in rooms))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[HeldShapes]:
    """What each look found, and each is compared with the buffers."""
    usual, found = BankCaches.held, list[HeldShapes]()

    def held(self: BankCaches) -> HeldShapes:
        found.append(known := usual(self))
        assert (known.shapes, known.room) == now(self)
        return known

    monkeypatch.setattr(BankCaches, "held", held)
    return found


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3_text"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.long(but=("0-gpt_oss*", "1-llama*"))
def test_it_is_what_the_buffers_have(name: str, seed: int, looks: list[HeldShapes]) -> None:
    play_randomly(name, greedy_requests(name), seed, BY_LENGTH)
    assert len({known.shapes for known in looks}) > 2, "rows came, grew and left"


def test_a_lone_prompt_makes_buffers(
    looks: list[HeldShapes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may look before its pass."""
    usual = CompiledPasses.run

    def run(
        self: CompiledPasses, build: Build, model_pass: Pass, *given: Any, **options: Any
    ) -> mx.array:
        before = [bank.held() for bank in model_pass.banks]
        made = usual(self, build, model_pass, *given, **options)
        if isinstance(model_pass, PromptPass):
            assert [bank.held() for bank in model_pass.banks] != before
        return made

    monkeypatch.setattr(CompiledPasses, "run", run)
    lone_prompts(StepEngine(model_of("llama"), VOCABULARY, shapes=ONE_BANK), *PROMPTS)
    assert len({known.shapes for known in looks}) > 1


def test_a_step_asks_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = two_rows("llama")
    assert isinstance(engine._rows, SlotRows)
    plan = Plan(0, decode=tuple(engine._rows.decoding))
    for _ in range(3):
        engine.collect(engine.launch(plan))

    def refused(*_: object) -> HeldShapes:
        raise AssertionError("layers are asked")

    monkeypatch.setattr(slot_cache, "HeldShapes", refused)
    for _ in range(2):
        engine.collect(engine.launch(plan))


def full(*shapes: tuple[int, ...], slots: int = 1, lead: int = 0) -> SlotCache:
    cache = FullSlots()
    cache.buffers = [mx.zeros(shape) for shape in shapes]
    cache.slots, cache.lead = slots, lead
    return cache


def test_the_cache_with_the_smallest_room_counts() -> None:
    changes = ShapeChanges()
    leaves = [full((4, 1, 32, 8), lead=8), full((3, 1, 64, 8))]
    bank = BankCaches(leaves, changes)
    held = bank.held()
    assert held.has_room(3, 24) and not held.has_room(4, 24) and not held.has_room(3, 25)
    assert held.shapes == ((4, 1, 32, 8), (3, 1, 64, 8))


def test_buffers_that_do_not_hold_all_slots_have_no_room() -> None:
    assert full((2, 1, 32, 8), slots=3).room == NO_ROOM
    assert FullSlots().room == NO_ROOM
    assert BankCaches([], ShapeChanges()).held().room == NO_ROOM


def test_other_buffers_are_seen_and_equal_shapes_are_equal() -> None:
    bank = BankCaches([cache := full((2, 1, 32, 8))], ShapeChanges())
    cache.changes = bank._changes
    before = bank.held()
    cache.buffers[0] = mx.ones((2, 1, 32, 8))
    assert bank.held() is before
    cache.buffers = [mx.zeros((2, 1, 48, 8))]
    assert bank.held().room == (2, 48) and bank.held() != before
    cache.buffers = [mx.zeros((2, 1, 32, 8))]
    assert bank.held() == before and hash(bank.held()) == hash(before)
