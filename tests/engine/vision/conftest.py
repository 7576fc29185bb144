"""Tiny vision models, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.engine.vision.families import VisionModel, load


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], VisionModel]:
    """From a family to its model."""
    return cache(lambda name: load(name, tmp_path_factory.mktemp(name)))
