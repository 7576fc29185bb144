"""Thousands of histories of several models (trouper/actors/runtime/model_table.py)."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.family_configs import LONG
from tests.policy.model_machine import ModelMachine


def test_histories_of_several_models() -> None:
    run_state_machine_as_test(
        ModelMachine,
        settings=settings(
            max_examples=3000 if LONG else 150,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
