"""Script that compiles grammars before the server does: one may overflow llguidance's stack, which
ends the process, or compile for minutes. Imports nothing of the package."""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

LENGTH = struct.Struct("<I")

# A quarter of a server thread's stack: a grammar that fits here fits there.
STACK_BYTES = 2 * 2**20
MEMORY_BYTES = 4 * 2**30
LONGEST = 16  # Maximum length in bytes of tried tokens.
NICER = 5  # Increment of the nice value.
OPENINGS = (b"{", b'"', b"[")  # First tokens to try: an object's properties expand after the brace.


class TrialVocabulary:
    """llguidance's interface of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[str], specials: list[int], eos: int) -> None:
        self.tokens = [token.encode("latin-1") for token in tokens]
        self.special_token_ids, self.eos_token_id = specials, eos
        self._ids = {token: index for index, token in enumerate(self.tokens)}

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenize by the longest match at each position: any tokens of the bytes will do."""
        data, found, at = text.encode() if isinstance(text, str) else text, list[int](), 0
        while at < len(data):
            end = next(
                (end for end in range(at + LONGEST, at, -1) if data[at:end] in self._ids), at + 1
            )
            found += [self._ids[data[at:end]]] if data[at:end] in self._ids else []
            at = end
        return found


def serve(inbox: BinaryIO, outbox: BinaryIO) -> None:
    """Answer each grammar with llguidance's error message, or "", until the pipe is closed."""
    # Frames on stdin and stdout: a little-endian length of four bytes, then JSON; first the
    # vocabulary, then grammars.
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    first = receive(inbox)
    if first is None:
        return
    vocabulary = TrialVocabulary(first["tokens"], first["specials"], first["eos"][0])
    wrapped: Any = TokenizerWrapper(vocabulary)
    tokenizer = LLTokenizer(wrapped, n_vocab=len(vocabulary.tokens), eos_token=first["eos"])
    openings = [index for index, token in enumerate(vocabulary.tokens) if token in OPENINGS]
    send(outbox, "")
    while (request := receive(inbox)) is not None:
        limits = LLParserLimits(max_items_in_row=request["max_items"])
        matcher = LLMatcher(tokenizer, request["text"], log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        for token in openings if not matcher.is_error() else ():
            ahead = matcher.deep_copy()
            if ahead.try_consume_tokens([token]):
                ahead.compute_bitmask()
            if ahead.is_error():
                matcher = ahead
                break
        send(outbox, matcher.get_error() if matcher.is_error() else "")


def receive(inbox: BinaryIO) -> Any:
    """Read the next message; None: the pipe is closed."""
    head = inbox.read(LENGTH.size)
    return json.loads(inbox.read(*LENGTH.unpack(head))) if len(head) == LENGTH.size else None


def send(outbox: BinaryIO, fault: str) -> None:
    data = json.dumps(fault).encode()
    outbox.write(LENGTH.pack(len(data)) + data)
    outbox.flush()


def main() -> None:
    with suppress(OSError, ValueError):
        os.nice(NICER)
    # Linux ends this process, not the server, if a grammar takes all memory.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    for limit, maximum in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        with suppress(OSError, ValueError):
            resource.setrlimit(limit, (maximum, maximum))
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    worker.start()
    worker.join()


if __name__ == "__main__":
    main()
