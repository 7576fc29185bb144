"""What a browser is told of every page and file that it gets from here."""

from __future__ import annotations


def page_headers(sources: str) -> dict[str, str]:
    """`sources` are the directives that say what a page may load; nothing else is loaded. Whatever stands on it, it takes its
    form to nobody, stands in nobody's frame and tells nobody where its reader came from."""
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Content-Security-Policy": policy}
