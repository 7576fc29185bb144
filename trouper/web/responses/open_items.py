"""Items of a response while they are generated."""

from __future__ import annotations

import attrs

from trouper.web.output.dialect import Json
from trouper.web.output.parsed_delta import CallStarted
from trouper.web.output.tool_forms import ToolKind
from trouper.web.responses.built_in_tools import call_fields
from trouper.web.responses.call_items import CALLS, PREFIXES
from trouper.web.responses.conversation_item import new_id, text_part

EVENTS: dict[ToolKind, str] = {
    "function": "response.function_call_arguments",
    "custom": "response.custom_tool_call_input",
}
"""Events of the arguments of calls, by the kind of the tool. Other calls have none: their items are
complete at once."""


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
        return (
            text_part(text, self.logprobs)
            if self.kind == "content"
            else {"type": "reasoning_text", "text": text}
        )

    @property
    def part_location(self) -> Json:
        return {"item_id": self.body["id"], "output_index": self.index, "content_index": 0}


@attrs.define(eq=False)
class OpenCall:
    """The call that is being generated."""

    body: Json
    index: int
    kind: ToolKind
    texts: list[str] = attrs.field(factory=list)

    @classmethod
    def of(cls, call: CallStarted, index: int) -> OpenCall:
        tool = call.tool
        [kind] = [name for name, known in CALLS.items() if known == tool.kind]
        item: Json = {"id": new_id(PREFIXES[tool.kind]), "type": kind, "call_id": call.id}
        if tool.kind in EVENTS:
            item |= {"name": tool.name} | (
                {} if tool.namespace is None else {"namespace": tool.namespace}
            )
        item |= {"environment": None} if tool.kind == "shell" else {}
        return cls(item | call_fields(tool.kind, "") | {"status": "in_progress"}, index, tool.kind)

    @property
    def event(self) -> str | None:
        """Name of the events of its arguments, without their ends; None if there are none."""
        return EVENTS.get(self.kind)

    def update(self) -> Json:
        """Write the arguments that were generated into the item. Returns the fields that hold
        them."""
        fields = call_fields(self.kind, "".join(self.texts))
        self.body |= fields
        return fields

    @property
    def location(self) -> Json:
        return {"item_id": self.body["id"], "output_index": self.index}
