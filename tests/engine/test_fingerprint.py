"""F9: what a model's KV is computed with has one name, and whatever changes the KV changes the
name."""

from __future__ import annotations

from pathlib import Path

import pytest

from trouper.engine.loading.model_fingerprint import fingerprint

FILES = {
    "config.json": b"{}",
    "model-1.safetensors": b"one",
    "model-2.safetensors": b"two",
    "model-3.safetensors": b"three",
}
ADAPTER = {"adapters.safetensors": b"small", "adapter_config.json": b"{}"}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write(tmp_path / "model", FILES)


def write(directory: Path, files: dict[str, bytes]) -> Path:
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


def name_of(model: Path, adapter: Path | None = None, rank: dict[str, str] | None = None) -> str:
    name = fingerprint(
        model, str(adapter) if adapter else None, pytest.fail, lambda *_: None, rank or {}
    )
    assert len(name) == 64
    return name


@pytest.mark.parametrize("file", FILES)
def test_f9_each_file_that_shapes_kv_counts_by_its_content(model: Path, file: str) -> None:
    before = name_of(model)
    content = FILES[file]
    (model / file).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert name_of(model) != before
    (model / file).write_bytes(content)
    assert name_of(model) == before


def test_f9_an_adapter_counts_by_its_content(model: Path, tmp_path: Path) -> None:
    adapter = write(tmp_path / "adapter", ADAPTER)
    names = {name_of(model), name_of(model, adapter)}
    for file, content in ADAPTER.items():
        (adapter / file).write_bytes(content + b" ")
        names.add(name_of(model, adapter))
    assert len(names) == 2 + len(ADAPTER)
    assert (
        name_of(
            model,
            write(tmp_path / "copy", {file: content + b" " for file, content in ADAPTER.items()}),
        )
        in names
    )


def test_f9_an_adapter_is_no_part_of_the_model(model: Path, tmp_path: Path) -> None:
    """The same bytes as weights are not the same as an adapter."""
    adapter = write(tmp_path / "adapter", {"model-4.safetensors": b"four"})
    with_adapter = name_of(model, adapter)
    write(model, {"model-4.safetensors": b"four"})
    assert name_of(model) != with_adapter


def test_f9_ranks_and_versions_of_the_library_tell_apart(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {
        name_of(model),
        name_of(model, rank={"rank": "0 of 2"}),
        name_of(model, rank={"rank": "1 of 2"}),
    }
    monkeypatch.setattr("trouper.engine.loading.model_fingerprint.version", lambda _: "0.0.0")
    names.add(name_of(model))
    assert len(names) == 4


def test_what_shapes_no_kv_does_not_count(model: Path) -> None:
    before = name_of(model)
    write(model, {"README.md": b"words", "tokenizer.json": b"{}"})
    assert name_of(model) == before


def test_files_that_cannot_be_read_keep_nothing_on_disk(model: Path) -> None:
    (model / "model-4.safetensors").mkdir()
    said: list[str] = []
    assert fingerprint(model, None, said.append, lambda *_: None, {}) == ""
    assert "nothing is kept on disk" in said[0]


def test_progress_ends_with_all_bytes(model: Path) -> None:
    heard: list[tuple[int, int]] = []
    fingerprint(model, None, pytest.fail, lambda *at: heard.append(at), {})
    total = sum(map(len, FILES.values()))
    assert heard[-1] == (total, total) and sorted(heard) == heard
