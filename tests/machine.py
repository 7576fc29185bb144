"""Changes of the machine's settings for the test process, each with its reason.

pytest imports this module, as the first of all, by `tests/conftest.py`.
"""

from __future__ import annotations

import functools
import gc
import os
import tempfile
from contextlib import suppress

import httpcore2

from tests.fused_kernels import precompile_header


def set_environment() -> None:
    """Set variables of the process and of its children. Must precede the import of MLX."""
    # No test waits for a model hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Idle BLAS threads spin: on two cores that other work shares, one thread is several times
    # faster than two.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # The engine sets TMPDIR to a directory below its cache; files of tests stay elsewhere.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())


def yield_to_other_threads() -> None:
    """Make the scheduling class SCHED_BATCH, in which a thread waits until the processor is free.
    (Linux)"""
    # MLX hands each operation to a thread, which would take the processor at once and give it
    # back: with tiny models a million switches, a third of the tests' time.
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def share_compiled_work() -> None:
    """Do once a process, or once a machine, what each model or client would do again."""
    precompile_header()
    # Each client would read the machine's certificates, which takes longer than its requests to a
    # server without TLS.
    httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)


def stop_collecting() -> None:
    """Switch the garbage collector off, until `freeze_heap`: imports leave no garbage."""
    gc.disable()


def freeze_heap() -> None:
    """Collect garbage, and take all objects that are left out of further collections."""
    # An engine that ends collects garbage. To look through all imported objects took longer than
    # most tests of the graph. Half a million cached objects (models, worlds) made the tests of
    # later files a quarter slower.
    gc.collect()
    gc.freeze()
    gc.enable()
