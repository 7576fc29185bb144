"""What each key may hold of the directory of files and batches, so that none takes what is all
keys'."""

from __future__ import annotations

import attrs

from trouper.protocol.api_keys import Keys
from trouper.protocol.problems import Problem, RequestFailed

MAX_FILES = 10_000
"""Number of files of a key: a description of each is in memory. A batch counts as the two files
that it may leave."""
MAX_ENDED = 1000
"""Number of ended batches of a key that are remembered; its oldest are forgotten. Their files
stay."""


@attrs.frozen
class KeyShares:
    """The bounds of each key. One key alone may hold all of `max_bytes`; beside others half, unless
    its line says otherwise: so
    none can take all, and a lone client of a server with many keys has room."""

    keys: Keys
    max_bytes: int

    def of(self, owner: str) -> tuple[int, frozenset[str]]:
        """Return the bytes that an owner may hold, and all identities that its key has had."""
        key, owners = self.keys.clients_of(owner)
        if key is not None and key.max_batch_bytes is not None:
            return key.max_batch_bytes, owners
        return self.max_bytes // 2 if self.keys.several else self.max_bytes, owners


def no_room() -> RequestFailed:
    """The refusal of a file for which the directory has no room."""
    message = (
        "there is no room for the file: delete others, or start the server with a larger "
        "--batch-max-bytes"
    )
    return too_large(message, "no_room_for_file", "file")


def no_room_for_key(limit: int) -> RequestFailed:
    """The refusal of a file for which its key has no room."""
    message = (
        f"files and batches of this API key may take {limit} bytes: delete some; whoever runs the "
        "server gives it more by "
        "max_batch_bytes in --api-key-file, or all keys by --batch-max-bytes, of which each has "
        "half"
    )
    return too_large(message, "no_room_for_key", "file")


def require_number(files: int, param: str) -> None:
    """Raises `RequestFailed` (413) if a key may not have so many files."""
    if files > MAX_FILES:
        message = (
            f"a client may have {MAX_FILES} files, two of them for each batch that has not ended; "
            "delete some"
        )
        raise too_large(message, "too_many_files", param)


def too_large(message: str, code: str, param: str) -> RequestFailed:
    return RequestFailed(Problem(413, message, "invalid_request_error", param, code))
