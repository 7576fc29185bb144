"""API keys: which requests may pass."""

from __future__ import annotations

import hmac
from hashlib import sha256

import attrs

from trouper.protocol.keys import FILE_FLAG, keys_in, sendable
from trouper.protocol.problems import Problem, SettingsInvalid
from trouper.protocol.settings import ServerSettings

OPEN_PATHS = frozenset({"/", "/health", "/livez", "/readyz", "/metrics", "/openapi.json", "/docs"})
ASSETS = "/live/"
"""The live page's files; they hold no data."""


@attrs.frozen
class Keys:
    """Digests of the accepted keys; without any, every request is accepted."""

    _digests: tuple[bytes, ...]

    @classmethod
    def of(cls, settings: ServerSettings) -> Keys:
        """Read the keys from the settings. Raises `SettingsInvalid` if a key cannot be sent, or the key file cannot be
        read or holds no key."""
        keys = [sendable(key, "--api-key") for key in settings.api_key]
        if settings.api_key_file is not None:
            of_file = [*keys_in(settings.api_key_file)]
            if not of_file:
                message = f"{FILE_FLAG} {settings.api_key_file} holds no key; write one a line into it"
                raise SettingsInvalid(message, FILE_FLAG)
            keys += of_file
        return cls(tuple(sha256(key.encode()).digest() for key in keys))

    @property
    def needed(self) -> bool:
        return bool(self._digests)

    def let_in(self, authorization: str | None, api_key: str | None) -> bool:
        given = _given(authorization, api_key)
        return not self.needed or (given is not None and self._known(given))

    def problem(self, path: str, authorization: str | None, api_key: str | None) -> Problem | None:
        """Return the reason to refuse the request, or None."""
        if path in OPEN_PATHS or path.startswith(ASSETS) or self.let_in(authorization, api_key):
            return None
        given = _given(authorization, api_key)
        message = "the API key is wrong" if given else "an API key is needed: send `Authorization: Bearer KEY`"
        return Problem(401, message, "authentication_error", None, "invalid_api_key")

    def _known(self, key: str) -> bool:
        """Whether the key is accepted. In constant time: every digest is compared, whether or not one matched."""
        digest = sha256(key.encode("utf-8", "surrogatepass")).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _given(authorization: str | None, api_key: str | None) -> str | None:
    """Return the key of a request."""
    scheme, _, bearer = (authorization or "").partition(" ")
    return (bearer.strip() if scheme.lower() == "bearer" and bearer.strip() else api_key) or None
