"""Lines of the output and error files of a batch, and what the worker reads from a response."""

from __future__ import annotations

import msgspec

from trouper.web.batches.line_runner import LineResponse


class _ErrorCode(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorCode | None = None


def output_line(request_id: str, custom_id: str, response: LineResponse) -> msgspec.Raw:
    """The line of a request that has a response, whatever its status."""
    answer = {
        "status_code": response.status,
        "request_id": request_id,
        "body": msgspec.Raw(response.body),
    }
    return _line(request_id, custom_id, answer, None)


def error_line(request_id: str, custom_id: str, code: str, message: str) -> msgspec.Raw:
    """The line of a request that has no response."""
    return _line(request_id, custom_id, None, {"code": code, "message": message})


def _line(request_id: str, custom_id: str, response: object, error: object) -> msgspec.Raw:
    line = {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.Raw(msgspec.json.encode(line))


def code_of(response: LineResponse) -> str | None:
    """The code of the error that a response is; None: it has none."""
    try:
        error = msgspec.json.decode(response.body, type=_ErrorBody).error
    except msgspec.MsgspecError:
        return None
    return error.code if error is not None else None
