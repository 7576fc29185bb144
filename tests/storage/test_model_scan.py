"""Directories of models below a root."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from trouper.storage import model_files
from trouper.storage.model_scan import model_directories


def test_modules_of_a_model_are_no_models(tmp_path: Path) -> None:
    for name in ("embedder", "embedder/1_Pooling", "owner/generator", ".hidden"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    assert [name for name, _ in model_directories(tmp_path)] == ["embedder", "owner/generator"]


@pytest.mark.parametrize(("seconds", "created"), [(10.5, 10), (-1.0, 0), (3e11, 0), (1e19, 0)])
def test_a_time_that_no_calendar_has_is_none(
    seconds: float, created: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "stat", lambda _: SimpleNamespace(st_mtime=seconds))
    assert model_files.created_at(tmp_path) == created
