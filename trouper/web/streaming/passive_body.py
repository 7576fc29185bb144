"""The body of a stream that others make: whoever reads it owns nothing, so leaving ends nothing but the reading."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator
from types import TracebackType

from quart.wrappers.response import ResponseBody


class PassiveBody(ResponseBody):
    """Says what comes next; there is nothing to open, and nothing that would have to be given back."""

    async def __aenter__(self) -> AsyncIterator[bytes]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    @abstractmethod
    async def __anext__(self) -> bytes:
        """One write."""
