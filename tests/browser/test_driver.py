"""What the driver leaves behind: nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.driver import MISSING, chromium, users_of


@pytest.mark.skipif(
    bool(MISSING), reason=f"{MISSING} not installed: apt-get install chromium chromium-driver"
)
@pytest.mark.long
def test_a_browser_whose_driver_was_killed_leaves_no_process_and_no_profile() -> None:
    with chromium() as browser:
        assert users_of(browser.profile)
        browser.driver.service.process.kill()
    assert not users_of(browser.profile)
    assert not Path(browser.profile).exists()
