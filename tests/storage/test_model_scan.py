"""Directories of models below a root."""

from __future__ import annotations

from pathlib import Path

from trouper.storage.model_scan import model_directories


def test_modules_of_a_model_are_no_models(tmp_path: Path) -> None:
    for name in ("embedder", "embedder/1_Pooling", "owner/generator", ".hidden"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    assert [name for name, _ in model_directories(tmp_path)] == ["embedder", "owner/generator"]
