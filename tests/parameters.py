"""`python -m tests.parameters` writes the tables of docs/parameters.md from the request classes.
Remarks are kept."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
from openai.resources.batches import Batches
from openai.resources.chat.completions import Completions as Chat
from openai.resources.completions import Completions
from openai.resources.embeddings import Embeddings
from openai.resources.responses import Responses

from trouper.web.anthropic import messages
from trouper.web.batches.batch_routes import BatchRequest
from trouper.web.http.request_body import Body
from trouper.web.http.request_schema import among, components_of, schema_of
from trouper.web.openai import (
    adapter_operations,
    chat_completions,
    completions,
    embeddings,
    infill,
    model_operations,
    rerank,
)
from trouper.web.responses import response_request as responses

PAGE = Path(__file__).parent.parent / "docs" / "parameters.md"
NOT_OF_THE_API = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
ROW = re.compile(r"\| `(\w+)` \| (.*?) \| ?(.*?) ?\|")
HEAD = "| parameter | what happens | |\n|---|---|---|\n"


@attrs.frozen
class Table:
    """One endpoint's. `create` is the official client's method, which knows the API's own
    parameters."""

    path: str
    request: type[Body]
    create: Callable[..., Any] | None

    @property
    def own(self) -> list[str]:
        """The API's parameters; the others are ours, or those of clients made for other servers."""
        if self.create is None:
            return list(self.verdicts)
        return [
            name for name in inspect.signature(self.create).parameters if name not in NOT_OF_THE_API
        ]

    @property
    def verdicts(self) -> dict[str, str]:
        properties, refused = schema_of(self.request)["properties"], self.request.refused
        within = components_of([self.request])
        aliases = {
            alias: f"is `{name}`"
            for alias, name in self.request.aliases.items()
            if alias not in properties
        }
        return aliases | {
            name: _refusal(refused[name], self.request.may_skip(name))
            if name in refused
            else _verdict(properties[name], within)
            for name in properties
        }

    def render(self, remarks: Mapping[str, str]) -> str:
        verdicts, own = self.verdicts, set(self.own)
        unknown = sorted(own - verdicts.keys())
        assert not unknown, f"{self.path}: nothing is known of {unknown}"

        def rows(names: list[str]) -> str:
            return HEAD + "".join(
                f"| `{name}` | {verdicts[name]} | {remarks.get(name, '')} |\n" for name in names
            )

        others = sorted(verdicts.keys() - own)
        tail = f"\nBesides:\n\n{rows(others)}" if others else ""
        return f"## POST {self.path}\n\n{rows(sorted(own))}{tail}"


def _verdict(schema: dict[str, Any], within: dict[str, Any]) -> str:
    told = next(
        (option for option in schema.get("anyOf", ()) if option.get("type") != "null"), schema
    )
    told = within.get(told.get("$ref", "").rpartition("/")[2], told)
    if told.get("description", "").startswith("Changes nothing"):
        return "changes nothing"
    low, above, high = (told.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    if high is None or high >= 2**31:
        return "works" if low is None else f"works, from {low}"
    return f"works, {low} to {high}" if above is None else f"works, above {above}, to {high}"


def _refusal(neutral: tuple[Any, ...], skipped: bool) -> str:
    if among(True, neutral) and among(False, neutral):
        return "changes nothing"
    values = " or ".join(
        f"`{json.dumps(value)}`"
        for value in neutral
        if not (type(value) is float and value in (1, 0))
    )
    verdict = "read past" if skipped else "refused"
    return f"{verdict}, unless {values}" if values else verdict


TABLES = (
    Table("/v1/chat/completions", chat_completions.ChatRequest, Chat.create),
    Table("/v1/completions", completions.CompletionRequest, Completions.create),
    Table("/infill", infill.InfillRequest, None),
    Table("/v1/responses", responses.ResponseRequest, Responses.create),
    Table("/v1/embeddings", embeddings.EmbeddingRequest, Embeddings.create),
    Table("/v1/rerank", rerank.RerankRequest, None),
    Table("/v1/score", rerank.ScoreRequest, None),
    Table("/v1/batches", BatchRequest, Batches.create),
    Table("/v1/models/load", model_operations.LoadRequest, None),
    Table("/v1/models/wake", model_operations.WakeRequest, None),
    Table("/v1/models/unload", model_operations.UnloadRequest, None),
    Table("/v1/models/sleep", model_operations.SleepRequest, None),
    Table("/v1/models/pin", model_operations.PinRequest, None),
    Table("/v1/load_lora_adapter", adapter_operations.LoadAdapterRequest, None),
    Table("/v1/unload_lora_adapter", adapter_operations.UnloadAdapterRequest, None),
    Table("/v1/messages", messages.MessagesRequest, None),
)


def remarks_of(page: str) -> dict[str, dict[str, str]]:
    """What was written by hand, by path and parameter."""
    sections = page.split("\n## POST ")[1:]
    return {
        section.split("\n", 1)[0]: {name: remark for name, _, remark in ROW.findall(section)}
        for section in sections
    }


def intro_of(page: str) -> str:
    return page.split("\n## POST ", maxsplit=1)[0].rstrip("\n")


def rendered(page: str) -> str:
    remarks = remarks_of(page)
    return "\n\n".join([intro_of(page), *_tables(remarks)])


def _tables(remarks: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for place, table in enumerate(TABLES):
        text = table.render(remarks.get(table.path, {}))
        yield text if place == len(TABLES) - 1 else text.rstrip("\n")


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
