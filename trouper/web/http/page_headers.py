"""Security headers of the pages and files that the server sends to browsers."""

from __future__ import annotations


def page_headers(sources: str) -> dict[str, str]:
    """Return the headers of a page. `sources` are the directives of what the page may load;
    everything else is blocked. The page cannot submit forms, be framed, or send a referrer."""
    policy = (
        f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'; frame-ancestors "
        "'none'"
    )
    return {
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Content-Security-Policy": policy,
    }
