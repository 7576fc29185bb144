"""Validates a batch's input file before any line runs."""

from __future__ import annotations

from array import array
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any, Literal, get_args

import attrs
import msgspec

from trouper.protocol.problems import RequestFailed, quoted
from trouper.web.http.body_faults import refusal

BatchEndpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"
]
ENDPOINTS: tuple[BatchEndpoint, ...] = get_args(BatchEndpoint)
MAX_LINES = 50_000
"""Requests of a batch, as in OpenAI's API."""

# Lines of a file, blank ones included: a file of blank lines would take minutes.
MAX_FILE_LINES = 20 * MAX_LINES
MAX_ERRORS = 100
"""Errors after which validation ends."""
MAX_ID_CHARS = 512


class Ways(msgspec.Struct):
    stream: Any = None
    background: Any = None


class LineBody(Ways):
    """Fields of a body that validation reads. Their types are the endpoint's to check."""

    model: Any = None
    extra_body: msgspec.Raw = msgspec.Raw(b"null")
    """Other servers' place for parameters; the body's own parameters win."""

    def asks_for(self, name: str) -> str | None:
        """Return where the body turns a parameter on, if anywhere."""
        if (own := getattr(self, name)) is not None:
            return f"body.{name}" if own is True else None
        try:
            extra = msgspec.json.decode(self.extra_body, type=Ways)
        except msgspec.ValidationError:  # Its endpoint reads past it, or refuses it.
            return None
        return f"body.extra_body.{name}" if getattr(extra, name) is True else None


class InputLine(msgspec.Struct):
    """Fields that validation reads."""

    custom_id: str
    method: str
    url: str
    body: LineBody


class RunLine(msgspec.Struct):
    """Fields that the runner reads."""

    custom_id: str
    body: msgspec.Raw


@attrs.frozen
class LineError:
    """A fault of a line (counted from 1), or of the file if `line` is None."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def body(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "param": self.param, "line": self.line}


class LinesInvalid(Exception):
    def __init__(self, errors: list[LineError]) -> None:
        super().__init__(f"{len(errors)} errors")
        self.errors = errors


@attrs.frozen(eq=False)
class InputLines:
    """Positions of the requests, numbered from 0 without blank lines."""

    path: Path
    offsets: array[int]
    sizes: array[int]
    models: dict[str, int]

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, number: int) -> RunLine:
        """Runs in a thread; raises `OSError`."""
        with self.path.open("rb") as file:
            file.seek(self.offsets[number])
            return msgspec.json.decode(file.read(self.sizes[number]), type=RunLine)


class _Validation:
    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._first_lines: dict[str, int] = {}
        self._decoder = msgspec.json.Decoder(InputLine)
        self.models: dict[str, int] = {}

    def error(self, line: int, data: bytes) -> LineError | None:
        try:
            parsed = self._parsed(data)
        except RequestFailed as failed:
            problem = failed.problem
            return LineError(
                problem.code or "", f"line {line}: {problem.message}", line, problem.param
            )
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            return LineError(
                "invalid_json_line", f"line {line} is not a JSON object: {error}", line
            )
        fault = (
            self._method(parsed, line)
            or self._id(parsed.custom_id, line)
            or self._body(parsed.body, line)
        )
        if fault is None and isinstance(parsed.body.model, str):
            self.models.setdefault(parsed.body.model, line)
        return fault

    def _parsed(self, data: bytes) -> InputLine:
        """Raises `RequestFailed` (400), and what msgspec raises for invalid JSON."""
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            raise refusal(error, msgspec.json.decode(data), InputLine) from None

    def _method(self, parsed: InputLine, line: int) -> LineError | None:
        if parsed.method != "POST":
            return LineError("invalid_method", f"line {line}: method must be POST", line, "method")
        if parsed.url != self._endpoint:
            message = (
                f"line {line}: url must be {self._endpoint}, the endpoint of the batch, not "
                f"{parsed.url[:80]!r}"
            )
            return LineError("mismatched_endpoint", message, line, "url")
        return None

    def _id(self, custom_id: str, line: int) -> LineError | None:
        if not 0 < len(custom_id) <= MAX_ID_CHARS:
            message = f"line {line}: custom_id must have 1 to {MAX_ID_CHARS} characters"
            return LineError("invalid_custom_id", message, line, "custom_id")
        first = self._first_lines.setdefault(custom_id, line)
        if first != line:
            message = (
                f"line {line}: custom_id {custom_id[:80]!r} is that of line {first}; each needs "
                "its own"
            )
            return LineError("duplicate_custom_id", message, line, "custom_id")
        return None

    @staticmethod
    def _body(body: LineBody, line: int) -> LineError | None:
        if isinstance(body.model, str) and len(body.model) > MAX_ID_CHARS:  # Each name is kept.
            message = (
                f"line {line}: body.model {quoted(body.model)} has more than {MAX_ID_CHARS} "
                "characters"
            )
            return LineError("invalid_model", message, line, "body.model")
        for name in ("stream", "background"):
            if (where := body.asks_for(name)) is not None:
                message = f"line {line}: {where} is not supported in a batch; leave it out"
                return LineError("unsupported_parameter", message, line, where)
        return None


def _too_many(requests: int, lines: int) -> LineError | None:
    if requests > MAX_LINES:
        return LineError("too_many_tasks", f"the file has more than {MAX_LINES} requests; split it")
    if lines > MAX_FILE_LINES:
        return LineError(
            "too_many_lines",
            f"the file has more than {MAX_FILE_LINES} lines; leave out those that are blank",
        )
    return None


def validated(path: Path, endpoint: str, max_line_bytes: int) -> InputLines:
    """Check all lines. Runs in a thread. Raises `LinesInvalid` and `OSError`."""
    # Faults found here fail the batch. Parameters that depend on the model are checked by the
    # endpoint as a line runs, and a refusal goes to the error file.
    check, errors = _Validation(endpoint), list[LineError]()
    offsets, sizes = array("Q"), array("L")
    with path.open("rb") as file:
        offset, number = 0, 0
        while data := file.readline(max_line_bytes + 1):
            number += 1
            if len(data) > max_line_bytes:
                message = f"line {number} is longer than {max_line_bytes} bytes (--max-body-bytes)"
                raise LinesInvalid([*errors, LineError("line_too_large", message, number)])
            text = data.removeprefix(BOM_UTF8) if number == 1 else data
            if text.strip():
                if (problem := check.error(number, text)) is not None:
                    errors.append(problem)
                offsets.append(offset + len(data) - len(text))
                sizes.append(len(text))
            offset += len(data)
            if (many := _too_many(len(offsets), number)) is not None:
                errors.append(many)
            if len(errors) >= MAX_ERRORS or many is not None:
                break
    if not offsets:
        errors.append(
            LineError("empty_file", "the file has no requests; write one JSON object a line")
        )
    if errors:
        raise LinesInvalid(errors)
    return InputLines(path, offsets, sizes, check.models)
