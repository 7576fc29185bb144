"""The zoo has a config, or a reason, for every module of the mlx-lm that is installed."""

from __future__ import annotations

from tests.zoo.catalogue import CONFIGS, LEFT_OUT, module_of, modules


def test_each_module_has_a_config_or_a_reason() -> None:
    built = {module_of(config) for config in CONFIGS.values()}
    assert not built & LEFT_OUT.keys()
    assert sorted(built | LEFT_OUT.keys()) == modules()
