"""The cause of a crash, in a form that can be compared and logged. Pure."""

from __future__ import annotations

import traceback

import attrs


@attrs.frozen
class Cause:
    """Type of an exception and the innermost location in the code. The message is left out, since
    it may quote a prompt and differs between crashes of the same cause."""

    error: str
    location: str

    def __str__(self) -> str:
        return f"{self.error} at {self.location}"


def cause_of(error: BaseException) -> Cause:
    frames = traceback.extract_tb(error.__traceback__)
    location = (
        f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"
        if frames
        else "an unknown place"
    )
    return Cause(type(error).__name__, location)
