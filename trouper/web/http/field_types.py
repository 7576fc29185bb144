"""Field types shared by several dialects."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from trouper.protocol.requests import MAX_PRIORITY, MIN_PRIORITY, UNBOUNDED
from trouper.web.http.body_faults import says
from trouper.web.http.request_schema import DIMENSIONS, LENGTH, MODEL, TOKEN, described

HUGE = UNBOUNDED
MAX_MESSAGES = 10_000
MAX_TOKENS = 2**20  # Token ids of a prompt: beyond any context, few enough to check one by one.


Model = Annotated[str, described(MODEL)]
TokenId = Annotated[int, described(TOKEN)]
Length = Annotated[int, described(LENGTH, ge=1, le=HUGE)]
Dimensions = Annotated[int, described(DIMENSIONS)]
Count = Annotated[int, Meta(ge=0, le=HUGE)]
Share = Annotated[float, Meta(ge=0, le=1)]
Filled = Annotated[str, Meta(min_length=1)]

# Length of a stop string. Matching costs the length squared: 20,000 characters would stop all
# streams for seconds.
MAX_STOP = 512
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP)]
Salt = Annotated[str, Meta(max_length=1024)]
"""Requests with different salts share no cached prompt."""
Priority = Annotated[
    int,
    Meta(
        ge=MIN_PRIORITY,
        le=MAX_PRIORITY,
        description="Lower is scheduled first. Default: that of the API key, else 0.",
    ),
]
JsonText = Annotated[
    str, described({"format": "json-object"}, description="A JSON object, as text.")
]
Ignored = Annotated[Any, Meta(description="Changes nothing.")]
Text = Annotated[str, says("{path} must be a string", "invalid_type")]
String = Annotated[str, says("{path} must be a string, not {type}", "invalid_type")]
Flag = Annotated[bool, says("{path} must be a boolean", "invalid_type")]
