"""The body of a stream that belongs to others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator
from types import TracebackType

from quart.wrappers.response import ResponseBody


class PassiveBody(ResponseBody):
    """A response body without resources: closing the body ends only the reading."""

    async def __aenter__(self) -> AsyncIterator[bytes]:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    @abstractmethod
    async def __anext__(self) -> bytes:
        """Return the next write."""
