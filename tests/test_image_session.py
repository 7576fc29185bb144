"""The session of screenshots, with few and small ones."""

from __future__ import annotations

from tests.image_session import main


def test_each_screenshot_is_decoded_and_encoded_once() -> None:
    assert main(turns=3, width=320, height=256) == 0
