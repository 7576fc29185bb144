"""What a start finds is remembered for the next one with the same weights, settings, versions and
device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import pytest
from mlx.utils import tree_map

from tests import families
from tests.engine.vision.families import checkpoint
from tests.family_configs import wide
from tests.self_check.saving import save
from tests.zoo.building import build
from trouper.engine.adaptations import adaptation_registry
from trouper.engine.distributed.rank_group import ALONE, RankGroup
from trouper.engine.loading.model_loading import load
from trouper.engine.platform import device
from trouper.engine.self_check import checking, starting
from trouper.engine.self_check.accuracy import WrongAloneError
from trouper.engine.self_check.checking import CANNOT_SHRINK, WRONG_ALONE, Check
from trouper.engine.self_check.image_check import ImageCheck
from trouper.engine.self_check.matrix import Failure
from trouper.engine.self_check.starting import (
    key_of,
    recalled,
    results_file,
)
from trouper.engine.self_check.tiny import CannotShrinkError
from trouper.protocol.capabilities import Capabilities, Feature, SelfCheck
from trouper.protocol.model import ModelCard
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model that is wrong with two rows, since nothing is adapted."""
    monkeypatch.setattr(adaptation_registry, "REGISTRY", [])
    return str(save("gpt_bigcode", tmp_path / "gpt_bigcode"))


def loaded(path: str, **settings: Any) -> tuple[ModelCard, str]:
    """Its card, and the line of the log."""
    lines: list[str] = []
    card = load(Settings(model=path, **settings), lines.append).card
    [line] = [line for line in lines if line.startswith("self-check")]
    return card, line


def test_the_second_start_remembers(faulty: str) -> None:
    first, line = loaded(faulty)
    assert "rows of different lengths" in first.capabilities.batch
    assert (
        first.self_check.checked
        == "a tiny model of the same config and a short pass of the model itself"
    )
    assert not first.self_check.remembered
    assert 0 < first.self_check.seconds < 600
    assert "batch off: rows of different lengths" in line
    second, line = loaded(faulty)
    assert second.capabilities == first.capabilities
    assert second.self_check == attrs.evolve(first.self_check, remembered=True)
    assert "(remembered; a tiny model" in line


def test_what_is_off_is_off_everywhere(faulty: str) -> None:
    card, _ = loaded(faulty)
    assert card.batching.startswith("row by row (rows of different lengths")
    assert not card.kv.cached
    assert card.no_drafts
    assert card.fingerprint == ""


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '{"KEY": 1}',
        '{"KEY": {"off": {"wings": "none"}, "checked": "", "seconds": 1, "at": 1}}',
    ],
)
def test_a_damaged_file_is_made_anew(faulty: str, damage: str) -> None:
    loaded(faulty)
    [key] = json.loads(results_file().read_text())
    results_file().write_text(damage.replace("KEY", key))
    assert not loaded(faulty)[0].self_check.remembered
    assert loaded(faulty)[0].self_check.remembered


def test_the_name_of_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapters.safetensors").write_bytes(b"1")
    others = [
        Settings(kv_bits=8),
        Settings(kv_group_size=32),
        Settings(self_check="full"),
        Settings(adapter_path=str(adapter)),
    ]
    keys = {
        key_of(1, Settings(), ALONE),
        key_of(2, Settings(), ALONE),
        *(key_of(1, each, ALONE) for each in others),
    }
    assert len(keys) == 6
    assert key_of(1, Settings(gather_ms=1), ALONE) in keys, "what changes no logits changes no name"
    monkeypatch.setattr(device, "name", lambda: "another device")
    assert key_of(1, Settings(), ALONE) not in keys
    monkeypatch.undo()
    monkeypatch.setattr(starting, "version", lambda name: "9.9.9")
    assert key_of(1, Settings(), ALONE) not in keys


@pytest.mark.parametrize("name", ["kernel.cuh", "step.py"])
def test_changed_code_is_checked_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of kernels: a change of one left the result of the old one."""
    monkeypatch.setattr(starting, "SOURCES", (tmp_path,))
    keys = set[str]()
    for text in ("one", "other"):
        (tmp_path / name).write_text(text)
        starting._code.cache_clear()
        keys.add(key_of(1, Settings(), ALONE))
    starting._code.cache_clear()
    assert len(keys) == 2


def test_another_blas_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(1, Settings(), ALONE)
    monkeypatch.setattr(starting, "installed_version", lambda name, absent: "9.9.9")
    assert key_of(1, Settings(), ALONE) != before


def test_kernels_and_workarounds_are_part_of_the_code() -> None:
    files = {path.name for source in starting.SOURCES for path in source.rglob("*.*")}
    assert {"few_rows.cuh", "mlx_scalar_functions.py"} <= files


def test_a_device_that_was_full_is_not_remembered(
    faulty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Capabilities(
        drafts="rows that took wrong drafts back: [malloc] Unable to allocate 9 bytes."
    )
    monkeypatch.setattr(Check, "run", lambda self: checking.CheckOutcome(full, "it"))
    assert loaded(faulty)[0].capabilities == full
    assert not results_file().exists()


def test_off_guesses(faulty: str) -> None:
    card, line = loaded(faulty, self_check="off")
    assert line.startswith("self-check: off, guessed from the model's caches")
    assert card.self_check.seconds == 0
    assert not results_file().exists()


def test_full_runs_every_case_on_the_model_itself(tmp_path: Path) -> None:
    card, _ = loaded(str(save("qwen3", tmp_path / "qwen3")), self_check="full")
    assert card.capabilities == Capabilities()
    assert card.self_check.checked == "a tiny model of the same config and the model itself"


@pytest.mark.parametrize("mode", ["fast", "full"])
def test_quantized_kv_is_checked_too(tmp_path: Path, mode: Any) -> None:
    path = str(families.save("llama", tmp_path / "llama", wide(families.FAMILIES["llama"])))
    assert (
        loaded(path, self_check=mode, kv_bits=8, kv_group_size=32)[0].capabilities == Capabilities()
    )


def test_a_model_without_numbers_is_refused_in_one_line(tmp_path: Path) -> None:
    broken = build("qwen3")
    broken.update(tree_map(lambda array: array * mx.nan, broken.parameters()))
    path = str(save("qwen3", tmp_path / "qwen3", broken))
    with pytest.raises(ModelUnusable) as refused:
        loaded(path)
    assert str(refused.value) == (
        f"{path} is wrong even for one row alone: its own code gives logits that are not numbers; "
        "--self-check off serves it all the same"
    )
    assert loaded(path, self_check="off")[0].capabilities == Capabilities()


# -- several ranks -------------------------------------------------------------------------------


class Others(RankGroup):
    """Rank 0 of three, whose other ranks say what they are told to."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.size, self.numbers = 3, numbers

    def gather(self, number: int) -> list[int]:
        return [number, *self.numbers] if self.size == 3 and hasattr(self, "numbers") else [number]


def agreed(found: Capabilities, *numbers: int) -> Capabilities:
    return Check(build("qwen3"), {}, 512, None, "fast", Others(*numbers))._agreed(lambda: found)  # type: ignore[arg-type]


def test_ranks_agree_on_the_worst() -> None:
    assert agreed(Capabilities(), 0, 0) == Capabilities()
    assert agreed(Capabilities(), 0, 0b1000) == Capabilities(drafts="rank 2 found it wrong")
    mine = Capabilities(drafts="mine")
    assert agreed(mine, 0b0100, 0b1000) == Capabilities(
        drafts="mine", restore="rank 1 found it wrong"
    )
    with pytest.raises(WrongAloneError, match="rank 1 found it wrong"):
        agreed(mine, WRONG_ALONE, 0)
    with pytest.raises(CannotShrinkError):
        agreed(mine, 0, CANNOT_SHRINK)


def test_a_failure_of_any_rank_is_everybodys() -> None:
    check = Check(build("qwen3"), {}, 512, None, "fast", Others(0, 2))  # type: ignore[arg-type]
    assert check._any_rank(None) == Failure("rank 2 found it wrong", raised=True)
    assert check._any_rank(Failure("mine")) == Failure("mine")


def test_what_only_some_ranks_remember_is_checked_again() -> None:
    known = recalled("nothing")
    assert known is None
    mine = Capabilities(), SelfCheck()
    same = Others(0, 0)
    assert not starting._all_know(mine, same)
    assert starting._all_know(mine, ALONE)
    assert not starting._all_know(None, ALONE)


def test_the_check_of_images_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[bool]()

    def wrong(check: ImageCheck) -> dict[Feature, str]:
        checked.append(True)
        return {"images_restore": "rows differ"}

    monkeypatch.setattr(ImageCheck, "off", wrong)
    model = str(checkpoint("qwen3_vl", tmp_path / "model"))
    for _ in range(2):
        off = load(Settings(model=model), lambda _: None).card.capabilities.off
        assert off == {"images_restore": "rows differ"}
    assert checked == [True]
    load(Settings(model=model, self_check="full"), lambda _: None)
    assert len(checked) == 2, "another mode is another result"
    assert load(Settings(model=model, self_check="off"), lambda _: None).card.capabilities.off == {}


def test_a_check_of_images_that_met_a_full_device_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = "a pass with an image fails: [metal::malloc] Unable to allocate 8 bytes."
    monkeypatch.setattr(ImageCheck, "off", lambda _: {"images": full})
    model = str(checkpoint("qwen3_vl", tmp_path / "model"))
    assert load(Settings(model=model), lambda _: None).card.no_images == full
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert load(Settings(model=model), lambda _: None).card.no_images == ""
