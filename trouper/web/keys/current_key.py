"""The key of the request at hand."""

from __future__ import annotations

from quart import has_request_context, request

from trouper.protocol.api_keys import Keys
from trouper.protocol.key_options import ANYBODY, ApiKey, Right
from trouper.protocol.settings import ServerSettings
from trouper.web.http.current_request import CurrentRequest


class CurrentKey(CurrentRequest):
    """Access to the key of the request at hand, and to the request. There is one object for the app."""

    def __init__(self, settings: ServerSettings, keys: Keys) -> None:
        super().__init__(settings)
        self._keys = keys

    @property
    def key(self) -> ApiKey | None:
        """The key of this request, or of the batch that it is a line of; None for a request to an open endpoint without one."""
        if not has_request_context():
            return ANYBODY
        if self.batch_owner is not None:
            return self._keys.of_identity(self.batch_owner)
        return self._keys.find(request.headers.get("Authorization"), request.headers.get("X-Api-Key"))

    @property
    def key_identity(self) -> str:
        """What stands for the key of this request, where the key itself must not be stored; empty without keys."""
        key = self.key
        return "" if key is None or key is ANYBODY else key.identity

    def has_right(self, right: Right) -> bool:
        key = self.key
        return key is not None and right in key.rights
