"""Items of earlier calls and outputs of custom tools, shells and patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from msgspec import Meta

from trouper.protocol.problems import bad_request
from trouper.web.http.body_faults import says
from trouper.web.http.field_types import Ignored
from trouper.web.http.image_source import ImageField
from trouper.web.http.leniency import Adapt, Skip
from trouper.web.http.request_body import SentBack
from trouper.web.output.tool_forms import Json, ToolForm, ToolKind
from trouper.web.responses.schemas import STATUSES

MAX_ID = 128
ItemId = Annotated[
    str,
    says(f"{{path}} must be a string of 1 to {MAX_ID} characters", min_length=1, max_length=MAX_ID),
]
Status = Annotated[
    Literal["completed", "incomplete", "in_progress"],
    says(f"{{path}} must be one of {', '.join(STATUSES)}"),
]
PARTS = ("input_text", "output_text")
INPUT_PARTS = (*PARTS, "input_image")
NOT_A_PART = "{path}: only parts of type {known} are supported, not {tag!r}"


def new_id(kind: str) -> str:
    return PREFIXES[kind] + uuid4().hex


def not_a_part(kind: str) -> Meta:
    return says(NOT_A_PART.replace("{known}", kind), "unsupported_content")


def refuse_part(known: Sequence[str], kind: Any, path: str) -> None:
    message = NOT_A_PART.format(path=path, tag=kind, known=" or ".join(known))
    raise bad_request(message, path, "unsupported_content")


def input_text(text: str) -> Json:
    return {"type": "input_text", "text": text}


def text_part(text: str, logprobs: Sequence[Json] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


class InputText(SentBack, tag="input_text", frozen=True):
    """Text of a prompt."""

    text: str
    prompt_cache_breakpoint: Ignored = None


class InputImage(SentBack, tag="input_image", frozen=True):
    """An image. If the model reads text only, a placeholder stands for it, also in what is
    stored."""

    image_url: ImageField = None
    file_id: ImageField = None
    detail: ImageField = None
    prompt_cache_breakpoint: Ignored = None

    def stored(self) -> Json:
        """Return the part as OpenAI's clients read it."""
        return {
            "type": "input_image",
            "detail": self.detail or "auto",
            "file_id": self.file_id,
            "image_url": self.image_url,
        }


class OutputText(SentBack, tag="output_text", frozen=True):
    """Text of an answer. Annotations and logprobs are sent back from an earlier one."""

    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


class RefusalText(SentBack, tag="refusal", frozen=True):
    """Text of an answer that another server called a refusal."""

    refusal: str


class SummaryText(SentBack, tag="summary_text", frozen=True):
    """Summary of reasoning."""

    text: str


class ReasoningText(SentBack, tag="reasoning_text", frozen=True):
    """Text of reasoning."""

    text: str


class ConversationItem(SentBack, kw_only=True, frozen=True):
    """An item with an id and a status."""

    id: ItemId | None = None
    status: Status | None = None

    def head(self) -> Json:
        """Return the fields of every item, with a new id if there is none."""
        kind = str(self.__struct_config__.tag)
        return {"id": self.id or new_id(kind), "type": kind, "status": self.status or "completed"}


CALLS: dict[str, ToolKind] = {
    "function_call": "function",
    "custom_tool_call": "custom",
    "local_shell_call": "local_shell",
    "shell_call": "shell",
    "apply_patch_call": "apply_patch",
}
OUTPUTS = tuple(f"{kind}_output" for kind in CALLS)
PREFIXES = {
    "response": "resp_",
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "local_shell_call": "lsh_",
    "local_shell_call_output": "lsho_",
    "shell_call": "sh_",
    "shell_call_output": "sho_",
    "apply_patch_call": "apc_",
    "apply_patch_call_output": "apco_",
}
"""Beginnings of new ids, by type."""
Output = Annotated[
    str | list[Annotated[InputText | InputImage, not_a_part("input_text or input_image")]],
    says("{path} must be a string, not {type}", "invalid_type"),
]


def tool_of(item: Json) -> ToolForm:
    kind = CALLS[item["type"]]
    name = item["name"] if kind in ("function", "custom") else kind
    return ToolForm(name, kind, item.get("namespace"))


def plain_output(output: str | list[InputText | InputImage]) -> str | list[Json]:
    if isinstance(output, str):
        return output
    return [
        part.stored() if isinstance(part, InputImage) else input_text(part.text) for part in output
    ]


class _CallOfEarlierTurn(ConversationItem, kw_only=True, frozen=True):
    call_id: str
    caller: Ignored = None
    created_by: Ignored = None


class CustomToolCallItem(_CallOfEarlierTurn, tag="custom_tool_call", kw_only=True, frozen=True):
    """A call of a custom tool."""

    name: str
    input: str
    namespace: str | None = None

    def stored(self, _: str) -> Json:
        call = {"call_id": self.call_id, "name": self.name, "input": self.input}
        within = {} if self.namespace is None else {"namespace": self.namespace}
        return self.head() | call | within


class PlainOutputItem(ConversationItem, kw_only=True, frozen=True):
    call_id: str
    output: Output

    def stored(self, _: str) -> Json:
        return self.head() | {"call_id": self.call_id, "output": plain_output(self.output)}


class FunctionCallOutputItem(
    PlainOutputItem, tag="function_call_output", kw_only=True, frozen=True
):
    """The result of a call."""

    name: Ignored = None
    namespace: Ignored = None


class CustomToolCallOutputItem(
    PlainOutputItem, tag="custom_tool_call_output", kw_only=True, frozen=True
):
    """The result of a call of a custom tool."""

    name: Ignored = None
    caller: Ignored = None
    created_by: Ignored = None


class _Action(SentBack, kw_only=True, frozen=True):
    timeout_ms: int | None = None


class LocalShellAction(_Action, tag="exec", kw_only=True, frozen=True):
    command: list[str]
    env: dict[str, str] | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCallItem(_CallOfEarlierTurn, tag="local_shell_call", kw_only=True, frozen=True):
    """A command that the client has run."""

    action: LocalShellAction

    def stored(self, _: str) -> Json:
        action: Json = {
            "type": "exec",
            "command": self.action.command,
            "env": self.action.env or {},
        }
        for name in ("timeout_ms", "user", "working_directory"):
            if getattr(self.action, name) is not None:
                action[name] = getattr(self.action, name)
        return self.head() | {"call_id": self.call_id, "action": action}


def _called_by_id(value: Json, _: Skip) -> Json:
    """Read an output that names the call by `id` alone, as the `openai` package's types do."""
    return value if "call_id" in value or "id" not in value else value | {"call_id": value["id"]}


class LocalShellCallOutputItem(
    PlainOutputItem, tag="local_shell_call_output", kw_only=True, frozen=True
):
    """The output of a command."""

    adapt: ClassVar[Adapt | None] = _called_by_id
    caller: Ignored = None
    created_by: Ignored = None


class ShellAction(_Action, kw_only=True, frozen=True):
    commands: list[str]
    max_output_length: int | None = None


class ShellCallItem(_CallOfEarlierTurn, tag="shell_call", kw_only=True, frozen=True):
    """Commands that the client has run."""

    action: ShellAction
    environment: Ignored = None

    def stored(self, _: str) -> Json:
        action = {
            name: getattr(self.action, name)
            for name in ("commands", "timeout_ms", "max_output_length")
        }
        call = {"call_id": self.call_id, "action": action, "environment": None}
        return self.head() | call


class ShellCallOutputItem(_CallOfEarlierTurn, tag="shell_call_output", kw_only=True, frozen=True):
    """The output of commands, and how they ended."""

    output: Annotated[
        list[dict[str, Any]] | str,
        says("{path} must be an array of outputs, not {type}", "invalid_type"),
    ]
    max_output_length: Ignored = None

    def stored(self, _: str) -> Json:
        return self.head() | {"call_id": self.call_id, "output": self.output}


class PatchOperation(SentBack, kw_only=True, frozen=True):
    type: Annotated[
        Literal["create_file", "update_file", "delete_file"],
        says("{path} must be create_file, update_file or delete_file"),
    ]
    path: str
    diff: str | None = None


class ApplyPatchCallItem(_CallOfEarlierTurn, tag="apply_patch_call", kw_only=True, frozen=True):
    """A patch that the client has applied."""

    operation: PatchOperation

    def stored(self, _: str) -> Json:
        operation = {"type": self.operation.type, "path": self.operation.path}
        operation |= {} if self.operation.diff is None else {"diff": self.operation.diff}
        return self.head() | {"call_id": self.call_id, "operation": operation}


PatchStatus = Annotated[
    Literal["completed", "failed", "incomplete", "in_progress"],
    says("{path} must be completed or failed"),
]


class ApplyPatchCallOutputItem(SentBack, tag="apply_patch_call_output", kw_only=True, frozen=True):
    """Whether a patch could be applied."""

    call_id: str
    status: PatchStatus = "completed"
    output: str | None = None
    id: Annotated[str, Meta(min_length=1)] | None = None
    caller: Ignored = None
    created_by: Ignored = None

    def stored(self, _: str) -> Json:
        kind = "apply_patch_call_output"
        return {
            "id": self.id or new_id(kind),
            "type": kind,
            "status": self.status,
            "call_id": self.call_id,
            "output": self.output,
        }


CallItem = CustomToolCallItem | LocalShellCallItem | ShellCallItem | ApplyPatchCallItem
CallOutputItem = (
    CustomToolCallOutputItem
    | LocalShellCallOutputItem
    | ShellCallOutputItem
    | ApplyPatchCallOutputItem
)


def output_parts(item: Json) -> list[Json]:
    output = item["output"]
    return output if isinstance(output, list) and _is_plain(item) else [input_text(_text(item))]


def _is_plain(item: Json) -> bool:
    return item["type"] not in ("shell_call_output", "apply_patch_call_output")


def _text(item: Json) -> str:
    output = item["output"]
    match item["type"]:
        case "shell_call_output" if not isinstance(output, str):
            return "\n".join(map(_shell_output, output))
        case "apply_patch_call_output":
            return output or (
                "The patch was applied." if item["status"] == "completed" else "The patch failed."
            )
    return str(output)


def _shell_output(part: Json) -> str:
    outcome = part.get("outcome")
    ending = ""
    if isinstance(outcome, dict) and outcome.get("type") == "timeout":
        ending = "timed out"
    elif isinstance(outcome, dict) and outcome.get("exit_code"):
        ending = f"exit code: {outcome['exit_code']}"
    texts = (part.get("stdout"), part.get("stderr"), ending)
    return "\n".join(text for text in texts if isinstance(text, str) and text)
