"""Items of a response while they are generated."""

from __future__ import annotations

import attrs

from trouper.web.output.dialect import Json
from trouper.web.output.parsed_delta import CallStarted
from trouper.web.responses.item_types import new_id, text_part


@attrs.define(eq=False)
class OpenItem:
    """The item that is being generated: a message or reasoning."""

    body: Json
    index: int
    texts: list[str] = attrs.field(factory=list)
    logprobs: list[Json] = attrs.field(factory=list)

    @property
    def kind(self) -> str:
        return "content" if self.body["type"] == "message" else "reasoning"

    @property
    def part(self) -> Json:
        text = "".join(self.texts)
        return text_part(text, self.logprobs) if self.kind == "content" else {"type": "reasoning_text", "text": text}

    @property
    def part_location(self) -> Json:
        return {"item_id": self.body["id"], "output_index": self.index, "content_index": 0}


@attrs.define(eq=False)
class OpenCall:
    """The call that is being generated."""

    body: Json
    index: int
    texts: list[str] = attrs.field(factory=list)

    @classmethod
    def of(cls, call: CallStarted, index: int) -> OpenCall:
        item = {"id": new_id("fc_"), "type": "function_call", "call_id": call.id, "name": call.name}
        return cls(item | {"arguments": "", "status": "in_progress"}, index)

    @property
    def location(self) -> Json:
        return {"item_id": self.body["id"], "output_index": self.index}
