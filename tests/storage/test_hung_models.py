"""A directory of models of which one does not answer: as on a mount whose server is gone. A FIFO is
not opened at all."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from trouper.storage import model_scan
from trouper.storage.model_files import ModelFiles, read_model_files
from trouper.storage.model_scan import ModelScan

ANSWER_S = 0.5


def hung_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "files of hung"]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("hung", "sound"):
        (tmp_path / name).mkdir()
    (tmp_path / "hung" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "sound" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


def test_the_others_are_found_and_it_has_one_thread(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = threading.Event()

    def read(name: str, directory: Path) -> ModelFiles:
        if name == "hung":
            mounted.wait()
        return read_model_files(name, directory)

    monkeypatch.setattr(model_scan, "read_model_files", read)
    scan = ModelScan([str(models)], ANSWER_S)
    for _ in range(2):
        hung, sound = scan.models()
        assert (hung.name, sound.name, sound.architecture) == ("hung", "sound", "llama")
        assert hung.problem == f"{models / 'hung'} does not answer within 0.5 s"
        [thread] = hung_threads()
    mounted.set()
    thread.join()
    hung, _ = scan.models()
    assert hung.architecture == "qwen3", "once it answers it is read"
