"""Arguments of the chat template that a request gives."""

from __future__ import annotations

import re
from typing import Annotated, Any

from trouper.protocol.problems import bad_request
from trouper.web.http.body_faults import says

NOT_FOR_TEMPLATES = frozenset({
    "self", "messages", "conversation", "chat_template", "tokenize", "tokenizer_kwargs", "sanitize_control_tokens",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
})  # fmt: skip
"""Names that are arguments of the tokenizer's own call, not variables of a template: padding to 10^9 tokens would take
all memory."""
TEMPLATE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NAMES = {"pattern": f"^{TEMPLATE_KEY.pattern}$", "not": {"enum": sorted(NOT_FOR_TEMPLATES)}}
TemplateKwargs = Annotated[
    dict[str, Any],
    says("{path} must be an object, not {type}", "invalid_type", extra_json_schema={"propertyNames": NAMES}),
]


def template_kwargs(value: TemplateKwargs | None) -> dict[str, Any]:
    """Return the arguments. Raises `RequestFailed` (400) for a name that is no variable of a template."""
    name = "chat_template_kwargs"
    for key in value or ():
        if not TEMPLATE_KEY.fullmatch(key) or key in NOT_FOR_TEMPLATES:
            raise bad_request(f"{name}.{key} cannot be set", f"{name}.{key}", "invalid_value")
    return value or {}
