"""Errors of one request, with OpenAI's four keys, and errors that end a model or the server."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from math import ceil

import attrs

# Maximum characters of a client's word in an error.
LONGEST_QUOTED = 200
# Characters kept of a longer message; the remedy is at the end.
LONGEST_BEGINNING, LONGEST_END = 700, 300
WORD = re.compile(r"\S++")
MAX_RETRY_S = 60
"""Clients do not wait longer: older versions of `openai` then choose a time themselves."""
RESTART_S = 5
"""Until a supervisor starts the server again."""


def retry_after_s(seconds: float) -> int:
    """Return whole seconds for Retry-After, from 1 to MAX_RETRY_S."""
    return min(max(ceil(seconds), 1), MAX_RETRY_S)


def quoted(name: str) -> str:
    """Quote the beginning of a client's word, which may have megabytes."""
    return repr(shortened(name))


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST_QUOTED else f"{text[:LONGEST_QUOTED]}..."


def _bounded(message: str) -> str:
    # Shorten a message and each of its words.
    if len(message) > LONGEST_BEGINNING + LONGEST_END:
        message = f"{message[:LONGEST_BEGINNING]}...{message[-LONGEST_END:]}"
    return WORD.sub(lambda word: shortened(word[0]), message)


@attrs.frozen
class ContextExcess:
    """Tokens of a prompt and of an answer that exceed a limit."""

    prompt_tokens: int
    max_tokens: int
    limit: int


@attrs.frozen
class Problem:
    """Reason why a request failed. `status`: HTTP status if no response has begun. `context`: what
    Anthropic's wording of a full context needs."""

    status: int
    message: str = attrs.field(converter=_bounded)
    type: str = "invalid_request_error"
    param: str | None = attrs.field(default=None, converter=attrs.converters.optional(shortened))
    code: str | None = None
    retry_after_s: int | None = None
    context: ContextExcess | None = None


# Answer to an unforeseen error.
INTERNAL = Problem(
    500,
    "an internal error; the log has it under the request id",
    "server_error",
    None,
    "internal_error",
)
SYSTEM_SHORTAGE = Problem(
    503,
    "the server is short of file descriptors, processes or memory, which this request needs; try "
    "again later, or raise its limits (ulimit -n, ulimit -u), or lower --max-connections",
    "server_error",
    code="system_shortage",
    retry_after_s=5,
)
DRAINING = Problem(
    503, "the server is shutting down", "server_error", code="draining", retry_after_s=RESTART_S
)


def draining(until: float, now: float) -> Problem:
    """`DRAINING`, with the seconds that are left of the drain. An earlier start is a supervisor's
    or a balancer's."""
    return attrs.evolve(DRAINING, retry_after_s=retry_after_s(max(until - now, RESTART_S)))


MODEL_UNLOADING = Problem(
    503,
    "the model is being unloaded",
    "server_error",
    "model",
    code="model_unloading",
    retry_after_s=1,
)


def rank_lost(reason: str) -> Problem:
    """The group of ranks ended, and with it the process."""
    return Problem(
        503,
        f"the server starts again: {reason}",
        "server_error",
        code="rank_lost",
        retry_after_s=RESTART_S,
    )


class RequestFailed(Exception):
    """A request was refused, timed out or lost its engine. Other requests are unaffected."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


LONGEST_LINE = 1000


def printable(text: str, longest: int = LONGEST_LINE) -> str:
    """One line of bounded length, with control characters escaped, from a foreign file's text."""
    if len(text) <= longest and text.isprintable():
        return text
    escaped = (
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: longest + 1]
    )
    line = "".join(escaped)
    return line if len(line) <= longest else line[:longest] + " ..."


class ModelUnusable(Exception):
    """A model that cannot be loaded. The message is one line: what, where, and the remedy (or
    `remedy`)."""

    def __init__(self, message: str, remedy: str = "") -> None:
        message = printable(message)
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.message, self.remedy = message, remedy


class AdapterFilesMissing(ModelUnusable):
    pass


class ActorFailed(Exception):
    """A needed actor crashed too often, after all requests were answered. The message is one
    line."""


class OutOfDeviceMemory(Exception):
    """Other processes may use the memory, hence no request is to blame."""


class SystemShortage(Exception):
    """The process lacked descriptors, processes or memory. No request is to blame."""


class SettingsInvalid(ValueError):
    """An invalid setting. The message names flag and remedy; `flag` is the flag alone."""

    def __init__(self, message: str, flag: str | None = None) -> None:
        super().__init__(message)
        self.flag = flag


SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS})


NO_THREAD = "can't start new thread"
"""Text of Python's `RuntimeError` where the system starts no further thread."""


def is_shortage(error: BaseException) -> bool:
    match error:
        case MemoryError():
            return True
        case OSError(errno=number):
            return number in SHORTAGES
        case _:
            return isinstance(error, RuntimeError) and str(error) == NO_THREAD


def bad_request(message: str, param: str | None = None, code: str | None = None) -> RequestFailed:
    return RequestFailed(Problem(400, message, "invalid_request_error", param, code))


def context_full(
    excess: ContextExcess, param: str, *, flags: str = "", note: str = ""
) -> RequestFailed:
    """Return the only refusal of a prompt or length beyond the context. `flags` set the limit;
    `note` says how tokens were counted."""
    # Clients that shorten conversations search for these phrases, which
    # tests/web/test_client_errors.py lists.
    prompt, answer = excess.prompt_tokens, excess.max_tokens
    name = "messages" if param == "messages" else "prompt"
    fault = "max_tokens is too large" if param == "max_tokens" else "the prompt is too long"
    remedy = f"Please reduce the length of the {name} or completion"
    if excess.limit < 2:
        remedy = "No request fits: raise the limit"
    message = (
        f"This model's maximum context length is {excess.limit} tokens{flags and f' ({flags})'}. "
        f"However, you requested {prompt + answer} tokens ({prompt} in the {name}, {answer} in "
        f"the completion{note and f'; {note}'}), which exceeds the context window: {fault}. "
        f"{remedy}."
    )
    return RequestFailed(
        Problem(400, message, param=param, code="context_length_exceeded", context=excess)
    )


# The preparation crashed by this request. Clients do not repeat a request after a 422.
NOT_PREPARED = Problem(
    422, "the request could not be prepared", "invalid_request_error", None, "intake_failed"
)


def queue_full(size: int, retry_s: float = 1) -> Problem:
    seconds = retry_after_s(retry_s)
    return Problem(
        429,
        f"too many requests: {size} are waiting already (--max-queue-size); try again in "
        f"{seconds} s",
        "rate_limit_error",
        code="queue_full",
        retry_after_s=seconds,
    )


def grammars_full(places: int, share: int) -> Problem:
    """A client has too many waiting grammars. `share`: the divisor of the queue's length."""
    return Problem(
        429,
        f"too many requests: {places} grammars of this client wait to be compiled already "
        f"(1/{share} of --max-queue-size); send fewer new ones at a time, or simpler ones",
        "rate_limit_error",
        code="grammar_queue_full",
        retry_after_s=1,
    )


def adapter_not_found(adapter: str, model: str, known: Sequence[str]) -> RequestFailed:
    names = ", ".join(map(repr, known)) or "none"
    message = f"{model!r} has no adapter {quoted(adapter)}; it has {names} (--adapter NAME=DIR)"
    return RequestFailed(
        Problem(404, message, "invalid_request_error", "model", "adapter_not_found")
    )


def adapter_loaded(name: str) -> RequestFailed:
    """As vLLM refuses to load an adapter of a known name."""
    message = f"The lora adapter '{name}' has already been loaded."
    return RequestFailed(Problem(400, message, "InvalidUserInput", "lora_name", "adapter_loaded"))


def adapter_unknown(name: str) -> RequestFailed:
    """As vLLM refuses to unload an unknown adapter."""
    return RequestFailed(
        Problem(
            404,
            f"The lora adapter '{name}' cannot be found.",
            "NotFoundError",
            "lora_name",
            "adapter_not_found",
        )
    )


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions inside nested groups, in order; a plain exception yields itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error
