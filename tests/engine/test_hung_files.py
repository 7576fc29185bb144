"""The sizes of models' weights, of directories that do not answer."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import trio

from trouper import ModelUnusable, Settings
from trouper.engine.loading import checkpoint
from trouper.engine.loading.model_source import may_download
from trouper.run import FILES_ANSWER_S, WeightSizes


async def test_a_directory_that_does_not_answer_is_named_and_has_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    """The clock jumps to the limit, since a thread counts as nothing that goes on."""
    mounted = threading.Event()

    def hangs(_: Path) -> None:
        mounted.wait()
        raise ModelUnusable("it is empty")

    monkeypatch.setattr(checkpoint, "inspect", hangs)
    sizes, before = WeightSizes(), threading.active_count()
    for _ in range(3):
        began = trio.current_time()
        with pytest.raises(ModelUnusable, match=f"{tmp_path.name} does not answer within 60 s"):
            await sizes.measure(Settings(model=str(tmp_path)))
        assert trio.current_time() - began == pytest.approx(FILES_ANSWER_S)
    assert threading.active_count() <= before + 1
    mounted.set()


@pytest.mark.parametrize(
    ("model", "may"),
    [
        (None, True),
        ("org/name", True),
        ("/models/name", False),
        ("./name", False),
        ("~/name", False),
    ],
)
def test_what_may_be_downloaded_takes_any_time(model: str | None, may: bool) -> None:
    assert may_download(model) == may
