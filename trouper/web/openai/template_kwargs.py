"""Arguments of the chat template that a request gives."""

from __future__ import annotations

import re
from typing import Annotated, Any

from trouper.protocol.problems import bad_request
from trouper.web.http.body_faults import says

NOT_FOR_TEMPLATES = frozenset(
    {
        "self",
        "messages",
        "conversation",
        "chat_template",
        "tokenize",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
    }
)
"""Arguments of the tokenizer's call, not of templates: padding to 10^9 tokens would exhaust
memory."""
ARRAYS = ("tools", "documents")
TEMPLATE_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NAMES = {"pattern": f"^{TEMPLATE_KEY.pattern}$", "not": {"enum": sorted(NOT_FOR_TEMPLATES)}}
OBJECTS = {"type": ["array", "null"], "items": {"type": "object"}}
TemplateKwargs = Annotated[
    dict[str, Any],
    says(
        "{path} must be an object, not {type}",
        "invalid_type",
        extra_json_schema={"propertyNames": NAMES, "properties": dict.fromkeys(ARRAYS, OBJECTS)},
    ),
]


def template_kwargs(value: TemplateKwargs | None) -> dict[str, Any]:
    """Raises `RequestFailed` (400), also for malformed tools or documents."""
    name = "chat_template_kwargs"
    for key, given in (value or {}).items():
        if not TEMPLATE_KEY.fullmatch(key) or key in NOT_FOR_TEMPLATES:
            raise bad_request(f"{name}.{key} cannot be set", f"{name}.{key}", "invalid_value")
        if key in ARRAYS and given is not None and not _are_objects(given):
            raise bad_request(
                f"{name}.{key} must be an array of objects", f"{name}.{key}", "invalid_type"
            )
    return value or {}


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
