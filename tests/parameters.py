"""`python -m tests.parameters` writes the tables of docs/parameters.md from the request classes.
Remarks are kept."""

from __future__ import annotations

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
ROW = re.compile(r"^- `(\w+)`(?::| \*\*.*?:?\*\*)? ?(.*)$", re.MULTILINE)
SECTION = "\n### POST "
PAST = {"changes nothing": "Change nothing", "read past": "Are read past"}


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
        properties, refused = schema_of(self.request)["properties"], self.request.unsupported
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

    def checked(self) -> dict[str, str]:
        """Return the verdicts, which must have each of the API's parameters."""
        unknown = sorted(set(self.own) - self.verdicts.keys())
        assert not unknown, f"{self.path}: nothing is known of {unknown}"
        return self.verdicts


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


GENERATING = (
    Table("/v1/chat/completions", chat_completions.ChatRequest, Chat.create),
    Table("/v1/completions", completions.CompletionRequest, Completions.create),
    Table("/infill", infill.InfillRequest, None),
    Table("/v1/responses", responses.ResponseRequest, Responses.create),
    Table("/v1/messages", messages.MessagesRequest, None),
)
COMPARING = (
    Table("/v1/embeddings", embeddings.EmbeddingRequest, Embeddings.create),
    Table("/v1/rerank", rerank.RerankRequest, None),
    Table("/v1/score", rerank.ScoreRequest, None),
)
MANAGING = (
    Table("/v1/batches", BatchRequest, Batches.create),
    Table("/v1/models/load", model_operations.LoadRequest, None),
    Table("/v1/models/wake", model_operations.WakeRequest, None),
    Table("/v1/models/unload", model_operations.UnloadRequest, None),
    Table("/v1/models/sleep", model_operations.SleepRequest, None),
    Table("/v1/models/pin", model_operations.PinRequest, None),
    Table("/v1/load_lora_adapter", adapter_operations.LoadAdapterRequest, None),
    Table("/v1/unload_lora_adapter", adapter_operations.UnloadAdapterRequest, None),
)
GROUPS = {
    "Endpoints that generate": GENERATING,
    "Vectors and scores": COMPARING,
    "Batches, models and adapters": MANAGING,
}
TABLES = (*GENERATING, *COMPARING, *MANAGING)
Row = tuple[str, str, str]
"""A parameter, what happens to it, and the remark."""


def remarks_of(page: str) -> dict[str, dict[str, str]]:
    """What was written by hand, by path and parameter."""
    remarks: dict[str, dict[str, str]] = {table.path: {} for table in TABLES}
    for section in page.split(SECTION)[1:]:
        heading, _, text = section.partition("\n")
        for path in heading.split(", "):
            remarks[path] |= dict(ROW.findall(text))
    return remarks


def intro_of(page: str) -> str:
    return page.split("\n## Endpoints that generate\n", maxsplit=1)[0].rstrip("\n")


def rendered(page: str) -> str:
    remarks = remarks_of(page)
    groups = (
        f"## {title}\n{''.join(_sections(group, remarks))}" for title, group in GROUPS.items()
    )
    return "\n\n".join([intro_of(page), *(group.rstrip("\n") for group in groups)]) + "\n"


def _sections(group: Sequence[Table], remarks: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield a section for each set of endpoints that share parameters, the largest set first."""
    where: dict[Row, list[str]] = defaultdict(list)
    for table in group:
        for name, verdict in table.checked().items():
            where[name, verdict, remarks[table.path].get(name, "")].append(table.path)
    sets: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in sorted(where):
        sets[tuple(where[row])].append(row)
    order = [table.path for table in group]
    for paths in sorted(sets, key=lambda paths: (-len(paths), [*map(order.index, paths)])):
        yield f"{SECTION}{', '.join(paths)}\n\n{_section(sets[paths])}\n"


def _section(rows: Sequence[Row]) -> str:
    """An entry for what needs words, a line for each way of not being read, and other names."""
    aliases = [row for row in rows if row[1].startswith("is ")]
    listed = [row for row in rows if row[1] in PAST and not row[2]]
    entries = [_entry(*row) for row in rows if row not in [*aliases, *listed]]
    lines = [
        f"{words}: {', '.join(names)}."
        for verdict, words in PAST.items()
        if (names := [f"`{row[0]}`" for row in listed if row[1] == verdict])
    ]
    other_names: dict[str, list[str]] = defaultdict(list)
    for name, verdict, _ in aliases:
        other_names[verdict.removeprefix("is ")].append(f"`{name}`")
    others = "; ".join(f"of {meant}: {', '.join(same)}" for meant, same in other_names.items())
    lines += [f"Other names {others}."] if others else []
    return "\n\n".join([*(["\n".join(entries)] if entries else []), *lines])


def _entry(name: str, verdict: str, remark: str) -> str:
    rule = verdict.removeprefix("works").removeprefix(", ")
    if not rule:
        return f"- `{name}`: {remark or 'works'}"
    return f"- `{name}` **{rule}:** {remark}" if remark else f"- `{name}` **{rule}**"


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
