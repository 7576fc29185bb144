"""Answers on the page: Markdown of the terminal chat's dialect, made of elements and texts."""

from __future__ import annotations

import re

import pytest

from tests.browser.driver import Browser
from tests.browser.page import Page, says, shown
from tests.browser.test_modules import computed
from trouper.cli.answer_screen import PARSER

SAMPLES = (
    "Hello **world**, *it* is `code` and ~~gone~~.",
    "# Title\n## Two ##\nText\nunder\n",
    "1. One\n2. Two\n   - a\n   - b\n3. Three\n\nafter",
    "1. Do:\n```bash\npip install x\n```\n2. Then:\n   ```python\n   def f(x):\n       return x\n   ```",
    "```make\nall:\n\tcc a.c\n```",
    "- a\n\n- b",
    "* item\n\n  para\n\n  ```\n  code\n  ```\n* next",
    "| a | b |\n|---|---:|\n| 1 | `x\\|y` |\n| 3 |",
    "> quote\ngoes on\n> - list\n> - more\n\nend",
    "Line  \ntwo\\\nthree",
    "[link](https://example.org) and <https://a.b/c> and [two (2)](https://a.b/c_(d))",
    "a_b_c and __init__ and *a **b** c* ***both*** 2 * 3 * 4",
    "Title\n===\nSub\n---\n***",
    "<script>alert(1)</script> & &amp; &lt; &#65;",
    "- [ ] task\n- [x] done",
    "text\n- list after text\n1. one",
    "    indented code\n\n    more\n\nno",
    "10. ten\n11. eleven",
    "[bad](javascript:alert(1)) and **Note:** `a | b` **bold**text **“quoted”**",
    "``a ` b`` and \\*no\\* and `` ` ``",
)
MADE = """
const place = document.createElement("div");
return arguments_.map((text) => {
  new module.Rendered(place).show(text);
  for (const code of place.querySelectorAll(".code")) code.replaceWith(code.querySelector("pre"));
  for (const table of place.querySelectorAll(".scrolls")) table.replaceWith(...table.children);
  for (const one of place.querySelectorAll("*")) {
    for (const { name } of [...one.attributes]) if (!["href", "class", "start"].includes(name)) one.removeAttribute(name);
  }
  const html = place.innerHTML;
  place.replaceChildren();
  return html;
});
"""


def like_the_terminal(text: str) -> str:
    """HTML of the terminal chat's parser, in which a line's end is one."""
    tokens = PARSER.parse(text)
    for token in tokens:
        for inline in token.children or ():
            if inline.type == "softbreak":
                inline.type = "hardbreak"
    return canonical(PARSER.renderer.render(tokens, PARSER.options, {}))


def canonical(html: str) -> str:
    """Without what has no meaning: lines between blocks, and quotes that need no escape."""
    html = re.sub(r' style="[^"]*"', "", html).replace(" />", ">").replace("&quot;", '"')
    pieces = re.split(r"(<pre>.*?</pre>)", html, flags=re.DOTALL)
    return "".join(one if one.startswith("<pre>") else one.replace("\n", "") for one in pieces)


async def test_it_is_read_as_in_the_terminal(browser: Browser) -> None:
    async with shown(browser) as (page, _):
        made = await computed(page, "markdown.js", MADE.replace("arguments_", repr([*SAMPLES])))
    assert isinstance(made, list) and len(made) == len(SAMPLES)
    for text, html in zip(SAMPLES, made, strict=True):
        assert canonical(html) == like_the_terminal(text), text


async def test_blocks_that_have_ended_keep_their_elements(browser: Browser) -> None:
    """So a selection there outlives the rest of the answer."""
    async with shown(browser) as (page, _):
        kept = await computed(
            page,
            "markdown.js",
            """
            const place = document.createElement("div"), rendered = new module.Rendered(place);
            rendered.show("one\\n\\n```\\ntw");
            const [first, second] = place.children;
            rendered.show("one\\n\\n```\\ntwo\\n```\\n\\nthree");
            return [place.children[0] === first, place.children[1] === second, place.children.length];
            """,
        )
    assert kept == [True, False, 3]


@pytest.mark.parametrize(
    "text",
    ["> " * 5000 + "x", "- " * 3000 + "x", "*a **b " * 5000, "[a](" * 5000, "> a\nb\n" * 1000],
    ids=["quotes", "lists", "marks", "links", "lazy"],
)
async def test_no_text_of_a_model_stops_the_page(browser: Browser, text: str) -> None:
    async with shown(browser) as (page, _):
        length = await computed(
            page,
            "markdown.js",
            f"const place = document.createElement('div'); new module.Rendered(place).show({text!r});"
            "return place.textContent.length",
        )
    assert isinstance(length, int) and length > 0


CODE = "Look:\n\n```python\nprint(1)\n```\n\nand <b>no</b> markup"
HEARD = """
window.copied = [];
Object.defineProperty(navigator, "clipboard", {configurable: true, value: {writeText: async (text) => { window.copied.push(text); }}});
"""


async def answered(page: Page, count: int = 1) -> None:
    await page.until(
        f"[...document.querySelectorAll('#messages .told')].filter(one => one.textContent.includes('token')).length === {count}"
    )


async def test_a_code_block_has_a_button_that_copies_it(browser: Browser) -> None:
    async with shown(browser, says(CODE)) as (page, _):
        await page.reads("#status", "Running")
        await page.run(HEARD)
        await page.type("#prompt", "Show me\n")
        await answered(page)
        assert await page.run("return document.querySelector('.code code').className") == (
            "language-python"
        )
        assert await page.run("return document.querySelectorAll('#messages .said b').length") == 0
        await page.click(".code button")
        await page.reads(".code button", "Copied")
        await page.click("#messages [aria-label='Copy the answer']")
        await page.until("window.copied.length === 2")
        assert await page.run("return window.copied") == ["print(1)\n", CODE]
        assert await page.complaints() == []
