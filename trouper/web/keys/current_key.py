"""The key of the request at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import trio
from quart import has_request_context, request

from trouper.protocol.api_keys import Keys
from trouper.protocol.key_options import ANYBODY, ApiKey, Right
from trouper.protocol.settings import ServerSettings
from trouper.web.http.current_request import CurrentRequest
from trouper.web.keys.endpoint_rights import asks_model
from trouper.web.keys.key_limits import KeyAccount, KeyAccounts, RequestTokens, Reservation
from trouper.web.keys.local_peer import is_local


class CurrentKey(CurrentRequest):
    """Access to the key of the request at hand, and to the request. There is one object for the
    app."""

    def __init__(
        self, settings: ServerSettings, keys: Keys, clock: Callable[[], float] = trio.current_time
    ) -> None:
        """`clock`: seconds, for the limits of keys."""
        super().__init__(settings)
        self.keys = keys
        self.accounts = KeyAccounts(clock)

    @property
    def key(self) -> ApiKey | None:
        """The key of this request, or of the batch that it is a line of; None for a request to an
        open endpoint without one. The same throughout the request, which goes on with what it was
        let in with if the key is removed meanwhile."""
        if not has_request_context():
            return ANYBODY
        state = self._state
        if "key" not in state:
            state["key"] = self._found()
        return cast("ApiKey | None", state["key"])

    def _found(self) -> ApiKey | None:
        if self.batch_owner is not None:
            return self.keys.of_identity(self.batch_owner)
        return self.keys.find(self.headers.get("authorization"), self.headers.get("x-api-key"))

    @property
    def key_identity(self) -> str:
        """What stands for the key of this request, where the key itself must not be stored; empty
        without keys."""
        key = self.key
        return "" if key is None or key is ANYBODY else key.identity

    @property
    def tenant(self) -> str:
        """What stands for the client where clients take turns: its key, or without keys its
        address. Batches of a client are another one."""
        if has_request_context() and self.batch_owner is not None:
            return f"batches of {self.batch_owner}"
        return self.key_identity or (super().tenant if has_request_context() else "")

    @property
    def key_identities(self) -> frozenset[str]:
        """What may stand for the key of this request where something was stored long ago."""
        return self.keys.identities_of(self.key_identity)

    @property
    def managed_identities(self) -> frozenset[str] | None:
        """What may stand for the keys whose files and batches this request lists, deletes and
        cancels; None: all, with `admin`."""
        return None if self.has_right("admin") else self.key_identities

    def owner_labels(self, owners: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return for each owner what a key with `admin` is told of it, as a field of ours."""
        is_admin = self.has_right("admin")
        labels = {owner: self.keys.label_of(owner) if is_admin else "" for owner in set(owners)}
        return {owner: {"owner": label} if label else {} for owner, label in labels.items()}

    @property
    def key_label(self) -> str:
        """What logs call the key of this request; empty without keys."""
        key = self.key
        return "" if key is None or key is ANYBODY else key.label

    def has_right(self, right: Right) -> bool:
        key = self.key
        if key is None or right not in key.rights:
            return False
        return right != "admin" or key is not ANYBODY or self._may_administer_without_key()

    def _may_administer_without_key(self) -> bool:
        scope = request.scope
        return self.settings.allow_admin_without_key or is_local(
            scope.get("client"), self.headers, scope["http_version"]
        )

    def count(self) -> None:
        """Count this request once against its key's limit, if it asks a model. Raises
        `RequestFailed` (429)."""
        rule = request.url_rule
        if rule is not None and asks_model(rule.rule):
            self._counted()

    def _counted(self) -> KeyAccount:
        state = self._state
        if "account" not in state:
            state["account"] = account = self.accounts.of(self.key or ANYBODY)
            account.begin()
        return cast("KeyAccount", state["account"])

    def account(self, model: str) -> KeyAccount:
        """Return the account of this request's key, after counting the request once as one of the
        model. Raises `RequestFailed` (429)."""
        account, state = self._counted(), self._state
        if "asked" not in state:
            state["asked"] = model
            account.ask(model)
        return account

    def begin(self, model: str, prompts: int) -> None:
        """Count the request once; so many prompts and choices of it reserve next. Raises
        `RequestFailed` (429)."""
        account, state = self.account(model), self._state
        if "tokens" not in state:
            state["tokens"] = account.request_tokens()
        state["tokens"].left = prompts

    def reserve(self, model: str) -> Reservation:
        """Return the reservation of one of them."""
        return self.account(model).reserve(model, cast("RequestTokens", self._state["tokens"]))

    def limit_headers(self) -> list[tuple[str, str]]:
        """Return the headers that tell a client its limits, of a request that asked a model."""
        account = cast("KeyAccount | None", self._state.get("account"))
        return [] if account is None else [*account.headers()]
