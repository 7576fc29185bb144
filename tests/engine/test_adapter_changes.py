"""Adapters are added to a loaded model and removed, piece by piece: those of rows that run stay
where they are."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import pytest
import trio
import trio.testing
from mlx import nn

from tests.adapters import Form, fused, layers_of, save_adapter
from tests.engine.driver import Driver, Request
from tests.families import build, prompts, reference, save
from tests.family_configs import VOCABULARY
from tests.zoo.building import build as of_zoo
from trouper.engine.adapters_at_run_time import Names, adding, removing
from trouper.engine.loading.adapter_files import FoundAdapter, find_adapter, read_adapter
from trouper.engine.lora.lora_layers import adapted_layers, install, part_of
from trouper.engine.lora.row_adapters import RowAdapters, current_adapters
from trouper.engine.step import StepEngine
from trouper.engine.step_loop import Pieces, SideWork
from trouper.protocol.problems import ModelUnusable

T = TypeVar("T")
PROMPT, TOKENS = prompts((17,))[0], 8


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FoundAdapter]:
    directory = tmp_path_factory.mktemp("adapters")
    save("llama", directory / "base")
    names = ("one", "two", "three", "four")
    paths = [
        save_adapter(build("llama"), directory / name, seed, rank=2 + seed)
        for seed, name in enumerate(names)
    ]
    return {name: find_adapter(name, str(path)) for name, path in zip(names, paths, strict=True)}


def done(pieces: Pieces[T]) -> T:
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result


def passes() -> None:
    """Every model can run with every adapter here."""


def said(model: nn.Module, names: Names, adapter: str) -> list[int]:
    engine = StepEngine(model, VOCABULARY, adapters=names)
    [row] = Driver(engine, 4).play([Request(PROMPT, TOKENS, adapter=adapter)])
    return row.tokens


def test_slots_of_others_stay_and_a_free_one_is_taken(found: dict[str, FoundAdapter]) -> None:
    model, names, base = build("llama"), Names(), found["one"].directory.parent / "base"
    model.set_dtype(mx.float32)
    plain = type(dict(model.named_modules())["model.layers.0.self_attn.q_proj"])
    assert [
        done(adding(model, names, found[name], passes)) for name in ("one", "two", "three")
    ] == [2, 3, 4]
    wanted = {name: reference(fused(base, found[name].directory), PROMPT, TOKENS) for name in found}
    done(removing(model, names, "one"))
    assert names == [None, "two", "three"]
    assert {name: said(model, names, name) for name in ("two", "three")} == {
        name: wanted[name] for name in ("two", "three")
    }
    done(adding(model, names, found["four"], passes))
    assert names == ["four", "two", "three"] and said(model, names, "four") == wanted["four"]
    done(removing(model, names, "two"))
    done(removing(model, names, "three"))
    layer = next(iter(adapted_layers(model).values()))
    assert names == ["four"] and layer.adapters.a.shape[0] == 2, "what nobody has takes no memory"
    done(removing(model, names, "four"))
    assert names == [] and adapted_layers(model) == {}
    assert type(dict(model.named_modules())["model.layers.0.self_attn.q_proj"]) is plain
    assert said(model, names, "") == reference(fused(base, None), PROMPT, TOKENS)


def test_an_adapter_of_a_row_is_not_removed(found: dict[str, FoundAdapter]) -> None:
    model, names = build("llama"), Names()
    done(adding(model, names, found["one"], passes))
    current = current_adapters(model)
    current.rows = {7: 1}  # type: ignore[dict-item]
    pieces = removing(model, names, "one")
    assert [next(pieces) for _ in range(3)] == [True] * 3 and names == ["one"]
    current.rows = {}
    assert next(pieces) is False
    done(pieces)
    assert names == []


def test_a_model_that_cannot_run_with_it_is_as_before(found: dict[str, FoundAdapter]) -> None:
    model, names = build("llama"), Names()

    def fails() -> None:
        raise ModelUnusable("it cannot")

    with pytest.raises(ModelUnusable, match="it cannot"):
        done(adding(model, names, found["one"], fails))
    assert names == [] and adapted_layers(model) == {}
    done(adding(model, names, found["two"], passes))
    before = {path: part_of(layer, 1) for path, layer in adapted_layers(model).items()}
    with pytest.raises(ModelUnusable, match="it cannot"):
        done(adding(model, names, found["one"], fails))
    after = {path: part_of(layer, 1) for path, layer in adapted_layers(model).items()}
    assert names == ["two"] and before.keys() == after.keys()
    assert all(mx.array_equal(before[path].a, after[path].a) for path in before)  # type: ignore[union-attr]


def test_compiled_passes_of_earlier_adapters_are_others(found: dict[str, FoundAdapter]) -> None:
    model, names = build("llama"), Names()
    current = current_adapters(model)
    versions = [RowAdapters(current, mx.array([1])).version]  # type: ignore[arg-type]
    done(adding(model, names, found["one"], passes))
    done(removing(model, names, "one"))
    versions += [current.version]
    assert versions == [0, 2]


@pytest.mark.parametrize("form", ["peft", "mlx"])
@pytest.mark.parametrize("name", ["llama4", "minimax_m3_vl"])
def test_a_model_whose_layers_stand_in_modules_of_ours_gets_an_adapter(
    name: str, form: Form, tmp_path: Path
) -> None:
    """They do so since rows of different lengths share its passes. Adapters name them as
    checkpoints do."""
    plain, model, names = of_zoo(name), of_zoo(name), Names()
    found = [
        find_adapter(adapter, str(save_adapter(plain, tmp_path / adapter, seed, form=form)))
        for seed, adapter in enumerate(("one", "two"))
    ]
    engine = StepEngine(model, VOCABULARY, adapters=names)
    assert {*dict(model.named_modules())} != {*dict(plain.named_modules())}
    for adapter in found:
        done(adding(model, names, adapter, passes))
    install(plain, [read_adapter(adapter, plain) for adapter in found])
    assert len(adapted_layers(model)) == len(adapted_layers(plain)) == len(layers_of(of_zoo(name)))
    requests = [Request(PROMPT, TOKENS, adapter=adapter) for adapter in ("one", "two", "")]
    own = [row.tokens for row in Driver(engine, 4).play(requests)]
    other = [
        row.tokens
        for row in Driver(StepEngine(plain, VOCABULARY, adapters=["one", "two"]), 4).play(requests)
    ]
    assert own == other
    assert own[0] != own[1] != own[2] != own[0]


# -- beside a session ----------------------------------------------------------------------------


async def test_a_piece_for_each_plan_and_all_without() -> None:
    side, seen, results = SideWork(), list[int](), list[str]()

    def pieces() -> Pieces[str]:
        for number, waits in enumerate((False, True, False)):
            seen.append(number)
            yield waits
        return "done"

    async def order() -> None:
        results.append(await side.run(pieces(), passes))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(order)
        await trio.testing.wait_all_tasks_blocked()
        assert [side.work(planned=False) for _ in range(4)] == [
            True,
            True,
            False,
            False,
        ] and seen == [0, 1]
        assert side.work(planned=True) and seen == [0, 1, 2]
        assert side.work(planned=False) and not side.work(planned=True)
    assert results == ["done"] and side.is_idle


async def test_a_fault_is_the_jobs_and_the_end_is_told() -> None:
    side = SideWork()

    def broken() -> Pieces[None]:
        yield False
        raise ZeroDivisionError

    def endless() -> Pieces[None]:
        while True:
            yield True

    async with trio.open_nursery() as nursery:

        async def fails() -> None:
            with pytest.raises(ZeroDivisionError):
                await side.run(broken(), passes)

        nursery.start_soon(fails)
        await trio.testing.wait_all_tasks_blocked()
        assert (
            side.work(planned=False) and side.work(planned=False) and not side.work(planned=False)
        )
    async with trio.open_nursery() as nursery:

        async def ended() -> None:
            with pytest.raises(ModelUnusable, match="unloaded meanwhile; try again"):
                await side.run(endless(), passes)

        nursery.start_soon(ended)
        await trio.testing.wait_all_tasks_blocked()
        side.work(planned=True)
        side.close()
    with pytest.raises(ModelUnusable, match="unloaded meanwhile; try again"):
        await side.run(endless(), passes)


async def test_an_engine_that_ends_while_a_job_is_ordered(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """It ends on its own thread, at any moment: nobody would do the job, and who ordered it waits
    shielded."""
    side, token = SideWork(), trio.lowlevel.current_trio_token()

    def ending() -> trio.lowlevel.TrioToken:
        side.close()
        return token

    monkeypatch.setattr(trio.lowlevel, "current_trio_token", ending)
    with trio.fail_after(1), pytest.raises(ModelUnusable, match="unloaded meanwhile"):
        await side.run(iter_once(), passes)
    assert side.is_idle


def iter_once() -> Pieces[None]:
    yield False
