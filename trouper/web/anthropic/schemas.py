"""Rules between fields of a messages request as JSON Schema; functions beside the request class
check the same."""

from __future__ import annotations

from trouper.web.http.request_schema import Json, needs

_FORCED: Json = {
    "type": "object",
    "properties": {"type": {"enum": ["any", "tool"]}},
    "required": ["type"],
}
FORCED_NEEDS_TOOLS = needs("tool_choice", _FORCED, "tools", {"type": "array", "minItems": 1})
