"""Where what is answered alone is kept while the tests run."""

from __future__ import annotations

import os

import pytest

from tests.real.alone import Kept


@pytest.fixture(scope="session", autouse=True)
def _answers_alone_are_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    """For all processes that share the tests: each has its own directory in one of the run."""
    own = tmp_path_factory.getbasetemp()
    Kept.directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "alone"
    Kept.directory.mkdir(exist_ok=True)
