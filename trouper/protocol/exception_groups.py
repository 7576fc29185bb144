"""Unwrapping of exception groups, in which Trio's nurseries raise what their tasks raised."""

from __future__ import annotations

from collections.abc import Iterator


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions inside nested groups, in order; an exception that is no group is its only
    leaf."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error
