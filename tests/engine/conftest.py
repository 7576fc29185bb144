"""What tests of the engine share."""

from __future__ import annotations

import pytest

from tests.arithmetic import skip_if_routed
from tests.family_configs import FAMILIES


@pytest.fixture(autouse=True)
def _arithmetic(request: pytest.FixtureRequest) -> None:
    """Tests of a family with experts are skipped, by name, where the device rounds to TF32."""
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    if name in FAMILIES:
        skip_if_routed(FAMILIES[name])
