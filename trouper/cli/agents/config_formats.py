"""The formats of clients' files: JSON with comments, TOML, YAML."""

from __future__ import annotations

import io
import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tomlkit
from ruamel import yaml
from ruamel.yaml.error import YAMLError

from trouper.cli.agents import jsonc
from trouper.cli.agents.merging import MISSING, ConfigInvalid, Edit, put

WIDE = 2**20


class Format(Protocol):
    name: str

    def parse(self, text: str) -> Any:
        """Raises `ConfigInvalid`."""

    def changed(self, text: str, edits: Sequence[Edit]) -> str:
        """Return the text with the edits, at least one."""

    def dump(self, values: Mapping[str, Any]) -> str:
        """Write values as a new file."""


class Json:
    """JSON with comments and trailing commas."""

    name = "JSON"

    def parse(self, text: str) -> Any:
        try:
            return jsonc.loads(text) if text.strip() else {}
        except jsonc.NotJson as error:
            raise ConfigInvalid(f"it is not {self.name}: {error}") from error

    def changed(self, text: str, edits: Sequence[Edit]) -> str:
        text = text if text.strip() else "{}\n"
        for edit in edits:
            removed = edit.new is MISSING
            text = (
                jsonc.without(text, edit.path)
                if removed
                else jsonc.with_value(text, edit.path, edit.new)
            )
        return text

    def dump(self, values: Mapping[str, Any]) -> str:
        return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


class Toml:
    name = "TOML"

    def parse(self, text: str) -> Any:
        try:
            return tomllib.loads(text)
        except ValueError as error:  # Also Python's own, for a number of thousands of digits.
            raise ConfigInvalid(f"it is not {self.name}: {error}") from error

    def changed(self, text: str, edits: Sequence[Edit]) -> str:
        document = tomlkit.parse(text)
        for edit in edits:
            put(document, edit)
        return tomlkit.dumps(document)

    def dump(self, values: Mapping[str, Any]) -> str:
        return tomlkit.dumps(values)


class Yaml:
    name = "YAML"

    def parse(self, text: str) -> Any:
        try:
            data = yaml.YAML(typ="safe", pure=True).load(text)
        except (YAMLError, ValueError, LookupError) as error:  # As of a date that is none.
            message = " ".join(str(error).split())
            raise ConfigInvalid(f"it is not {self.name}: {message[:300]}") from error
        return {} if data is None else data

    def changed(self, text: str, edits: Sequence[Edit]) -> str:
        writer = _round_trip(text)
        document = writer.load(text)
        if document is None:  # Nothing but comments, which would be lost with an empty document.
            return text + self.dump({edit.path[0]: edit.new for edit in edits})
        for edit in edits:
            put(document, edit)
        return _written(writer, document)

    def dump(self, values: Mapping[str, Any]) -> str:
        return _written(_round_trip(""), values)


def _round_trip(text: str) -> Any:
    """Return an editor that keeps comments and the indentation of lists."""
    writer = yaml.YAML()
    writer.preserve_quotes = True
    writer.width = WIDE
    if not text or _has_deeper_lists(text):
        writer.indent(mapping=2, sequence=4, offset=2)
    return writer


def _has_deeper_lists(text: str) -> bool:
    """Whether a list is indented further than its key."""
    opened = False
    """The lines in front are a key without a value, and comments."""
    for line in text.split("\n"):
        content = line.strip(" \t")
        if opened and line[:1] in (" ", "\t") and line.lstrip(" \t").startswith("- "):
            return True
        if not (opened and content.startswith("#")):
            opened = len(content) > 1 and content.endswith(":") and content[0] not in "#-"
    return False


def _written(writer: Any, document: Any) -> str:
    stream = io.StringIO()
    writer.dump(document, stream)
    return stream.getvalue()


JSON, TOML, YAML = Json(), Toml(), Yaml()
FORMATS: Mapping[str, Format] = {known.name: known for known in (JSON, TOML, YAML)}
