"""Passes over lone prompts that an idle engine builds before the prompt is there (trouper/engine/kv/compiled_pass.py)."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.engine.test_decode_attention import (
    ONE_BANK,
    PROMPTS,
    compiled,
    is_of_prompts,
    kernel,
    lone_plan,
    lone_prompts,
    width_of,
)
from tests.engine.test_exactness import model_of
from tests.family_configs import FAMILIES, LONG, VOCABULARY
from trouper.engine.kv.compiled_pass import CompiledPass, CompiledPasses
from trouper.engine.kv.pass_shapes import LONE_WIDTHS, ROUNDED
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.step import StepEngine
from trouper.protocol.plans import Plan, RowId

__all__ = ["kernel"]  # A fixture.


def idle(engine: StepEngine) -> int:
    """Let it build all that it can; the number of parts."""
    parts = 0
    while engine.build_ahead():
        parts += 1
    return parts


@pytest.mark.parametrize("name", FAMILIES if LONG else ["llama", "qwen3_moe", "llama4_text", "gemma3_text"])
def test_r1_a_prompt_has_the_same_first_token_in_a_pass_that_was_built_ahead(name: str) -> None:
    """Also the tokens after it, which read the KV that it leaves."""
    expected = lone_prompts(StepEngine(model_of(name), VOCABULARY), *PROMPTS)
    engine, found = StepEngine(model_of(name), VOCABULARY, shapes=ONE_BANK), list[list[int]]()
    for prompt in PROMPTS:
        idle(engine)
        found += lone_prompts(engine, prompt)
    assert found == expected


def test_the_pass_is_neither_traced_nor_instantiated_when_the_prompt_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StepEngine(model_of("llama"), VOCABULARY, shapes=ONE_BANK)
    assert idle(engine) == 2 * len(LONE_WIDTHS), "each width is traced and instantiated"
    passes = [each for kind, each in compiled(engine)._compiled.items() if is_of_prompts(kind)]

    def refused(*_: object) -> object:
        raise AssertionError("instantiated")

    with monkeypatch.context() as patch:
        for each in passes:
            patch.setattr(each, "_function", refused)
        assert len(lone_prompts(engine, PROMPTS[0])) == 1
    assert idle(engine) == 1, "the one that ran"
    assert [each.fault for each in passes] == [""] * len(LONE_WIDTHS)


def test_two_prompts_of_one_width_without_a_pause_are_as_good() -> None:
    # The model adapts to the last engine that is made of it.
    expected = lone_prompts(StepEngine(model_of("llama"), VOCABULARY), *PROMPTS)
    engine = StepEngine(model_of("llama"), VOCABULARY, shapes=ONE_BANK)
    idle(engine)
    assert lone_prompts(engine, *PROMPTS) == expected
    assert idle(engine) == 2, "of either width one pass is built"


def test_what_is_traced_leaves_no_row_and_no_buffer() -> None:
    engine = StepEngine(model_of("llama"), VOCABULARY, shapes=ONE_BANK)
    idle(engine)
    assert isinstance(engine._rows, SlotRows)
    assert not engine._rows.order
    assert not engine._rows.nbytes


def test_nothing_is_evaluated() -> None:
    """An idle engine keeps the device idle, and takes none of its memory."""
    engine = StepEngine(model_of("llama"), VOCABULARY, shapes=ONE_BANK)
    mx.eval(model_of("llama").parameters())
    mx.synchronize()
    before = mx.get_active_memory()
    idle(engine)
    assert mx.get_active_memory() - before < 100_000, "tokens"


def test_nothing_is_built_beside_rows() -> None:
    engine = StepEngine(model_of("llama"), VOCABULARY, shapes=ONE_BANK)
    assert engine.build_ahead()
    engine.collect(engine.launch(lone_plan(RowId(7), PROMPTS[0])))
    assert not engine.build_ahead()
    engine.collect(engine.launch(Plan(0, drop=(RowId(7),))))
    assert engine.build_ahead()


@pytest.mark.parametrize(("name", "shapes"), [("llama", ROUNDED), ("qwen3_next", ONE_BANK)])
def test_nothing_is_built_where_no_prompt_has_a_compiled_pass(name: str, shapes: object) -> None:
    engine = StepEngine(model_of(name), VOCABULARY, shapes=shapes)  # type: ignore[arg-type]
    assert not idle(engine)


def test_the_first_pass_of_a_kind_is_said_to_prepare_though_it_was_traced() -> None:
    """The device prepares kernels and CUDA graphs when it runs."""
    engine = StepEngine(model_of("llama"), VOCABULARY, shapes=ONE_BANK)
    idle(engine)
    said = []
    for number in range(2):
        said.append(engine.collect(engine.launch(lone_plan(RowId(number), PROMPTS[0]))).preparing)
        engine.collect(engine.launch(Plan(0, drop=(RowId(number),))))
    assert said == [True, False]


def test_a_pass_that_cannot_be_traced_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = StepEngine(model_of("llama"), VOCABULARY, shapes=ONE_BANK)

    def failing(*_: object) -> object:
        raise ValueError("reads its lengths")

    usual = CompiledPass.__init__

    def made(self: CompiledPass, names: list[list[object]]) -> None:
        usual(self, names)  # type: ignore[arg-type]
        self._function = failing  # type: ignore[assignment]

    monkeypatch.setattr(CompiledPass, "__init__", made)
    assert idle(engine) == len(LONE_WIDTHS), "each is tried once"
    monkeypatch.undo()
    assert len(lone_prompts(engine, PROMPTS[0])[0]) == 4
    assert {width_of(kind) for kind in compiled(engine)._compiled if is_of_prompts(kind)} == set(LONE_WIDTHS)


@pytest.mark.parametrize("part", ["trace", "build_ahead"])
def test_what_fails_ahead_is_not_needed(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process may have the device's memory. A session that ended of it would end again as soon as it is idle."""

    def failing(*_: object) -> bool:
        raise RuntimeError("out of memory")

    expected = lone_prompts(StepEngine(model_of("llama"), VOCABULARY), PROMPTS[0])
    engine = StepEngine(model_of("llama"), VOCABULARY, shapes=ONE_BANK)
    monkeypatch.setattr(CompiledPasses, part, failing)
    idle(engine)
    assert not engine.build_ahead()
    assert [record.getMessage() for record in caplog.records] == ["no pass is built ahead any more: out of memory"]
    assert lone_prompts(engine, PROMPTS[0]) == expected
