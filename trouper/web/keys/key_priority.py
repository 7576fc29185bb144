"""The priority of a request, as its key allows."""

from __future__ import annotations

from trouper.protocol.key_options import ApiKey
from trouper.protocol.problems import Problem, RequestFailed


def priority_with(key: ApiKey, given: int | None) -> int:
    """Return the priority of a request with this key; `given` None: the key's. Raises
    `RequestFailed` (403) for one that is more urgent than the key may ask for."""
    if given is None:
        return key.priority
    if key.min_priority is None or given >= key.min_priority:
        return given
    message = (
        f"priority {given} is below {key.min_priority}, the least that the API key {key.label!r} "
        "may send (min_priority); raise it"
    )
    raise RequestFailed(
        Problem(403, message, "permission_error", "priority", "priority_not_allowed")
    )
