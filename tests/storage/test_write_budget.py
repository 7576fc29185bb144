"""The hourly write budget."""

from __future__ import annotations

from trouper.storage.store_upkeep import HOUR_S, WriteBudget


def test_an_hour_has_so_many_bytes_and_the_next_has_them_again() -> None:
    budget = WriteBudget(100, 5.0)
    assert budget.allows(100, 5.0)
    budget.spend(60)
    assert budget.allows(40, 6.0) and not budget.allows(41, 6.0)
    assert not budget.allows(41, 5.0 + HOUR_S - 1)
    assert budget.allows(100, 5.0 + HOUR_S)
