"""Errors of one request, in the four keys that OpenAI clients know, and errors that end a model or
the server."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence

import attrs

LONGEST_QUOTED = 200
"""Characters of a client's word that an error repeats."""
LONGEST_BEGINNING, LONGEST_END = 700, 300
"""Characters of a message that stay where it is longer than both: its end has the remedy."""
WORD = re.compile(r"\S++")


def quoted(name: str) -> str:
    """Quote a name that a client has sent, or its beginning: one of megabytes would be sent back,
    and kept where errors are."""
    return repr(shortened(name))


def shortened(text: str) -> str:
    """Return a text that a client has sent, or its beginning."""
    return text if len(text) <= LONGEST_QUOTED else f"{text[:LONGEST_QUOTED]}..."


def _bounded(message: str) -> str:
    """Shorten a message, whatever it repeats of a request, and each of its words."""
    if len(message) > LONGEST_BEGINNING + LONGEST_END:
        message = f"{message[:LONGEST_BEGINNING]}...{message[-LONGEST_END:]}"
    return WORD.sub(lambda word: shortened(word[0]), message)


@attrs.frozen
class Problem:
    """Reason why a request failed. `status` is the HTTP status if no response has begun."""

    status: int
    message: str = attrs.field(converter=_bounded)
    type: str = "invalid_request_error"
    param: str | None = attrs.field(default=None, converter=attrs.converters.optional(shortened))
    code: str | None = None
    retry_after_s: int | None = None


INTERNAL = Problem(
    500,
    "an internal error; the log has it under the request id",
    "server_error",
    None,
    "internal_error",
)
"""What a client is told of an error that nothing here foresaw."""
SYSTEM_SHORTAGE = Problem(
    503,
    "the server is short of file descriptors, processes or memory, which this request needs; try "
    "again later, or raise its limits (ulimit -n, ulimit -u), or lower --max-connections",
    "server_error",
    code="system_shortage",
    retry_after_s=5,
)
DRAINING = Problem(
    503, "the server is shutting down", "server_error", code="draining", retry_after_s=1
)
MODEL_UNLOADING = Problem(
    503,
    "the model is being unloaded",
    "server_error",
    "model",
    code="model_unloading",
    retry_after_s=1,
)


def rank_lost(reason: str) -> Problem:
    """Problem for requests whose group of ranks ended. The process ends with it, and its supervisor
    starts it again."""
    return Problem(
        503, f"the server starts again: {reason}", "server_error", code="rank_lost", retry_after_s=5
    )


class RequestFailed(Exception):
    """A request was refused, timed out or lost its engine. Carries the `Problem`; costs nobody else
    anything."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


LONGEST_LINE = 1000


def printable(text: str, longest: int = LONGEST_LINE) -> str:
    """Return text of a file of others as one line of bounded length: line ends and a terminal's
    control characters are escaped."""
    if len(text) <= longest and text.isprintable():
        return text
    escaped = (
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: longest + 1]
    )
    line = "".join(escaped)
    return line if len(line) <= longest else line[:longest] + " ..."


class ModelUnusable(Exception):
    """A model that cannot be loaded. The message is one line for a person: what, where, and the
    remedy, which may be passed as a separate argument."""

    def __init__(self, message: str, remedy: str = "") -> None:
        message = printable(message)
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.message, self.remedy = message, remedy


class AdapterFilesMissing(ModelUnusable):
    """A directory that has no files of an adapter."""


class ActorFailed(Exception):
    """An actor that the server needs crashed too often, after all requests were answered. The
    message is one line for a person."""


class OutOfDeviceMemory(Exception):
    """A step needed memory that the device does not have. Other processes may use it, so no request
    is to blame."""


class SystemShortage(Exception):
    """A step failed while the process had no file descriptor, process or memory to spare. No
    request is to blame."""


class SettingsInvalid(ValueError):
    """A setting with an invalid value. The message names the flag and the remedy; `flag` is the
    flag alone, if there is one."""

    def __init__(self, message: str, flag: str | None = None) -> None:
        super().__init__(message)
        self.flag = flag


SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS})


def is_shortage(error: BaseException) -> bool:
    """Whether the system refused a descriptor, a process or memory: nobody's fault, and it
    passes."""
    return isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno in SHORTAGES
    )


def bad_request(message: str, param: str | None = None, code: str | None = None) -> RequestFailed:
    return RequestFailed(Problem(400, message, "invalid_request_error", param, code))


NOT_PREPARED = Problem(
    422, "the request could not be prepared", "invalid_request_error", None, "intake_failed"
)
"""What prepares a request crashed by it. Clients do not repeat a request after a 422."""


def queue_full(size: int) -> Problem:
    return Problem(
        429,
        f"{size} requests are waiting already (--max-queue-size); try again soon",
        "rate_limit_error",
        code="queue_full",
        retry_after_s=1,
    )


def grammars_full(places: int, share: int) -> Problem:
    """Problem of a client that has too many grammars waiting. `share`: part of the queue that they
    may have."""
    return Problem(
        429,
        f"{places} grammars of this client wait to be compiled already (1/{share} of "
        "--max-queue-size); "
        "send fewer new ones at a time, or simpler ones",
        "rate_limit_error",
        code="grammar_queue_full",
        retry_after_s=1,
    )


def adapter_not_found(adapter: str, model: str, known: Sequence[str]) -> RequestFailed:
    """The 404 for an adapter that the model does not have."""
    names = ", ".join(map(repr, known)) or "none"
    message = f"{model!r} has no adapter {quoted(adapter)}; it has {names} (--adapter NAME=DIR)"
    return RequestFailed(
        Problem(404, message, "invalid_request_error", "model", "adapter_not_found")
    )


def adapter_loaded(name: str) -> RequestFailed:
    """vLLM's refusal to load an adapter whose name one has."""
    message = f"The lora adapter '{name}' has already been loaded."
    return RequestFailed(Problem(400, message, "InvalidUserInput", "lora_name", "adapter_loaded"))


def adapter_unknown(name: str) -> RequestFailed:
    """vLLM's refusal to unload an adapter that is not there."""
    return RequestFailed(
        Problem(
            404,
            f"The lora adapter '{name}' cannot be found.",
            "NotFoundError",
            "lora_name",
            "adapter_not_found",
        )
    )
