"""Parameters of the queries of /v1/responses."""

from __future__ import annotations

from trouper.web.http.field_types import HUGE
from trouper.web.http.request_schema import FLAG, TEXT
from trouper.web.output.dialect import Json

MAX_PAGE, DEFAULT_PAGE = 100, 20
REPLAY_QUERY: Json = {
    "stream": FLAG,
    "starting_after": {"type": "integer", "minimum": 0, "maximum": HUGE},
    "include_obfuscation": {"enum": [False]},
}
PAGE_QUERY: Json = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": TEXT,
}
