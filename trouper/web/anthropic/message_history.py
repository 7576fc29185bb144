"""Messages of a request, and the messages that chat templates get."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from trouper.protocol.problems import bad_request
from trouper.web.anthropic.thinking import thought
from trouper.web.http.body_faults import explains, says
from trouper.web.http.body_parsing import combination
from trouper.web.http.field_types import MAX_MESSAGES, Ignored
from trouper.web.http.image_source import (
    ImageField,
    ImageParts,
    content_of,
    fields_of_source,
    joined_content,
)
from trouper.web.http.leniency import Adapt, Skip, messages_adapted, safe_name
from trouper.web.http.request_body import SentBack
from trouper.web.http.request_schema import Json, Unsupported
from trouper.web.openai.chat_tools import arguments_adapted, arguments_of
from trouper.web.openai.other_servers import FILE, PLACEHOLDER
from trouper.web.output.tool_calls import NO_TOOLS, Tools
from trouper.web.output.tool_forms import ToolForm


class TextBlock(SentBack, tag="text", frozen=True):
    """Text. Caching needs no marks."""

    unsupported: ClassVar[Unsupported] = {"citations": ([],)}
    text: str
    cache_control: Ignored = None


def _input_adapted(value: Json, skip: Skip) -> Json:
    given = value.get("input")
    if given is None:
        return value | {"input": {}}
    if not isinstance(given, str):
        return value
    text = arguments_adapted({"arguments": given}, skip)["arguments"]
    return value | {"input": arguments_of(text, "input")}


class ToolUseBlock(SentBack, tag="tool_use", frozen=True):
    """A call of an earlier answer."""

    unsupported: ClassVar[Unsupported] = {"caller": ({"type": "direct"},)}
    adapt: ClassVar[Adapt | None] = _input_adapted
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Ignored = None


class ThinkingBlock(SentBack, tag="thinking", frozen=True):
    """Thinking of an earlier answer."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(SentBack, tag="redacted_thinking", frozen=True):
    """Thinking that nobody can read; ignored."""

    data: str


def _only(*kinds: str) -> Meta:
    def explain(value: Any, path: str) -> None:
        if isinstance(value, dict) and value.get("type") not in kinds:
            detail = (
                f"{path}: a block here may be of type {', '.join(kinds)}, not {value.get('type')!r}"
            )
            raise bad_request(detail, path, "unsupported_content")

    return explains(explain)


class ImageBlock(SentBack, tag="image", frozen=True):
    """An image. If the model reads text only, a placeholder stands for the image."""

    source: ImageField = None
    cache_control: Ignored = None


class ToolReferenceBlock(SentBack, tag="tool_reference", frozen=True):
    """A tool with `defer_loading` that the client's own search has found."""

    tool_name: str
    cache_control: Ignored = None


NO_BLOCKS = says("{path} must be a string or an array of blocks, not {type}", "invalid_type")
TextContent = Annotated[str | list[Annotated[TextBlock, _only("text")]], NO_BLOCKS]


class ToolResultBlock(SentBack, tag="tool_result", frozen=True):
    """The result of a call."""

    tool_use_id: str
    content: (
        Annotated[
            str
            | list[
                Annotated[
                    TextBlock | ImageBlock | ToolReferenceBlock,
                    _only("text", "image", "tool_reference"),
                ]
            ],
            NO_BLOCKS,
        ]
        | None
    ) = None
    is_error: bool | None = None
    cache_control: Ignored = None


UserBlock = TextBlock | ImageBlock | ToolResultBlock
AssistantBlock = TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock


class UserTurn(SentBack, tag_field="role", tag="user", frozen=True):
    """A turn of the user, with results of calls."""

    content: Annotated[
        str | list[Annotated[UserBlock, _only("text", "image", "tool_result")]], NO_BLOCKS
    ]


class AssistantTurn(SentBack, tag_field="role", tag="assistant", frozen=True):
    """An earlier answer. If it is the last message, the answer continues it."""

    content: Annotated[
        str
        | list[
            Annotated[AssistantBlock, _only("text", "tool_use", "thinking", "redacted_thinking")]
        ],
        NO_BLOCKS,
    ]


class SystemTurn(SentBack, tag_field="role", tag="system", frozen=True):
    """Instructions."""

    content: TextContent


ConversationTurn = UserTurn | AssistantTurn | SystemTurn
Turns = Annotated[list[ConversationTurn], Meta(min_length=1, max_length=MAX_MESSAGES)]
NOT_FOR_MODELS = "x-anthropic-"
"""System blocks for the API only. One has a hash that changes at each request and would end prefix
sharing: https://github.com/vllm-project/vllm/pull/36829."""


def conversation_of(
    system: str | Sequence[TextBlock] | None,
    messages: Sequence[ConversationTurn],
    tools: Tools = NO_TOOLS,
    images: ImageParts | None = None,
) -> tuple[Json, ...]:
    """`tools`: offered tools, by whose names the model knows earlier calls. `images` reads the
    images. Raises `RequestFailed` (400)."""
    turns = _system(system)
    reader = TurnReader(tools, ImageParts() if images is None else images)
    for index, message in enumerate(messages):
        turns += reader.turns(message, f"messages.{index}.content")
    return tuple(_combined(turns))


def continues(turns: Sequence[Json]) -> bool:
    """Raises `RequestFailed` (400)."""
    if turns[-1]["role"] != "assistant":
        return False
    if turns[-1].get("tool_calls"):
        detail = "the last message calls a tool: send its tool_result behind it"
        raise combination(f"messages: {detail}", "messages")
    return True


def _system(system: str | Sequence[TextBlock] | None) -> list[Json]:
    blocks = [TextBlock(system)] if isinstance(system, str) else system or ()
    text = "\n".join(
        block.text for block in blocks if block.text and not block.text.startswith(NOT_FOR_MODELS)
    )
    return [{"role": "system", "content": text}] if text else []


# In lenient readings, all but the text of documents and of blocks of server tools is skipped: an
# error would fail every later request of a conversation.
class TurnReader:
    def __init__(self, tools: Tools, images: ImageParts) -> None:
        self._tools, self._images = tools, images

    def turns(self, message: ConversationTurn, path: str) -> list[Json]:
        """`path`: of the message's content."""
        if isinstance(message, AssistantTurn):
            content = message.content
            return [self._answer([TextBlock(content)] if isinstance(content, str) else content)]
        role = "user" if isinstance(message, UserTurn) else "system"
        if isinstance(message.content, str):
            return [{"role": role, "content": message.content}]
        return [
            self._result(block, f"{path}.{index}")
            if isinstance(block, ToolResultBlock)
            else {
                "role": role,
                "content": content_of([self._piece(block, role, f"{path}.{index}")]),
            }
            for index, block in enumerate(message.content)
        ] or [{"role": role, "content": ""}]

    def _answer(self, blocks: Sequence[AssistantBlock]) -> Json:
        turn: Json = {
            "role": "assistant",
            "content": "\n".join(block.text for block in blocks if isinstance(block, TextBlock)),
        }
        calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
        if calls:
            turn["tool_calls"] = [self._call(call) for call in calls]
        thoughts = [
            thought(block.thinking, block.signature)
            for block in blocks
            if isinstance(block, ThinkingBlock)
        ]
        if any(thoughts):
            turn["reasoning_content"] = "\n".join(filter(None, thoughts))
        return turn

    def _call(self, block: ToolUseBlock) -> Json:
        name = self._tools.called(ToolForm(block.name))
        function = {"name": name, "arguments": block.input}
        return {"id": block.id, "type": "function", "function": function}

    def _result(self, block: ToolResultBlock, path: str) -> Json:
        body = block.content or ""
        blocks = [TextBlock(body)] if isinstance(body, str) else body
        pieces = [
            self._piece(part, "tool", f"{path}.content.{index}")
            for index, part in enumerate(blocks)
        ]
        content = content_of(pieces, "\n")
        return {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": joined_content("Error: ", content, "") if block.is_error else content,
        }

    def _piece(
        self, block: TextBlock | ImageBlock | ToolReferenceBlock, role: str, path: str
    ) -> str | Json:
        if isinstance(block, TextBlock):
            return block.text
        if isinstance(block, ToolReferenceBlock):
            return self._described(block)
        if not self._images.takes(role, "image"):
            return PLACEHOLDER
        return self._images.add(fields_of_source(block.source), path)

    def _described(self, block: ToolReferenceBlock) -> str:
        name = self._tools.called(ToolForm(block.tool_name))
        tool = next(
            (tool for tool in self._tools.offered if tool["function"]["name"] == name), None
        )
        if tool is None or name not in self._tools.deferred:
            return f"The tool {name} is available."
        return f"The tool {name} is available now:\n{json.dumps(tool, ensure_ascii=False)}"


def _combined(turns: Sequence[Json]) -> list[Json]:
    """Some templates refuse two user turns in a row."""
    combined: list[Json] = []
    for turn in turns:
        if turn["role"] != "tool" and combined and combined[-1]["role"] == turn["role"]:
            combined[-1] = _both(combined[-1], turn)
        else:
            combined.append(turn)
    last = combined[-1]
    empty = (
        last["role"] == "assistant" and not last["content"] and last.keys() <= {"role", "content"}
    )
    return combined[:-1] if empty and len(combined) > 1 else combined


def _both(first: Json, second: Json) -> Json:
    both = first | second
    for name in ("content", "reasoning_content"):
        if first.get(name) and second.get(name):
            both[name] = joined_content(first[name], second[name], "\n")
        elif name in both:
            both[name] = first.get(name) or second.get(name) or ""
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return both | ({"tool_calls": calls} if calls else {})


KNOWN = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
WITHIN = ("text", "image", "tool_reference")
FILES = ("document", "audio", "video", "file")
"""Words in the types of blocks for which a placeholder stands, also of other dialects."""


def blocks_adapted(value: Json, skip: Skip) -> Json:
    return messages_adapted(value, lambda message: _message(message, skip))


def _message(message: Any, skip: Skip) -> Any:
    known = (
        KNOWN.get(message["role"])
        if isinstance(message, dict) and isinstance(message.get("role"), str)
        else None
    )
    if known is None or not isinstance(message.get("content"), list):
        return message
    if all(_is_plain(block, known) for block in message["content"]):
        return message
    blocks = [
        read
        for block in message["content"]
        for read in _read(block, known, "messages.content", skip)
    ]
    return message | {"content": blocks}


def _is_plain(block: Any, known: tuple[str, ...]) -> bool:
    if not isinstance(block, dict):
        return True
    kind = block.get("type")
    return kind in known and (kind != "tool_result" or not isinstance(block.get("content"), list))


def _read(block: Any, known: tuple[str, ...], path: str, skip: Skip) -> list[Any]:
    """Read one block leniently: known types stay, others become their text, or are skipped by
    name."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "tool_result" and kind in known and isinstance(block.get("content"), list):
        inner = [
            read
            for part in block["content"]
            for read in _read(part, WITHIN, f"{path}.content", skip)
        ]
        return [block | {"content": inner}]
    if not isinstance(kind, str) or kind in known:
        return [block]
    text = _text_of(kind, block)
    if text is None:
        skip(f"{path}.{safe_name(kind)}")
        text = FILE if "image" in known and any(word in kind for word in FILES) else ""
    return [{"type": "text", "text": text}] if text else []


def _text_of(kind: str, block: Json) -> str | None:
    """The text of a block that the reading does not know: a document's, a search result's, or a
    summary's. None: the block holds none."""
    source = block.get("source")
    if kind == "document" and isinstance(source, dict):
        if source.get("type") == "text" and isinstance(source.get("data"), str):
            return _titled(block, source["data"])
        inner = _joined(source.get("content")) if source.get("type") == "content" else None
        return None if inner is None else _titled(block, inner)
    if kind == "compaction" and isinstance(block.get("content"), str):
        return str(block["content"])  # Clients leave out what it summarizes.
    if kind == "search_result":
        found = _joined(block.get("content"))
        origin = source if isinstance(source, str) else ""
        return None if found is None else _titled(block, "\n".join(filter(None, (origin, found))))
    if kind == "tool_reference" and isinstance(block.get("tool_name"), str):  # Outside of a result.
        return f"The tool {block['tool_name']} is available."
    return None


def _titled(block: Json, text: str) -> str:
    titles = (block.get("title"), block.get("context"))
    return "\n".join([*(title for title in titles if isinstance(title, str) and title), text])


def _joined(content: Any) -> str | None:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [
        part.get("text")
        for part in content
        if isinstance(part, dict) and part.get("type") == "text"
    ]
    return (
        "\n".join(text for text in texts if isinstance(text, str))
        if len(texts) == len(content)
        else None
    )
