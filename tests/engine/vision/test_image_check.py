"""The self-check of rows with images passes for models that are right, and finds planted faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest

from tests.engine.vision.families import FAMILIES, GEMMA, VOCABULARY, Models, VisionModel
from trouper.engine.kv import row_images
from trouper.engine.kv.quantized_kv import PLAIN, KvFormat
from trouper.engine.kv.row_images import RowImages, positions_of
from trouper.engine.passes.media_pass import MediaPass
from trouper.engine.passes.region import Reach
from trouper.engine.self_check.image_check import ImageCheck
from trouper.protocol.capabilities import EVERYTHING
from trouper.protocol.plans import RowId


def check_of(model: VisionModel, kv: KvFormat = PLAIN) -> ImageCheck:
    together = "recurrent" if model.name.startswith("qwen3_5") else ""
    return ImageCheck(
        model=model.model,
        layout=model.layout,
        deepstack=model.tower.num_deepstack,
        vocabulary=VOCABULARY,
        kv=kv,
        capabilities=attrs.evolve(EVERYTHING, prefill_together=together),
    )


def fault_of(model: VisionModel, kv: KvFormat = PLAIN) -> str:
    return check_of(model, kv).off().get("images", "")


@pytest.mark.parametrize("name", [*FAMILIES, *GEMMA])
def test_right_models_pass(vision_model: Models, name: str) -> None:
    assert check_of(vision_model(name)).off() == {}


def test_quantized_keys_pass(vision_model: Models) -> None:
    assert check_of(vision_model("qwen3_5"), KvFormat(8, 32)).off() == {}


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_an_ignored_delta_is_found(
    vision_model: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowImages, "deltas", lambda _self, _rows, _lengths: None)
    assert "rows with images differ" in fault_of(vision_model(name))


def test_positions_that_begin_with_the_chunk_are_found(
    vision_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        row_images,
        "positions_of",
        lambda spans, start, stop: positions_of(spans, start, stop) * (start == 0),
    )
    assert "rows with images differ" in fault_of(vision_model("qwen3_vl"))


@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_in_another_row_are_found(
    vision_model: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = MediaPass.put

    def misplaced(self: MediaPass, embedded: object) -> object:
        moved = attrs.evolve(self, columns=self.columns * 0) if self.columns.size < 6 else self
        return put(moved, embedded)  # type: ignore[arg-type]

    monkeypatch.setattr(MediaPass, "put", misplaced)
    assert "rows with images differ" in fault_of(vision_model(name))


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4_unified"])
def test_an_image_that_sees_the_text_behind_it_is_refused(
    vision_model: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach = RowImages.reach

    def farther(self: RowImages, *arguments: Any) -> Reach | None:
        right = reach(self, *arguments)
        return None if right is None else attrs.evolve(right, last=right.last + 2)

    monkeypatch.setattr(RowImages, "reach", farther)
    assert "rows with images differ" in fault_of(vision_model(name))


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4_unified"])
def test_an_image_that_is_causal_in_company_is_refused(
    vision_model: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach = RowImages.reach

    def alone(self: RowImages, rows: Sequence[RowId], *arguments: Any) -> Reach | None:
        return reach(self, rows, *arguments) if len(rows) == 1 else None

    monkeypatch.setattr(RowImages, "reach", alone)
    off = check_of(vision_model(name)).off()
    assert list(off) == ["images_together"]
    assert "rows with images differ" in off["images_together"]


def test_code_that_fails_is_found(vision_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> np.ndarray:
        raise RuntimeError("no such axis")

    monkeypatch.setattr(RowImages, "of_pass", fail)
    assert "no such axis" in fault_of(vision_model("qwen3_vl"))
