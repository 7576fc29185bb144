"""A directory of models of which one does not answer: a FIFO in the place of its config hangs whoever opens it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from trouper.storage.model_scan import ModelScan

ANSWER_S = 0.5


def hung_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "files of hung"]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("hung", "sound"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "hung" / "config.json")
    (tmp_path / "sound" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


def test_the_others_are_found_and_it_has_one_thread(models: Path) -> None:
    scan = ModelScan([str(models)], ANSWER_S)
    for _ in range(2):
        hung, sound = scan.models()
        assert (hung.name, sound.name, sound.architecture) == ("hung", "sound", "llama")
        assert hung.problem == f"{models / 'hung'} does not answer within 0.5 s"
        [thread] = hung_threads()
    fifo = models / "hung" / "config.json"
    released = os.open(fifo, os.O_WRONLY)
    fifo.unlink()
    fifo.write_text(json.dumps({"model_type": "qwen3"}))
    os.close(released)
    thread.join()
    hung, _ = scan.models()
    assert hung.architecture == "qwen3", "once it answers it is read"
