// Names and keys that the theme leaves out.
const SCROLLING = "pre > code, .md-typeset__scrollwrap";
const COPYING = "nav.md-code__nav:not([role])";

function mend() {
  for (const region of document.querySelectorAll(SCROLLING)) {
    if (region.scrollWidth > region.clientWidth) region.tabIndex = 0;
    else region.removeAttribute("tabindex");
  }
  for (const landmark of document.querySelectorAll(COPYING)) landmark.role = "presentation";
}

document.querySelector(".md-search").setAttribute("aria-label", "Search");
for (const header of document.querySelectorAll("th:empty")) {
  header.replaceWith(document.createElement("td"));
}
mend();
addEventListener("resize", mend);
// The theme wraps tables and adds buttons later.
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
