"""What an exception was, in a form that can be compared and logged. Pure."""

from __future__ import annotations

import traceback

import attrs


@attrs.frozen
class Cause:
    """The exception's type and the innermost place in the code. Its message is left out: that may quote a prompt, and
    differs where the cause is the same."""

    error: str
    place: str

    def __str__(self) -> str:
        return f"{self.error} at {self.place}"


def cause_of(error: BaseException) -> Cause:
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "an unknown place"
    return Cause(type(error).__name__, place)
