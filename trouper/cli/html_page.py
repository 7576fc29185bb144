"""A page of figures as one HTML file without external resources, for light and dark displays."""

from __future__ import annotations

from html import escape

STYLE = """:root { color-scheme: light dark; --ink: #1c2128; --faint: #57606a; --paper: #ffffff;
  --grid: #d8dee4;
  --c0: #0969da; --c1: #bc4c00; --c2: #1a7f37; --c3: #8250df; --c4: #9a6700; --c5: #bf3989;
  --c6: #1b7c83; --c7: #57606a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --faint: #9198a1; --paper: #0d1117;
  --grid: #30363d;
  --c0: #58a6ff; --c1: #f0883e; --c2: #56d364; --c3: #bc8cff; --c4: #e3b341; --c5: #f778ba;
  --c6: #56d4dd; --c7: #9198a1; } }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; } dt {
  color: var(--faint); } dd { margin: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr));
  gap: 1.5rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; } svg text { fill: var(--faint); font-size: 12px; }
ul { display: flex; flex-wrap: wrap; gap: 0 1rem; margin: 0; padding: 0; list-style: none;
  color: var(--faint); }
li span { display: inline-block; width: .8em; height: .8em; margin-right: .4em;
  border-radius: 2px; }
"""


def html_page(title: str, body: str) -> str:
    """Return a page with this heading. `body`: HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""
