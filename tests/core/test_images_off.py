"""What the self-check has turned off for images: the scheduler plans without it."""

from __future__ import annotations

import pytest

from tests.core.driving import DrivenCore
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.plans import ProposerName, Restore

TEXT = tuple(range(1, 40))
PICTURE = ("image", 1, 30)
NO_DRAFTS = Capabilities(images_drafts="wrong positions")
NO_RESTORE = Capabilities(images_restore="wrong positions")


def proposers_of(driven: DrivenCore) -> list[tuple[ProposerName, ...]]:
    """Of a row with an image, and of one without."""
    driven.arrive_with_images(TEXT, PICTURE, TEXT)
    driven.arrive(30, 4, seed=5)
    driven.step()
    return [tuple(row.records) for row in driven.core._batch.rows.values()]


def test_a_draft_model_rests_for_a_row_with_images() -> None:
    both: tuple[ProposerName, ...] = ("ngram", "draft_model")
    driven = DrivenCore(speculation="auto", draft_model="small")
    assert proposers_of(driven) == [("ngram",), both]


def test_rows_with_images_draft_nothing_where_drafts_behind_them_are_wrong() -> None:
    driven = DrivenCore(speculation="auto", draft_model="small", capabilities=NO_DRAFTS)
    assert proposers_of(driven) == [(), ("ngram", "draft_model")]


@pytest.mark.parametrize(
    ("capabilities", "restored"), [(Capabilities(), 112), (NO_RESTORE, len(TEXT))]
)
def test_a_prompt_is_restored_up_to_its_first_image(
    capabilities: Capabilities, restored: int
) -> None:
    driven = DrivenCore(capabilities=capabilities, block_size=16)
    restores = list[Restore | None]()
    for _ in range(2):
        client = driven.arrive_with_images(TEXT, PICTURE, TEXT, (50,) * 5)
        while not client.closed:
            driven.step()
    restores = [admit.restore for plan in driven.plans for admit in plan.admit]
    assert restores[0] is None
    assert restores[1] is not None
    assert restores[1].tokens == restored
