"""Faults that axe sees in the page that a browser shows."""

from __future__ import annotations

from tests.browser.driver import Browser
from tests.browser.npm_packages import AXE

RUN = """
const done = arguments[arguments.length - 1];
const described = ({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join(" ")}`;
axe.run(document).then(
  ({ violations, passes }) => done([violations.map(described), passes.length]),
  (error) => done([[String(error)], 0]),
);
"""


def faults(browser: Browser) -> list[str]:
    """Of all rules, good practice as well."""
    browser.run((AXE.directory / "axe.min.js").read_text())
    violated, passed = browser.driver.execute_async_script(RUN)
    assert passed > 10, "rules were applied"
    return list(violated)
