"""GET /v1/usage: usage by key since the server started."""

from __future__ import annotations

import attrs
from quart import Response

from trouper.protocol.key_options import ANYBODY
from trouper.web.http.endpoints import Endpoint
from trouper.web.http.request_schema import COUNT, TEXT, Json, array, closed
from trouper.web.keys.key_limits import KeyAccount, ModelUsage
from trouper.web.service import Service, as_json

COUNTS: Json = dict.fromkeys((field.name for field in attrs.fields(ModelUsage)), COUNT)
MODEL_USAGE = closed({"model": TEXT} | COUNTS, "model", *COUNTS)
KEY_USAGE = closed(
    {"key": TEXT} | COUNTS | {"models": array(MODEL_USAGE)}, "key", *COUNTS, "models"
)
USAGE = closed({"object": {"const": "list"}, "data": array(KEY_USAGE)}, "object", "data")


def usage_body(account: KeyAccount) -> Json:
    """Format an account: the sums, and the usage of each model."""
    models = {name: attrs.asdict(used) for name, used in sorted(account.usage.items())}
    total = {name: sum(used[name] for used in models.values()) for name in COUNTS}
    return (
        {"key": account.key.label}
        | total
        | {"models": [{"model": name} | used for name, used in models.items()]}
    )


class UsageOfKeys:
    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint(
                method="GET",
                path="/v1/usage",
                handler=self.usage,
                tag="Server",
                summary="What this key has used since the server started",
                description=(
                    "Requests and tokens, by model; of all keys, for a key with the right "
                    "`observability`."
                ),
                answer=USAGE,
            ),
        )

    async def usage(self) -> Response:
        key = self._service.key or ANYBODY
        accounts = self._service.accounts.listed(self._service.keys)
        if "observability" not in key.rights:
            accounts = [account for account in accounts if account.key.identity == key.identity]
        return as_json({"object": "list", "data": [usage_body(account) for account in accounts]})
