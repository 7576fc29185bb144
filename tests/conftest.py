"""Fixtures and order of all tests."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

from tests import machine

machine.set_environment()
machine.yield_to_other_threads()

from trouper.process import prepare_process  # noqa: E402

prepare_process()  # Before anything imports MLX.
machine.share_compiled_work()

from tests import long_tests  # noqa: E402

# No test is about how fast this machine is at the moment.
settings.register_profile("short", deadline=None, max_examples=25)
settings.register_profile("long", deadline=None)
# Whoever plays mutants wants to know that a test fails, not the smallest example of it.
settings.register_profile(
    "unshrunk", deadline=None, database=None, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile(
    "unshrunk"
    if os.environ.get("TROUPER_UNSHRUNK")
    else "long"
    if os.environ.get("TROUPER_LONG_TESTS")
    else "short"
)

SLOW = {
    "test_certify.py",
    "test_commands.py",
    "test_process.py",
    "test_hung_disk.py",
    "test_doctor_for_agents.py",
    "test_models_command.py",
    "test_fuzz.py",
    "test_schemathesis.py",
    "test_lenient.py",
    "test_mtp.py",
    "test_host.py",
    "test_fetching.py",
    "browser",
    "model",
    "ranks",
    "real",
    "crash",
    "mutants",
    "clients",
    "scripted",
    "packaging",
    "reuse",
    "drafts",
}
"""Files and directories of few tests that take long. They begin first: begun last, as other small
files do, they would keep one worker busy while the others idle."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers take files in this order: slow ones, then large ones."""
    long_tests.leave_out(config, items)
    tests = Counter(item.path for item in items)
    items.sort(
        key=lambda item: (
            SLOW.isdisjoint({item.path.name, item.path.parent.name}),
            -tests[item.path],
        )
    )


def pytest_collection() -> None:
    machine.stop_collecting()


def pytest_collection_finish() -> None:
    machine.freeze_heap()


@pytest.fixture(scope="module", autouse=True)
def _files_before_are_frozen() -> Iterator[None]:
    """Objects that tests of a file leave in cycles are finalized with their last test, not with a
    later file's."""
    yield
    machine.freeze_heap()
