"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter in vLLM's format."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar

from msgspec import Meta
from quart import Response

from trouper.actors.runtime.served_models import ModelEntry
from trouper.actors.runtime.worker_threads import run_on_thread
from trouper.protocol.paths import within
from trouper.protocol.problems import AdapterFilesMissing, ModelUnusable, Problem, RequestFailed
from trouper.web.http.endpoints import Endpoint
from trouper.web.http.field_types import Flag, Model
from trouper.web.http.request_body import Body
from trouper.web.http.request_schema import TEXT, Json
from trouper.web.serving.service import Service

Name = Annotated[str, Meta(min_length=1, max_length=256)]
NewName = Annotated[Name, Meta(extra_json_schema={"pattern": r"^[^:=]*[^:=\s][^:=]*$"})]
"""As `_require_name` has it."""
AdapterPath = Annotated[str, Meta(min_length=1, max_length=4096)]
"""Linux's PATH_MAX."""
ENDPOINT = partial(
    Endpoint,
    tag="Models",
    method="POST",
    answer=TEXT,
    content_type="text/plain",
    also=(404, 503, 507),
)
EXAMPLE: Json = {"lora_name": "sql", "lora_path": "/adapters/sql"}


class LoadAdapterRequest(Body, kw_only=True, frozen=True):
    essential: ClassVar[frozenset[str]] = frozenset({"load_inplace"})
    lora_name: NewName
    lora_path: AdapterPath
    load_inplace: Flag = False
    model: Model | None = None


class UnloadAdapterRequest(Body, kw_only=True, frozen=True):
    lora_name: Name
    model: Model | None = None


class AdapterOperations:
    def __init__(self, service: Service) -> None:
        self._service = service
        started_with = [
            directory
            for entry in service.models.entries()
            for directory in entry.adapter_directories
        ]
        self._directories = (*service.settings.adapters_from, *started_with)

    @ENDPOINT(
        path="/v1/load_lora_adapter",
        operation="loadLoraAdapter",
        summary="Load a LoRA adapter",
        description="From the directories that --adapter and --adapters-from name. "
        "Requests that run are not disturbed. `load_inplace` exchanges an adapter of this "
        "name for these files, when the "
        "requests that have it have ended. One that does not fit into memory is refused "
        "(507) before anything is loaded.",
        request=LoadAdapterRequest,
        examples={"One of the default model": EXAMPLE},
    )
    async def load(self) -> Response:
        body = await self._service.read(LoadAdapterRequest.parse)
        entry = self._entry(body.model)
        self._require_name(body.lora_name)
        directory = await self._directory(body.lora_path)
        if body.load_inplace and body.lora_name in entry.adapters:
            await self._unload(entry, body.lora_name)
        try:
            await self._load(entry, body.lora_name, directory)
        except ModelUnusable as unusable:
            missing = isinstance(unusable, AdapterFilesMissing)
            message = f"Loading lora {body.lora_name} failed: {unusable}"
            status, kind = (404, "NotFoundError") if missing else (400, "BadRequestError")
            raise RequestFailed(
                Problem(status, message, kind, "lora_path", "adapter_unusable")
            ) from unusable
        return _text(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @ENDPOINT(
        path="/v1/unload_lora_adapter",
        operation="unloadLoraAdapter",
        summary="Unload a LoRA adapter when its requests have ended",
        description="Further requests with it are refused at once.",
        request=UnloadAdapterRequest,
        examples={"One of the default model": {"lora_name": "sql"}},
    )
    async def unload(self) -> Response:
        body = await self._service.read(UnloadAdapterRequest.parse)
        await self._unload(self._entry(body.model), body.lora_name)
        return _text(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _entry(self, model: str | None) -> ModelEntry:
        """Raises `RequestFailed` (404), also for a model outside of the key's list."""
        return self._service.listed(None if model is None else self._service.resolved(model))

    async def _directory(self, path: str) -> str:
        """Raises `RequestFailed` (403) for any path outside of the directories, even one that does
        not exist."""
        directory = await run_on_thread(
            partial(within, path, self._directories), abandon_on_cancel=False
        )
        if directory is None:
            message = (
                "lora_path is in no directory from which adapters may be loaded: those that "
                "--adapter names, and those of --adapters-from DIR; start the server with "
                "--adapters-from and the directory of this adapter"
            )
            raise RequestFailed(
                Problem(403, message, "permission_error", "lora_path", "adapter_path_not_allowed")
            )
        return directory

    async def _load(self, entry: ModelEntry, name: str, directory: str) -> None:
        if (control := self._service.models.control) is not None:
            await control.load_adapter(entry.names[0], name, directory)
        elif entry.runtime is not None:
            await entry.runtime.load_adapter(name, directory)

    async def _unload(self, entry: ModelEntry, name: str) -> None:
        if (control := self._service.models.control) is not None:
            await control.unload_adapter(entry.names[0], name)
        elif entry.runtime is not None:
            await entry.runtime.unload_adapter(name)

    def _require_name(self, name: str) -> None:
        """Raises `RequestFailed` (400)."""
        if not name.strip() or ":" in name or "=" in name:
            what = (
                f"lora_name {name!r} cannot be requested; give a name without a colon and an "
                "equals sign"
            )
        elif any(name in entry.names for entry in self._service.models.entries()):
            what = f"lora_name {name!r} is the name of a model; give another"
        else:
            return
        raise RequestFailed(Problem(400, what, "InvalidUserInput", "lora_name", "invalid_value"))


def _text(message: str) -> Response:
    return Response(message, content_type="text/plain; charset=utf-8")
