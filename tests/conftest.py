"""Fixtures of every test."""

from __future__ import annotations

import functools
import gc
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import httpcore2
import pytest
from hypothesis import Phase, settings

# No test waits for a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Idle BLAS threads spin; on two cores that other work shares, one thread is several times faster
# than two.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# MLX hands each operation to a thread of its own, which would take the processor at once, and give
# it back: with tiny models that is a million switches, and a third of the tests' time. A thread of
# this class waits until the processor is free. (Linux.)
with suppress(AttributeError, OSError):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# The engine gives this process a TMPDIR below its cache; what tests write stays where it was.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())

from tests.fused_kernels import precompile_header
from trouper.process import prepare_process

prepare_process()  # Before anything imports MLX.
precompile_header()

# Each client would read the certificates of this machine, which takes longer than what it then asks
# a server without TLS.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)

# No test is about how fast this machine is at the moment.
settings.register_profile("trouper", deadline=None)
# Whoever plays mutants wants to know that a test fails, not the smallest example of it.
settings.register_profile(
    "unshrunk", deadline=None, database=None, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("unshrunk" if os.environ.get("TROUPER_UNSHRUNK") else "trouper")

SLOW = {
    "test_certify_children.py",
    "test_certify.py",
    "test_kill_loop.py",
    "test_batch_kill.py",
    "test_doctor_for_agents.py",
    "test_models_command.py",
    "test_fuzz.py",
    "test_schemathesis.py",
    "test_lenient.py",
    "test_mtp.py",
    "test_shrinking.py",
    "test_host.py",
    "test_fetching.py",
    "model",
    "ranks",
    "real",
    "crash",
    "mutants",
    "soak",
    "chaos",
    "clients",
    "abuse",
    "scripted",
    "model_cycles",
    "packaging",
    "reuse",
    "drafts",
}
"""Files, and directories of files, of few tests that take long: begun last, as small files would
be, they would be waited for by an idle worker."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take files in this order: slow ones, then large ones."""
    tests = Counter(item.path for item in items)
    items.sort(
        key=lambda item: (
            SLOW.isdisjoint({item.path.name, item.path.parent.name}),
            -tests[item.path],
        )
    )


def pytest_collection() -> None:
    """What is imported from here on stays: nothing of it is garbage that would be worth looking
    for."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Everything imported and collected by now stays to the end, and is a large heap. An engine
    that ends collects garbage, and would look through all of it: that took longer than what most
    tests of the graph do."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _files_before_are_frozen() -> Iterator[None]:
    """What tests of a file have cached (models, answers, worlds) stays to the end, too: half a
    million objects of some files made those after them take a quarter longer. What they have left
    in cycles is finalized with their last test, not with somebody else's."""
    yield
    gc.collect()
    gc.freeze()
